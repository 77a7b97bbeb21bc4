"""`llaisys bench`: the options of each benchmark. `bench_runs` runs them."""

import argparse
from typing import Any

from llaisys.common.flags import OptionParser, add_model_argument
from llaisys.engine.engine_flags import add_engine_flags
from llaisys.entrypoints.cli_options import (
    LATENCY_OPTIONS,
    OPS_OPTIONS,
    PERPLEXITY_OPTIONS,
    add_model_options,
)

SHAPE = "Random weights of this shape, e.g. qwen2.5-0.5b"


def add_commands(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="Benchmark operators, a model, the engine or a server",
        description="Benchmark operators, a model, the engine or a server.",
    )  # fmt: skip
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True, title="benchmarks")

    ops = _add(kinds, "ops", "Benchmark kernels against the limits of this machine")
    ops.add_argument(
        "--model", dest="models", action="append", metavar="NAME",
        help="Shapes of this model only; repeatable",
    )  # fmt: skip
    ops.add_argument(
        "--dtype", dest="dtypes", action="append", metavar="TYPE",
        help="Data type: f32, bf16, q4_0, ...; repeatable",
    )  # fmt: skip
    _add_plot(ops, "roofline")
    ops.add_argument("--quick", action="store_true", help="Fewer row counts")
    add_engine_flags(ops, without=("dtype",), shown=OPS_OPTIONS)

    latency = _add(kinds, "latency", "One sequence: load, time to first token, prefill, decode")
    add_model_argument(latency)
    latency.add_argument("--shape", metavar="NAME", help=SHAPE)
    _add_count(latency, "--prompt-tokens", 512, "Prompt length, in tokens", "--input-len")
    _add_count(latency, "--new-tokens", 64, "Output length, in tokens", "--output-len")
    latency.add_argument("--profile", action="store_true", help="Report the time of each stage")
    add_engine_flags(latency, shown=LATENCY_OPTIONS)

    throughput = _add(kinds, "throughput", "Many requests at once")
    _add_plot(throughput, "throughput against concurrency")
    throughput.add_argument("--shape", metavar="NAME", help=SHAPE)
    _add_count(throughput, "--prompt-tokens", 128, "Prompt length, in tokens", "--input-len")
    throughput.add_argument("--profile", action="store_true", help="Report the time of each stage")
    _add_load(throughput, concurrency="1,8,32", new_tokens=64, repeats=5)

    speculative = _add(kinds, "speculative", "The same requests with and without draft tokens")
    _add_load(speculative, concurrency="1,8", new_tokens=128, repeats=3)
    speculative.add_argument(
        "--simulate", type=float, metavar="RATE", help="Simulate drafts with this acceptance rate"
    )
    speculative.add_argument("--shape", metavar="NAME", help=SHAPE)

    structured = _add(kinds, "structured", "Requests with and without a JSON schema")
    _add_load(structured, concurrency="1,8", new_tokens=128, repeats=5)
    _add_perplexity(kinds)
    about = "Score on thirty plain questions: greedy and default sampling"
    questions = _add(kinds, "questions", about)
    add_model_options(questions)
    _add_count(questions, "--new-tokens", 128, "Longest answer, in tokens", "--output-len")
    questions.add_argument("--answers", action="store_true", help="Print every answer")
    _add_serve(kinds)


def _run(options: argparse.Namespace) -> int:
    from llaisys.entrypoints.bench_runs import run

    return run(options)


def _add(kinds: Any, name: str, help: str) -> OptionParser:
    parser: OptionParser = kinds.add_parser(name, help=help, description=help + ".")
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("--save", metavar="FILE", help="Write the result for --compare")
    parser.add_argument("--compare", metavar="FILE", help="Compare with a result of --save")
    parser.set_defaults(run=_run)
    return parser


def _add_plot(parser: OptionParser, what: str) -> None:
    parser.add_argument("--plot", metavar="FILE", help=f"Write an SVG file: {what}")


def _add_count(parser: OptionParser, flag: str, default: int, help: str, *aliases: str) -> None:
    text = f"{help} (default: {default})"
    parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    for alias in aliases:
        parser.accept_alias(alias, flag)


def _add_load(parser: OptionParser, *, concurrency: str, new_tokens: int, repeats: int) -> None:
    """Add the options of every benchmark of the engine under load, with these defaults."""
    add_model_options(parser)
    parser.add_argument(
        "--concurrency", default=concurrency, metavar="N,N",
        help=f"Concurrent requests of each run (default: {concurrency})",
    )  # fmt: skip
    _add_count(parser, "--new-tokens", new_tokens, "Output length, in tokens", "--output-len")
    _add_count(parser, "--repeats", repeats, "Runs of each measurement", "--num-iters")


def _add_perplexity(kinds: Any) -> None:
    parser = _add(kinds, "perplexity", "Perplexity of a model on a text file")
    add_model_argument(parser)
    parser.add_argument("--file", required=True, metavar="FILE", help="UTF-8 text")
    _add_count(parser, "--context", 512, "Chunk length, in tokens", "--ctx-size", "-c")
    _add_count(parser, "--chunks", 0, "Maximum chunks; 0: all")
    parser.add_argument(
        "--reference", metavar="MODEL", help="Model to compare with (default: the same model)"
    )
    parser.add_argument(
        "--reference-dtype", choices=["f32", "f16", "bf16"], help="Data type of the reference"
    )
    add_engine_flags(parser, shown=PERPLEXITY_OPTIONS)


def _add_serve(kinds: Any) -> None:
    serve = _add(kinds, "serve", "Benchmark a server through its OpenAI API")
    serve.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL",
        help="Base URL (default: http://127.0.0.1:8000)",
    )  # fmt: skip
    serve.accept_alias("--base-url", "--url")
    serve.add_argument("--api-key", metavar="KEY", help="API key, also LLAISYS_API_KEY")
    add_model_argument(serve, "Model name in the API (default: the first one)")
    serve.add_argument(
        "--endpoint", choices=["chat", "completions"], default="chat",
        help="API to call (default: chat)",
    )  # fmt: skip
    load = serve.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", default="8", metavar="N,N", help="Open requests of each run (default: 8)"
    )
    load.add_argument(
        "--rate", type=float, metavar="X", help="Requests per second, in place of --concurrency"
    )
    _add_plot(serve, "throughput and latency against concurrency")
    serve.accept_alias("--max-concurrency", "--concurrency")
    serve.accept_alias("--request-rate", "--rate")
    _add_count(serve, "--requests", 64, "Number of requests", "--num-prompts")
    _add_count(serve, "--prompt-tokens", 128, "Prompt length, in tokens", "--random-input-len")
    _add_count(serve, "--new-tokens", 64, "Output length, in tokens", "--random-output-len")
    serve.add_argument(
        "--plain", action="store_true", help="Send standard OpenAI fields only, no ignore_eos"
    )
    serve.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS",
        help="Time limit of a request (default: 300)",
    )  # fmt: skip
    serve.add_argument("--insecure", action="store_true", help="Accept any TLS certificate")
    serve.add_argument(
        "--seed", type=int, metavar="N", help="Seed of prompts and arrival times (default: random)"
    )
