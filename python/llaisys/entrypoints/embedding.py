"""`LLM.embed` and `LLM.score`: embeddings and their similarity."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.embedding import (
    EmbeddingFormat,
    EmbeddingOutput,
    Vector,
    cosine,
    pooling_params,
    score_of,
)
from llaisys.common.sampling import SCORE
from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_count
from llaisys.entrypoints.prompts import Prompt, PromptRunner, Work, as_batch
from llaisys.tokenization.pair import judge_text


class EmbeddingCalls(PromptRunner):
    """Mixin of `LLM`."""

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
        last token, the first token (`pooling="cls"`) or the mean over all tokens ("mean"; None: the
        model's pooling); truncated to `dimensions` values and L2-normalized unless `normalize` is
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
        """Score of each pair, or of one `text_1` with each `text_2`: that of a reranker, otherwise
        the cosine similarity of the embeddings."""
        first, second = as_batch(text_1, "text_1"), as_batch(text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise invalid_count("text_1", len(first), "texts", f"1 or {len(second)}, as text_2")
        if self.model_info.scores_pairs:
            return self._scores(first * (len(second) // len(first)), second, use_tqdm)
        found = self._pooled([*first, *second], pooling, EmbeddingFormat(), None, use_tqdm)
        vectors = [vector for _, vector in found]
        left = vectors[: len(first)] * (len(second) if len(first) == 1 else 1)
        return [cosine(a, b) for a, b in zip(left, vectors[len(first) :], strict=True)]

    def _scores(self, first: list[Prompt], second: list[Prompt], use_tqdm: bool) -> list[float]:
        work: list[Work] = []
        for pair in zip(first, second, strict=True):
            if self.model_info.judges_pairs:
                text = judge_text("text_1 + text_2", *pair)
                ids = self.tokenizer.judge_prompt(self.tokenizer.encode(text, False))
                work.append((ids, pooling_params(SCORE)))
                continue
            one, other = (
                self.tokenizer.encode(text, False) if isinstance(text, str) else text
                for text in pair
            )
            ids, second_text = self.tokenizer.join_pair(one, other)
            work.append((ids, pooling_params(SCORE, second_text)))
        return [score_of(output) for output in _finished(self._run(work, None, use_tqdm))]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None,
        form: EmbeddingFormat,
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[tuple[RequestOutput, Vector[float]]]:
        form.check(self.model_info)
        params = pooling_params(self.model_info.pooling if pooling is None else pooling)
        work: list[Work] = [(p, params) for p in as_batch(prompts)]
        outputs = _finished(self._run(work, cache_salt, use_tqdm))
        return [(output, form.embedding(output)) for output in outputs]


def _finished(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        if output.pooled is None:
            raise RuntimeError(f"{output.finish_reason}: {output.outputs[0].error}")
    return outputs
