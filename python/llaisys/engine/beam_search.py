"""Beam search above the request interface of an engine.

Each step sends every beam as a request for one token with its most likely alternatives; the prefix
cache makes its tokens cheap. The score of a beam is the sum of its tokens' logprobs divided by
`length ** length_penalty`, where the length counts generated tokens without the stop token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llaisys.common.sampling import MAX_LOGPROBS, MAX_TOKENS, SamplingParams
from llaisys.common.types import CompletionOutput, RequestOutput, Timings, TokenLogprobs, Usage
from llaisys.common.validation import check_float, check_int

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # a step needs the logprobs of twice as many tokens
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search, as in vLLM."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearch:
    """The search of one prompt. Until `beams` is empty, call `prompts`, run them with
    `step_params`, and call `advance` with their outputs."""

    prompt: list[int]
    params: BeamSearchParams
    stop_ids: frozenset[int]
    num_logprobs: int = 0  # of each token, in the result
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)
    first_step: CompletionOutput | None = None

    @property
    def step_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=2 * self.params.beam_width,
            ignore_eos=True,
            detokenize=False,
        )

    def prompts(self) -> list[list[int]]:
        return [[*self.prompt, *beam.token_ids] for beam in self.beams]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend every beam by its most likely tokens and keep the best beams."""
        steps = [output.outputs[0] for output in outputs]
        if self.first_step is None:
            self.first_step = steps[0]
        failed = next((step for step in steps if not step.logprobs), None)
        if failed is not None:
            self._finish(failed.finish_reason or "abort")
            return
        longer: list[Beam] = []
        for beam, step in zip(self.beams, steps, strict=True):
            assert step.logprobs
            top = step.logprobs[0].top
            for rank, (token, logprob) in enumerate(top, 1):
                is_stop = token in self.stop_ids
                entry = TokenLogprobs.of(token, logprob, rank, top[: self.num_logprobs])
                found = Beam(
                    (*beam.token_ids, token),
                    (*beam.logprobs, entry),
                    beam.cumulative_logprob + logprob,
                    "stop" if is_stop else None,
                )
                (self.finished if is_stop else longer).append(found)
        self.beams = self._best(longer)
        self.finished = self._best(self.finished)
        if self.beams and len(self.beams[0].token_ids) >= self.params.max_tokens:
            self._finish("length")
        elif self._is_decided():
            self.beams = []

    def _finish(self, reason: str) -> None:
        """End the search; the beams so far are results."""
        ended = (
            Beam(beam.token_ids, beam.logprobs, beam.cumulative_logprob, reason)
            for beam in self.beams
        )
        self.finished, self.beams = self._best([*self.finished, *ended]), []

    def _is_decided(self) -> bool:
        """Whether no continuation can be better than the finished beams."""
        if len(self.finished) < self.params.beam_width:
            return False
        worst = self.score(self.finished[-1])
        power, most = self.params.length_penalty, self.params.max_tokens
        return all(
            beam.cumulative_logprob / (most if power > 0 else len(beam.token_ids)) ** power <= worst
            for beam in self.beams
        )

    def score(self, beam: Beam) -> float:
        length = len(beam.token_ids) - (beam.finish_reason == "stop")
        return float(beam.cumulative_logprob / max(1, length) ** self.params.length_penalty)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        """Return the best beams, best first; equal ones in the order of their beams."""
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    def output(
        self,
        request_id: str,
        count: int,
        text_of: Callable[[Sequence[int]], str],
        seconds: float | None = None,
    ) -> RequestOutput:
        """Return the `count` best results. `seconds`: duration of the search."""
        first = self.first_step
        cached = 0 if first is None else first.num_cached_tokens
        outputs = []
        for index, beam in enumerate(self.finished[:count]):
            hides_stop = beam.finish_reason == "stop" and not self.params.include_stop_str_in_output
            shown = beam.token_ids[:-1] if hides_stop else beam.token_ids
            outputs.append(
                CompletionOutput(
                    index,
                    text_of(shown),
                    list(beam.token_ids),
                    beam.finish_reason,
                    logprobs=list(beam.logprobs),
                    cumulative_logprob=beam.cumulative_logprob,
                    num_cached_tokens=cached,
                    timings=Timings() if first is None else first.timings,
                )
            )
            if seconds is not None:
                outputs[-1].timings.total = seconds
        tokens = sum(len(output.token_ids) for output in outputs)
        usage = Usage(len(self.prompt), tokens, cached)
        return RequestOutput(request_id, None, list(self.prompt), outputs, usage)
