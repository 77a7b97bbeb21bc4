"""Requests that run together, and the times of their decode steps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llaisys.common.sampling import SamplingParams
from llaisys.engine.llm_engine import LLMEngine
from llaisys.entrypoints.llm import LLM

Work = tuple[Sequence[int], SamplingParams]  # a prompt and its parameters


class Step(NamedTuple):
    seconds: float
    tokens: int
    is_full: bool  # every request got a token


@dataclass(slots=True)
class Decoding:
    """The answers of requests, and the steps after the last prompt was computed."""

    answers: dict[str, list[int]]  # request id -> token ids
    steps: list[Step] = field(default_factory=list)

    def tok_s(self, only_full: bool = False) -> float:
        """Tokens per second; 0 without steps. `only_full`: of the steps of all requests."""
        steps = [step for step in self.steps if step.is_full or not only_full]
        seconds = sum(step.seconds for step in steps)
        return sum(step.tokens for step in steps) / seconds if seconds else 0.0

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(step.seconds for step in self.steps)


def fixed_length(new_tokens: int, **more: Any) -> SamplingParams:
    """Parameters of a greedy answer of exactly this many tokens."""
    fixed = {"ignore_eos": True, "temperature": 0.0, "detokenize": False}
    return SamplingParams(max_tokens=new_tokens, **fixed | more)


def request_names(count: int) -> list[str]:
    return [f"r{index}" for index in range(count)]


def decode(engine: LLM | LLMEngine, work: Sequence[Work]) -> Decoding:
    """Run requests to their ends; they have the ids of `request_names`."""
    names = request_names(len(work))
    for name, (prompt, params) in zip(names, work, strict=True):
        engine.submit(prompt, params, request_id=name, stream=True)
    found = Decoding({name: [] for name in names})
    while engine.has_unfinished():
        is_decoding = all(found.answers.values())
        begin = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - begin
        for output in outputs:
            found.answers[output.request_id] += output.token_ids
        if is_decoding:
            sampled = {output.request_id for output in outputs if output.token_ids}
            tokens = sum(len(output.token_ids) for output in outputs)
            found.steps.append(Step(seconds, tokens, len(sampled) == len(names)))
    if isinstance(engine, LLM):
        for name in names:
            engine.collect(name)
    return found
