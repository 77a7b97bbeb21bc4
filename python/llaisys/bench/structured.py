"""`llaisys bench structured`: the same requests with and without a JSON schema, interleaved: cost
of a mask per step, and time until a grammar is compiled."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from llaisys.common.progress import report
from llaisys.common.sampling import SamplingParams
from llaisys.common.structured import StructuredOutputs
from llaisys.entrypoints.llm import LLM

# A list too long for any run to complete, with common schema elements.
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["ship", "ferry", "boat"]},
            "length": {"type": "number"},
            "crew": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        },
        "required": ["name", "kind", "length", "crew"],
        "additionalProperties": False,
    },
}
TEXT = "Describe the ships of a harbour as a JSON list."


@dataclass(frozen=True, slots=True)
class StructuredRun:
    concurrency: int
    tok_s: float
    plain_tok_s: float
    overhead_percent: float  # of throughput; median of pairs
    step_ms: float
    plain_step_ms: float
    overhead_ms: float  # per step; median of pairs
    best_step_ms: float  # 10th percentile of all runs
    plain_best_step_ms: float
    first_ms: float  # of the first request with a schema: tables and compilation


@dataclass(frozen=True, slots=True)
class _Timing:
    tok_s: float
    times: list[float]  # seconds of each step

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.times)


def run_structured(
    llm: LLM, concurrencies: list[int], new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    start = time.perf_counter()
    _timed(llm, 1, 1, StructuredOutputs(json=SCHEMA))
    first_ms = 1e3 * (time.perf_counter() - start)
    results = []
    for number, concurrency in enumerate(concurrencies):
        pairs = []
        for done in range(repeats):
            report("measuring", number * repeats + done, len(concurrencies) * repeats)
            pairs.append(
                (
                    _timed(llm, concurrency, new_tokens, None),
                    _timed(llm, concurrency, new_tokens, StructuredOutputs(json=SCHEMA)),
                )
            )
        results.append(asdict(_summary(concurrency, pairs, first_ms)))
    return results


def _timed(llm: LLM, count: int, new_tokens: int, constraint: StructuredOutputs | None) -> _Timing:
    """Times of the decode steps after all prompts are computed."""
    prompts = [llm.tokenize(f"Task {index + 1}. {TEXT}") for index in range(count)]
    params = SamplingParams(
        max_tokens=new_tokens,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        structured_outputs=constraint,
    )
    names = [llm.submit(prompt, params, stream=True) for prompt in prompts]
    started: set[str] = set()
    times, decoded = [], 0
    while llm.has_unfinished():
        is_decoding = len(started) == count
        begin = time.perf_counter()
        outputs = llm.step()
        if is_decoding:
            times.append(time.perf_counter() - begin)
            decoded += sum(len(output.token_ids) for output in outputs)
        started.update(output.request_id for output in outputs if output.token_ids)
    for name in names:
        llm.collect(name)
    return _Timing(decoded / max(sum(times), 1e-9), times)


def _best_ms(runs: list[_Timing]) -> float:
    times = sorted(seconds for run in runs for seconds in run.times)
    return round(1e3 * times[len(times) // 10], 3)


def _summary(
    concurrency: int, pairs: list[tuple[_Timing, _Timing]], first_ms: float
) -> StructuredRun:
    lost = statistics.median(1 - constrained.tok_s / plain.tok_s for plain, constrained in pairs)
    longer = statistics.median(constrained.step_ms - plain.step_ms for plain, constrained in pairs)
    return StructuredRun(
        concurrency=concurrency,
        tok_s=round(statistics.median(constrained.tok_s for _, constrained in pairs), 2),
        plain_tok_s=round(statistics.median(plain.tok_s for plain, _ in pairs), 2),
        overhead_percent=round(100 * lost, 2),
        step_ms=round(statistics.median(constrained.step_ms for _, constrained in pairs), 3),
        plain_step_ms=round(statistics.median(plain.step_ms for plain, _ in pairs), 3),
        overhead_ms=round(longer, 3),
        best_step_ms=_best_ms([constrained for _, constrained in pairs]),
        plain_best_step_ms=_best_ms([plain for plain, _ in pairs]),
        first_ms=round(first_ms, 1),
    )
