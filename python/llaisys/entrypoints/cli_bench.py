"""`llaisys bench {ops,latency,throughput}`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from llaisys.entrypoints.cli_generate import add_model_options, open_llm

if TYPE_CHECKING:
    from llaisys.bench.ops import Result


def add_commands(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure operators, a model, or the engine")
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)

    ops = kinds.add_parser("ops", help="every kernel as a fraction of this machine's limits")
    ops.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    ops.add_argument("--model", action="append", help="shapes of this model only; may be repeated")
    ops.add_argument("--dtype", action="append", help="f32, f16 or bf16; may be repeated")
    ops.add_argument("--quick", action="store_true", help="fewer row counts")
    ops.add_argument("--json", action="store_true")
    ops.set_defaults(run=_ops)

    latency = kinds.add_parser("latency", help="one sequence: load, first token, prefill, decode")
    latency.add_argument("model", nargs="?", help="a model; the default one when left out")
    latency.add_argument("--shape", help="random weights of this shape, e.g. qwen2.5-0.5b")
    latency.add_argument("--dtype", default="auto", help="auto, f32, f16 or bf16")
    latency.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    latency.add_argument("--prompt-tokens", type=int, default=512)
    latency.add_argument("--new-tokens", type=int, default=64)
    latency.add_argument("--json", action="store_true")
    latency.set_defaults(run=_latency)

    throughput = kinds.add_parser("throughput", help="many requests at once")
    add_model_options(throughput)
    throughput.add_argument("--shape", help="random weights of this shape, e.g. qwen2.5-0.5b")
    throughput.add_argument("--concurrency", default="1,8,32", help="a list of numbers")
    throughput.add_argument("--prompt-tokens", type=int, default=128)
    throughput.add_argument("--new-tokens", type=int, default=64)
    throughput.add_argument("--repeats", type=int, default=5)
    throughput.add_argument("--json", action="store_true")
    throughput.set_defaults(run=_throughput)


def _ops(options: argparse.Namespace) -> int:
    from llaisys.bench.cases import run

    report = None if options.json else _print_result
    document = run(options.threads, options.model, options.dtype, options.quick, report)
    if options.json:
        print(json.dumps(document, indent=1))
    return 0


def _print_result(result: Result) -> None:
    print(
        f"{result.op:18s} {result.dtype:5s} {result.shape:38s} {result.rows:5d} "
        f"{result.value:10.2f} of {result.limit:9.2f} {result.unit:8s} {result.fraction:7.1%}",
        flush=True,
    )


def _latency(options: argparse.Namespace) -> int:
    from llaisys.bench.latency import LatencyOptions, run_latency

    result = run_latency(
        LatencyOptions(
            model=options.model,
            shape=options.shape,
            dtype=options.dtype,
            threads=options.threads,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
        )
    )
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:20s} {value}")
    return 0


def _throughput(options: argparse.Namespace) -> int:
    from llaisys.bench.throughput import run_throughput
    from llaisys.common.errors import InvalidInputError

    try:
        concurrencies = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--concurrency must be numbers with commas, got {options.concurrency!r}"
        ) from None
    if options.shape is not None:
        from llaisys.bench.latency import shape_model_path

        options.model = str(shape_model_path(options.shape, options.dtype))
    with open_llm(options) as llm:
        result = run_throughput(
            llm, concurrencies, options.prompt_tokens, options.new_tokens, options.repeats
        )
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return 0
    for run in result["runs"]:
        print("  ".join(f"{name} {value}" for name, value in run.items()))
    print("prefix cache", result["prefix_cache"])
    return 0
