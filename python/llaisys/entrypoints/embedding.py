"""`LLM.embed` and `LLM.score`: embeddings and their similarity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llaisys.common.embedding import (
    EmbeddingFormat,
    EmbeddingOutput,
    Vector,
    cosine,
    pooling_params,
)
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_count
from llaisys.entrypoints.prompts import Prompt, as_batch


class EmbeddingCalls(ABC):
    """Mixin of `LLM`."""

    _pooling: str  # the engine option

    @property
    @abstractmethod
    def model_info(self) -> Any: ...

    @abstractmethod
    def _run(
        self,
        work: list[tuple[Prompt, SamplingParams | None]],
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Outputs in the order of `work`."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Embeddings of prompts (texts or token ids), in their order: the last hidden state of the
        last token, or the mean over all tokens with `pooling="mean"` (None: the engine option
        `pooling`); truncated to `dimensions` values and L2-normalized unless `normalize` is
        false."""
        form = EmbeddingFormat(dimensions, normalize)
        outputs = self._pooled(prompts, pooling, form, cache_salt, use_tqdm)
        return [
            EmbeddingOutput(
                output.prompt_token_ids, vector.tolist(), output.outputs[0].num_cached_tokens
            )
            for output, vector in outputs
        ]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        use_tqdm: bool = False,
    ) -> list[float]:
        """Cosine similarity of the embeddings of each pair, or of one `text_1` with each
        `text_2`."""
        first, second = as_batch(text_1, "text_1"), as_batch(text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise invalid_count("text_1", len(first), "texts", f"1 or {len(second)}, as text_2")
        found = self._pooled([*first, *second], pooling, EmbeddingFormat(), None, use_tqdm)
        vectors = [vector for _, vector in found]
        left = vectors[: len(first)] * (len(second) if len(first) == 1 else 1)
        return [cosine(a, b) for a, b in zip(left, vectors[len(first) :], strict=True)]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None,
        form: EmbeddingFormat,
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[tuple[RequestOutput, Vector[float]]]:
        form.check(self.model_info)
        params = pooling_params(self._pooling if pooling is None else pooling)
        work: list[tuple[Prompt, SamplingParams | None]] = [(p, params) for p in as_batch(prompts)]
        outputs = self._run(work, cache_salt, use_tqdm)
        for output in outputs:
            if output.pooled is None:
                raise RuntimeError(f"{output.finish_reason}: {output.outputs[0].error}")
        return [(output, form.embedding(output)) for output in outputs]
