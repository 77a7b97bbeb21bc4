"""`llaisys bench structured`: the same requests with and without a JSON schema, interleaved: cost
of a mask per step, and time until a grammar is compiled."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from llaisys.bench.decoding import Decoding, decode, fixed_length
from llaisys.common.progress import report
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
            plain = _timed(llm, concurrency, new_tokens, None)
            pairs.append(
                (plain, _timed(llm, concurrency, new_tokens, StructuredOutputs(json=SCHEMA)))
            )
        results.append(_summary(concurrency, pairs, first_ms))
    return results


def _timed(llm: LLM, count: int, new_tokens: int, constraint: StructuredOutputs | None) -> Decoding:
    params = fixed_length(new_tokens, structured_outputs=constraint)
    prompts = [llm.tokenize(f"Task {index + 1}. {TEXT}") for index in range(count)]
    return decode(llm, [(prompt, params) for prompt in prompts])


def _best_ms(runs: Sequence[Decoding]) -> float:
    """The 10th percentile of the steps of all runs."""
    times = sorted(step.seconds for run in runs for step in run.steps)
    return round(1e3 * times[len(times) // 10], 3)


def _summary(
    concurrency: int, pairs: list[tuple[Decoding, Decoding]], first_ms: float
) -> dict[str, Any]:
    """Medians of pairs, without and with the schema; `first_ms`: of the first request with a schema
    (tables and compilation)."""
    plain, constrained = zip(*pairs, strict=True)
    lost = median(1 - after.tok_s() / before.tok_s() for before, after in pairs)
    longer = median(after.step_ms - before.step_ms for before, after in pairs)
    return {
        "concurrency": concurrency,
        "tok_s": round(median(run.tok_s() for run in constrained), 2),
        "plain_tok_s": round(median(run.tok_s() for run in plain), 2),
        "overhead_percent": round(100 * lost, 2),  # of throughput
        "step_ms": round(median(run.step_ms for run in constrained), 3),
        "plain_step_ms": round(median(run.step_ms for run in plain), 3),
        "overhead_ms": round(longer, 3),  # per step
        "best_step_ms": _best_ms(constrained),
        "plain_best_step_ms": _best_ms(plain),
        "first_ms": round(first_ms, 1),
    }
