"""The base of `LLM`: prompts and parameters, beam search, embeddings and scores."""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llaisys.common.embedding import (
    EmbeddingFormat,
    EmbeddingOutput,
    Vector,
    cosine,
    pooling_params,
    score_of,
)
from llaisys.common.sampling import SCORE, SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_count, invalid_value
from llaisys.engine.beam_search import BeamSearch, BeamSearchParams
from llaisys.tokenization.pair import judge_text

Prompt = str | Sequence[int]
Work = tuple[Prompt, SamplingParams | None]
Params = SamplingParams | Sequence[SamplingParams | None] | None
Lora = str | Sequence[str | None] | None


def as_batch(prompts: Prompt | Sequence[Prompt], name: str = "prompts") -> list[Prompt]:
    """A list of prompts from one prompt (a text or token ids) or many. `name`: for errors."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        raise invalid_value(name, prompts, "a string, a list of token ids, or a list of either")
    items = list(prompts)
    if not items:
        raise invalid_count(name, 0, "prompts", "at least 1")
    if all(isinstance(item, str) or hasattr(item, "__iter__") for item in items):
        return items  # type: ignore[return-value]
    return [items]  # type: ignore[list-item]


def as_params(params: Params, count: int) -> list[SamplingParams | None]:
    limit = "SamplingParams or a list"
    return _per_prompt("sampling_params", params, SamplingParams, count, limit)


def as_loras(lora: Lora, count: int) -> list[str | None]:
    return _per_prompt("lora", lora, str, count, "the name of an adapter, or a list")


def _per_prompt(name: str, value: Any, one: type, count: int, limit: str) -> list[Any]:
    """One entry per prompt; a single value applies to all."""
    if value is None or isinstance(value, one):
        return [value] * count
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise invalid_value(name, value, limit)
    if len(value) != count:
        raise invalid_count(name, len(value), "entries", f"{count}, one per prompt")
    return list(value)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of a step, so that it leaves no inconsistent state."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            previous(*caught[0])


@contextmanager
def progress_bar(total: int, enabled: bool) -> Iterator[Any]:
    """Yield a function to call with the number of finished prompts."""
    if not enabled:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt") as bar:
        yield bar.update


class PromptCalls(ABC):
    """Base of `LLM`: calls that are built on its `_run`."""

    @property
    @abstractmethod
    def model_info(self) -> Any: ...

    @property
    @abstractmethod
    def tokenizer(self) -> Any: ...

    @abstractmethod
    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def _run(self, work: list[Work], cache_salt: str | None, use_tqdm: bool) -> list[RequestOutput]:
        """Outputs in the order of `work`."""

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """The `beam_width` most likely continuations of each prompt, best first; see
        `llaisys.engine.beam_search`."""
        if not isinstance(params, BeamSearchParams):
            raise invalid_value("params", params, "BeamSearchParams")
        info, tokenizer = self.model_info, self.tokenizer
        stops = frozenset() if params.ignore_eos else frozenset(info.eos_token_ids)
        searches = []
        for prompt in as_batch(prompts):
            ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
            if len(ids) + params.max_tokens > info.max_model_len:
                most = f"at most {info.max_model_len}"
                count = len(ids) + params.max_tokens
                raise invalid_count("prompts", count, "tokens with max_tokens", most)
            searches.append(BeamSearch(ids, params, stops))
        while active := [search for search in searches if search.beams]:
            work: list[Work] = [
                (prompt, search.step_params) for search in active for prompt in search.prompts()
            ]
            outputs = iter(self._run(work, cache_salt, False))
            for search in active:
                search.advance([next(outputs) for _ in search.beams])

        def text_of(tokens: Sequence[int]) -> str:
            return "" if tokenizer is None else str(tokenizer.decode_tokens(tokens))

        return [
            search.output(f"beams-{number}", params.beam_width, text_of)
            for number, search in enumerate(searches)
        ]

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
    ) -> list[tuple[RequestOutput, Vector]]:
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
