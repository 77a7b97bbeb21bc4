"""Runs the benchmarks of `llaisys bench` and prints, saves, compares and plots their results."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
from llaisys.engine.config import DTYPES, EngineConfig, given_engine_options
from llaisys.entrypoints.cli_options import (
    LATENCY_OPTIONS,
    OPS_OPTIONS,
    PERPLEXITY_OPTIONS,
    open_llm,
)

NO_ENGINE = "this runs {} without the engine; bench throughput takes every option"
SIMULATED_PROMPT = 128  # tokens
FIRST_OF_TWO = 0.45  # gpu_memory_utilization of the first of two engines in a process


def _finish(
    options: argparse.Namespace, document: Any, text: str, charts: Sequence[Chart] = ()
) -> None:
    """Print the result as text or JSON, compare it, save it and plot it."""
    before = None
    if options.compare is not None:
        before = load_result(Path(options.compare), options.kind)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print(text)
    if before is not None:
        table = format_comparison(before["result"], document)
        heading = f"\ncompared with {options.compare} of {before['date']}"
        print(f"{heading}\n{table}", file=sys.stderr if options.json else sys.stdout)
    if options.save is not None:
        save_result(Path(options.save), options.kind, document)
    if getattr(options, "plot", None) is not None:
        write_text(Path(options.plot), svg_page(charts), "plot")


def run_ops(options: argparse.Namespace) -> int:
    from llaisys.bench.machine import describe_machine
    from llaisys.bench.ops import run_ops as measure
    from llaisys.engine.executor.device_choice import resolve_device

    given = given_engine_options(options, only=OPS_OPTIONS, because=NO_ENGINE.format("operators"))
    others = [name for name in options.dtypes or () if name not in DTYPES]
    cpu_reason = f"dtype {others[0]} is timed on the CPU only" if others else ""
    engine = resolve_device(EngineConfig.of(**given), cpu_reason=cpu_reason)
    with show_progress(sys.stderr):
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
    _finish(options, document, text, [roofline_chart(asdict(machine), timings, machine)])
    return 0


def run_latency(options: argparse.Namespace) -> int:
    from llaisys.bench.latency import LatencyOptions
    from llaisys.bench.latency import run_latency as measure

    given = given_engine_options(
        options,
        only=LATENCY_OPTIONS,
        because=NO_ENGINE.format("one sequence of a model"),
    )
    with show_progress(sys.stderr):
        result = measure(
            LatencyOptions(
                engine=EngineConfig.of(model=options.model, **given),
                shape=options.shape,
                prompt_tokens=options.prompt_tokens,
                new_tokens=options.new_tokens,
            )
        )
    stages = result["stage_ms_per_token"]
    shown = {name: value for name, value in result.items() if name != "stage_ms_per_token"}
    if not options.profile:
        _finish(options, shown, format_fields(shown))
        return 0
    times = {f"{name}_ms_per_token": value for name, value in stages.items()}
    _finish(options, result, format_fields(shown | times))
    return 0


def run_throughput(options: argparse.Namespace) -> int:
    from llaisys.bench.throughput import run_throughput as measure

    concurrencies = _concurrencies(options)
    if options.shape is not None:
        options.model = _shape_model(options)
    with open_llm(options) as llm, show_progress(sys.stderr):
        result = measure(
            llm,
            concurrencies,
            options.prompt_tokens,
            options.new_tokens,
            options.repeats,
            options.profile,
        )
    runs = result["runs"]
    parts = [
        format_table(
            [{k: v for k, v in run.items() if k != "stage_ms_per_step"} for run in runs]
        )
    ]  # fmt: skip
    for run in runs if options.profile else ():
        times = {f"{name}_ms_per_step": v for name, v in run["stage_ms_per_step"].items()}
        parts.append(f"\nstages at concurrency {run['concurrency']}\n{format_fields(times)}")
    if prefix := result["prefix_cache"]:
        rate = quantity("hit_rate", prefix["hit_rate"])
        parts.append(f"\nshared prefixes: hit rate {rate}, prefill {prefix['speedup']} x as fast")
    _finish(options, result, "\n".join(parts), throughput_charts(runs))
    return 0


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


def run_speculative(options: argparse.Namespace) -> int:
    """Return 1 if drafts change an output."""
    from llaisys.bench.simulated import run_simulated
    from llaisys.bench.speculative import run_speculative as measure

    concurrencies = _concurrencies(options)
    if options.simulate is not None:
        with show_progress(sys.stderr):
            runs = run_simulated(
                options.model if options.shape is None else _shape_model(options),
                given_engine_options(options),
                options.simulate,
                concurrencies,
                SIMULATED_PROMPT,
                options.new_tokens,
            )
        _finish(options, runs, format_table(runs))
        return 0 if all(run["same_tokens"] for run in runs) else 1
    if options.shape is not None:
        options.model = _shape_model(options)
    if options.speculative_config is None:
        options.speculative_config = {}
    fraction = options.gpu_memory_utilization
    if fraction is None:  # both engines share a GPU
        options.gpu_memory_utilization = FIRST_OF_TWO
    with open_llm(options) as drafted:
        options.speculative_config = None
        options.gpu_memory_utilization = fraction
        with open_llm(options) as plain, show_progress(sys.stderr):
            runs = measure(
                drafted,
                plain,
                concurrencies,
                options.new_tokens,
                options.repeats,
                is_random=options.shape is not None,
            )
    _finish(options, runs, format_table(runs))
    return 0 if all(run["same_tokens"] for run in runs) else 1


def run_structured(options: argparse.Namespace) -> int:
    from llaisys.bench.structured import run_structured as measure

    concurrencies = _concurrencies(options)
    with open_llm(options) as llm, show_progress(sys.stderr):
        runs = measure(llm, concurrencies, options.new_tokens, options.repeats)
    _finish(options, runs, format_table(runs))
    return 0


def run_perplexity(options: argparse.Namespace) -> int:
    from llaisys.bench.perplexity import PerplexityOptions
    from llaisys.bench.perplexity import run_perplexity as measure

    given = given_engine_options(
        options, only=PERPLEXITY_OPTIONS, because=NO_ENGINE.format("a model")
    )
    with show_progress(sys.stderr):
        result = measure(
            PerplexityOptions(
                file=Path(options.file),
                engine=EngineConfig.of(model=options.model, **given),
                reference=options.reference,
                reference_dtype=options.reference_dtype,
                context=check_int("context", options.context, 4, 1 << 20),
                chunks=check_int("chunks", options.chunks, 0, 1 << 40),
            )
        )
    _finish(options, result, format_fields(result))
    return 0


def run_questions(options: argparse.Namespace) -> int:
    from llaisys.bench.questions import GREEDY, QUESTIONS
    from llaisys.bench.questions import run_questions as measure

    most = check_int("new_tokens", options.new_tokens, 1, 1 << 20)
    with open_llm(options) as llm, show_progress(sys.stderr):
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
    _finish(options, rows, "\n".join(parts))
    return 0


def run_serve(options: argparse.Namespace) -> int:
    """Return 1 if no request succeeds."""
    from llaisys.bench.serve import ServeOptions
    from llaisys.bench.serve import run_serve as measure

    names = ("url", "model", "rate", "requests", "prompt_tokens", "new_tokens", "plain", "timeout")
    given = {name: getattr(options, name) for name in (*names, "insecure", "seed")}
    given["api_key"] = (
        options.api_key or os.environ.get("LLAISYS_API_KEY", "").split(",")[0] or None
    )
    given["chat"] = options.endpoint == "chat"
    with show_progress(sys.stderr):
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
        parts.append(
            format_table(
                [
                    {"latency": name, **{f"{p}_ms": v for p, v in found[key].items()}}
                    for name, key in (
                        ("first token", "ttft_ms"),
                        ("between tokens", "itl_ms"),
                        ("whole answer", "e2e_ms"),
                    )
                ]
            )
        )
        parts.append(f"errors {found['errors']}")
        parts += [f"  {count} x {reason}" for reason, count in result.reasons.most_common()]
        parts.append("")
        if options.json:
            for reason, count in result.reasons.most_common():
                print(f"  {count} x {reason}", file=sys.stderr)
    reports = [result.report for result in results]
    document = reports[0] if len(reports) == 1 else {"runs": reports}
    _finish(options, document, "\n".join(parts).rstrip(), serve_charts(reports))
    return 0 if any(found["errors"] < found["requests"] for found in reports) else 1
