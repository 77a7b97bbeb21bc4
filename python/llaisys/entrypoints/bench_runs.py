"""Runs the benchmarks of `llaisys bench` and prints, saves, compares and plots their results."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llaisys.bench.plot import Chart, roofline_chart, serve_charts, svg_page, throughput_charts
from llaisys.bench.report import (
    format_comparison,
    format_fields,
    format_table,
    load_result,
    quantity,
    save_result,
    write_text,
)
from llaisys.common.progress import show_progress
from llaisys.common.validation import check_int, invalid_value
from llaisys.engine.config import DTYPES, EngineConfig
from llaisys.engine.engine_flags import given_engine_options
from llaisys.entrypoints.cli_options import (
    LATENCY_OPTIONS,
    OPS_OPTIONS,
    PERPLEXITY_OPTIONS,
    open_llm,
)

NO_ENGINE = "this runs {} without the engine; bench throughput takes every option"
SIMULATED_PROMPT = 128  # tokens
LATENCIES = {"first token": "ttft_ms", "between tokens": "itl_ms", "whole answer": "e2e_ms"}
FIRST_OF_TWO = 0.45  # gpu_memory_utilization of the first of two engines in a process


@dataclass(frozen=True, slots=True)
class Outcome:
    document: Any  # printed by --json, saved and compared
    text: str
    charts: Sequence[Chart] = ()
    failed: bool = False


def run(options: argparse.Namespace) -> int:
    """Run a benchmark, print its result as text or JSON, compare it, save it and plot it."""
    before = None
    if options.compare is not None:
        before = load_result(Path(options.compare), options.kind)
    with show_progress(sys.stderr):
        found = RUNS[options.kind](options)
    print(json.dumps(found.document, indent=1) if options.json else found.text)
    if before is not None:
        table = format_comparison(before["result"], found.document)
        heading = f"\ncompared with {options.compare} of {before['date']}"
        print(f"{heading}\n{table}", file=sys.stderr if options.json else sys.stdout)
    if options.save is not None:
        save_result(Path(options.save), options.kind, found.document)
    if getattr(options, "plot", None) is not None:
        write_text(Path(options.plot), svg_page(found.charts), "plot")
    return int(found.failed)


def _ops(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.machine import describe_machine
    from llaisys.bench.ops import run_ops as measure
    from llaisys.engine.executor.device_choice import resolve_device

    given = given_engine_options(options, only=OPS_OPTIONS, because=NO_ENGINE.format("operators"))
    others = [name for name in options.dtypes or () if name not in DTYPES]
    cpu_reason = f"dtype {others[0]} is timed on the CPU only" if others else ""
    engine = resolve_device(EngineConfig.of(**given), cpu_reason=cpu_reason)
    machine, timings = measure(
        *(engine.device, engine.n_threads, options.models, options.dtypes, options.quick)
    )
    results = [timing.against(machine) for timing in timings]
    rows = [
        {
            **{name: result[name] for name in ("op", "dtype", "shape", "rows", "microseconds")},
            "speed": f"{result['value']:,.1f} of {result['limit']:,.1f} {result['unit']}",
            "fraction": result["fraction"],
        }
        for result in results
    ]
    text = f"{describe_machine(machine)}\n\n{format_table(rows)}"
    document = {"machine": asdict(machine), "results": results}
    return Outcome(document, text, [roofline_chart(asdict(machine), timings, machine)])


def _latency(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.latency import run_latency as measure

    given = given_engine_options(
        options,
        only=LATENCY_OPTIONS,
        because=NO_ENGINE.format("one sequence of a model"),
    )
    engine = EngineConfig.of(model=options.model, **given)
    result = measure(engine, options.shape, options.prompt_tokens, options.new_tokens)
    shown = {name: value for name, value in result.items() if name != "stage_ms_per_token"}
    if not options.profile:
        return Outcome(shown, format_fields(shown))
    times = {f"{name}_ms_per_token": ms for name, ms in result["stage_ms_per_token"].items()}
    return Outcome(result, format_fields(shown | times))


def _throughput(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.throughput import run_throughput as measure

    concurrencies = _concurrencies(options)
    if options.shape is not None:
        options.model = _shape_model(options)
    counts = (options.prompt_tokens, options.new_tokens, options.repeats)
    with open_llm(options) as llm:
        result = measure(llm, concurrencies, *counts, options.profile)
    runs = result["runs"]
    rows = [{k: v for k, v in run.items() if k != "stage_ms_per_step"} for run in runs]
    parts = [format_table(rows)]
    for run in runs if options.profile else ():
        times = {f"{name}_ms_per_step": v for name, v in run["stage_ms_per_step"].items()}
        parts.append(f"\nstages at concurrency {run['concurrency']}\n{format_fields(times)}")
    if prefix := result["prefix_cache"]:
        rate = quantity("hit_rate", prefix["hit_rate"])
        parts.append(f"\nshared prefixes: hit rate {rate}, prefill {prefix['speedup']} x as fast")
    return Outcome(result, "\n".join(parts), throughput_charts(runs))


def _concurrencies(options: argparse.Namespace) -> list[int]:
    try:
        found = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise invalid_value(
            "concurrency", options.concurrency, "integers of at least 1, separated by commas"
        )
    return found


def _shape_model(options: argparse.Namespace) -> str:
    from llaisys.bench.latency import shape_model_path

    return str(shape_model_path(options.shape, options.dtype or "auto"))


def _speculative(options: argparse.Namespace) -> Outcome:
    """Fails if drafts change an output."""
    from llaisys.bench.simulated import run_simulated
    from llaisys.bench.speculative import run_speculative as measure

    concurrencies = _concurrencies(options)
    if options.shape is not None:
        options.model = _shape_model(options)
    if options.simulate is not None:
        given, counts = given_engine_options(options), (SIMULATED_PROMPT, options.new_tokens)
        runs = run_simulated(options.model, given, options.simulate, concurrencies, *counts)
    else:
        if options.speculative_config is None:
            options.speculative_config = {}
        fraction = options.gpu_memory_utilization
        if fraction is None:  # both engines share a GPU
            options.gpu_memory_utilization = FIRST_OF_TWO
        with open_llm(options) as drafted:
            options.speculative_config = None
            options.gpu_memory_utilization = fraction
            is_random = options.shape is not None
            counts = (options.new_tokens, options.repeats)
            with open_llm(options) as plain:
                runs = measure(drafted, plain, concurrencies, *counts, is_random=is_random)
    is_changed = any(not run["same_tokens"] for run in runs)
    return Outcome(runs, format_table(runs), failed=is_changed)


def _structured(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.structured import run_structured as measure

    concurrencies = _concurrencies(options)
    with open_llm(options) as llm:
        runs = measure(llm, concurrencies, options.new_tokens, options.repeats)
    return Outcome(runs, format_table(runs))


def _perplexity(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.perplexity import run_perplexity as measure

    given = given_engine_options(
        options, only=PERPLEXITY_OPTIONS, because=NO_ENGINE.format("a model")
    )
    result = measure(
        Path(options.file),
        EngineConfig.of(model=options.model, **given),
        options.reference,
        options.reference_dtype,
        check_int("context", options.context, 4, 1 << 20),
        check_int("chunks", options.chunks, 0, 1 << 40),
    )
    return Outcome(result, format_fields(result))


def _questions(options: argparse.Namespace) -> Outcome:
    from llaisys.bench.questions import GREEDY, QUESTIONS
    from llaisys.bench.questions import run_questions as measure

    most = check_int("new_tokens", options.new_tokens, 1, 1 << 20)
    with open_llm(options) as llm:
        samplings = [("greedy", GREEDY), ("defaults", llm.default_sampling)]
        scores = measure(llm, samplings, most)
    rows = [
        {
            "sampling": score.name,
            "right": score.right,
            "questions": len(QUESTIONS),
            "loops": score.loops,
            "cut_off": score.cut_off,
        }
        for score in scores
    ]
    parts = [format_table(rows)]
    for score in scores if options.answers else ():
        for (question, _), is_right, answer in zip(
            QUESTIONS, score.are_right, score.answers, strict=True
        ):
            mark = "right" if is_right else "wrong"
            parts.append(f"\n[{score.name}, {mark}] {question}\n{answer.strip()}")
    return Outcome(rows, "\n".join(parts))


def _serve(options: argparse.Namespace) -> Outcome:
    """Fails if no request succeeds."""
    from llaisys.bench.serve import ServeOptions
    from llaisys.bench.serve import run_serve as measure

    names = ("url", "model", "rate", "requests", "prompt_tokens", "new_tokens", "plain", "timeout")
    given = {name: getattr(options, name) for name in (*names, "insecure", "seed")}
    given["api_key"] = (
        options.api_key or os.environ.get("LLAISYS_API_KEY", "").split(",")[0] or None
    )
    given["chat"] = options.endpoint == "chat"
    results = [
        measure(ServeOptions(concurrency=concurrency, **given))
        for concurrency in _concurrencies(options)
    ]
    parts = []
    for result in results:
        found = result.report
        parts.append(
            f"{found['requests']} requests, concurrency {found['concurrency']}, "
            f"{result.prompt_tokens:.0f} + {result.new_tokens:.1f} tokens each, "
            f"{found['duration_s']:.2f} s" + ("" if result.ignored_eos else ", may end early")
        )
        parts.append(f"throughput {quantity('tok_s', found['throughput_tok_s'])}")
        rows = [
            {"latency": name, **{f"{percentile}_ms": ms for percentile, ms in found[key].items()}}
            for name, key in LATENCIES.items()
        ]
        reasons = [f"  {count} x {reason}" for reason, count in result.reasons.most_common()]
        parts += [format_table(rows), f"errors {found['errors']}", *reasons, ""]
        if options.json and reasons:
            print("\n".join(reasons), file=sys.stderr)
    reports = [result.report for result in results]
    document = reports[0] if len(reports) == 1 else {"runs": reports}
    no_success = all(found["errors"] == found["requests"] for found in reports)
    return Outcome(document, "\n".join(parts).rstrip(), serve_charts(reports), no_success)


RUNS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    "ops": _ops,
    "latency": _latency,
    "throughput": _throughput,
    "speculative": _speculative,
    "structured": _structured,
    "perplexity": _perplexity,
    "questions": _questions,
    "serve": _serve,
}
