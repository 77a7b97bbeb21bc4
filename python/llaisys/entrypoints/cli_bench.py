"""`llaisys bench {ops,latency,throughput,speculative,structured,perplexity,serve}`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llaisys.common.flags import OptionParser
from llaisys.common.model_argument import add_model_argument
from llaisys.common.validation import check_int, invalid_value
from llaisys.engine.config import DTYPES, EngineConfig, add_engine_flags, given_engine_options
from llaisys.entrypoints.cli_options import add_model_options, open_llm

if TYPE_CHECKING:
    from llaisys.bench.ops import Result


# The engine options that apply to a model without an engine; the others are rejected.
MODEL_OPTIONS = ("dtype", "quantization", "kv_cache_dtype", "n_threads")
LATENCY_OPTIONS = (*MODEL_OPTIONS, "device", "exact", "max_model_len")
PERPLEXITY_OPTIONS = (*MODEL_OPTIONS, "device")
OPS_OPTIONS = ("device", "n_threads")
NO_ENGINE = "this runs {} without the engine; bench throughput takes every option"
SIMULATED_PROMPT = 128  # tokens
FIRST_OF_TWO = 0.45  # gpu_memory_utilization of the first of two engines in a process
SHAPE = "Random weights of this shape, e.g. qwen2.5-0.5b"


def add_commands(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="Benchmark operators, a model, the engine or a server",
        description="Benchmark operators, a model, the engine or a server.",
    )  # fmt: skip
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True, title="benchmarks")

    ops = _add(kinds, "ops", "Benchmark kernels against the limits of this machine", _ops)
    ops.add_argument(
        "--model", dest="models", action="append", metavar="NAME",
        help="Shapes of this model only; repeatable",
    )  # fmt: skip
    ops.add_argument(
        "--dtype", dest="dtypes", action="append", metavar="TYPE",
        help="Data type: f32, bf16, q4_0, ...; repeatable",
    )  # fmt: skip
    ops.add_argument("--quick", action="store_true", help="Fewer row counts")
    add_engine_flags(ops, without=("dtype",), shown=OPS_OPTIONS)

    latency = _add(
        kinds, "latency", "One sequence: load, time to first token, prefill, decode", _latency
    )
    add_model_argument(latency)
    latency.add_argument("--shape", metavar="NAME", help=SHAPE)
    _add_count(latency, "--prompt-tokens", 512, "Prompt length, in tokens", "--input-len")
    _add_count(latency, "--new-tokens", 64, "Output length, in tokens", "--output-len")
    latency.add_argument("--profile", action="store_true", help="Report the time of each stage")
    add_engine_flags(latency, shown=LATENCY_OPTIONS)

    throughput = _add(kinds, "throughput", "Many requests at once", _throughput)
    throughput.add_argument("--shape", metavar="NAME", help=SHAPE)
    _add_count(throughput, "--prompt-tokens", 128, "Prompt length, in tokens", "--input-len")
    throughput.add_argument("--profile", action="store_true", help="Report the time of each stage")
    _add_load(throughput, concurrency="1,8,32", new_tokens=64, repeats=5)

    speculative = _add(
        kinds, "speculative", "The same requests with and without draft tokens", _speculative
    )
    _add_load(speculative, concurrency="1,8", new_tokens=128, repeats=3)
    speculative.add_argument(
        "--simulate", type=float, metavar="RATE", help="Simulate drafts with this acceptance rate"
    )
    speculative.add_argument("--shape", metavar="NAME", help=SHAPE)

    structured = _add(
        kinds, "structured", "The same requests with and without a JSON schema", _structured
    )
    _add_load(structured, concurrency="1,8", new_tokens=128, repeats=5)
    _add_perplexity(kinds)
    _add_serve(kinds)


def _add(
    kinds: Any, name: str, help: str, run: Callable[[argparse.Namespace], int]
) -> OptionParser:
    parser: OptionParser = kinds.add_parser(name, help=help, description=help + ".")
    parser.add_argument("--json", action="store_true", help="Write JSON")
    parser.set_defaults(run=run)
    return parser


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
    parser = _add(kinds, "perplexity", "Perplexity of a model on a text file", _perplexity)
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
    serve = _add(kinds, "serve", "Benchmark a running server through its OpenAI API", _serve)
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
        "--concurrency", type=int, default=8, metavar="N", help="Open requests (default: 8)"
    )
    load.add_argument(
        "--rate", type=float, metavar="X", help="Requests per second, in place of --concurrency"
    )
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


def _ops(options: argparse.Namespace) -> int:
    from llaisys.bench.machine import print_machine
    from llaisys.bench.run_ops import run
    from llaisys.engine.executor.device_choice import resolve_device

    given = given_engine_options(options, only=OPS_OPTIONS, because=NO_ENGINE.format("operators"))
    others = [name for name in options.dtypes or () if name not in DTYPES]
    cpu_reason = f"dtype {others[0]} is timed on the CPU only" if others else ""
    engine = resolve_device(EngineConfig.of(**given), cpu_reason=cpu_reason)
    machine, results = run(
        *(engine.device, engine.n_threads, options.models, options.dtypes, options.quick),
        _show_progress,
    )
    if options.json:
        document = {"machine": asdict(machine), "results": [asdict(r) for r in results]}
        print(json.dumps(document, indent=1))
    else:
        print_machine(machine)
        for result in results:
            print(_line_of(result))
    return 0


def _show_progress(what: str) -> None:
    print(f"timing {what}", file=sys.stderr, flush=True)


def _line_of(result: Result) -> str:
    return (
        f"{result.op:18s} {result.dtype:5s} {result.shape:38s} {result.rows:5d} "
        f"{result.microseconds:10.2f} us "
        f"{result.value:10.2f} of {result.limit:9.2f} {result.unit:8s} {result.fraction:7.1%}"
    )


def _latency(options: argparse.Namespace) -> int:
    from llaisys.bench.latency import LatencyOptions, run_latency

    given = given_engine_options(
        options,
        only=LATENCY_OPTIONS,
        because=NO_ENGINE.format("one sequence of a model"),
    )
    result = run_latency(
        LatencyOptions(
            engine=EngineConfig.of(model=options.model, **given),
            shape=options.shape,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
        )
    )
    if not options.profile:
        del result["stage_ms_per_token"]
    _print_fields(result, options.json)
    return 0


def _throughput(options: argparse.Namespace) -> int:
    from llaisys.bench.throughput import run_throughput

    concurrencies = _concurrencies(options)
    if options.shape is not None:
        options.model = _shape_model(options)
    with open_llm(options) as llm:
        result = run_throughput(
            llm,
            concurrencies,
            options.prompt_tokens,
            options.new_tokens,
            options.repeats,
            options.profile,
        )
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print_runs(result["runs"], False)
        print("prefix cache", result["prefix_cache"])
    return 0


def _print_fields(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:22s} {value}")


def _print_runs(runs: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    for run in runs:
        print("  ".join(f"{name} {value}" for name, value in run.items()))


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


def _speculative(options: argparse.Namespace) -> int:
    """Return 1 if drafts change an output."""
    from llaisys.bench.speculative import run_speculative

    concurrencies = _concurrencies(options)
    if options.simulate is not None:
        return _simulated(options, concurrencies)
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
        with open_llm(options) as plain:
            runs = run_speculative(
                drafted,
                plain,
                concurrencies,
                options.new_tokens,
                options.repeats,
                is_random=options.shape is not None,
            )
    _print_runs(runs, options.json)
    return 0 if all(run["same_tokens"] for run in runs) else 1


def _simulated(options: argparse.Namespace, concurrencies: list[int]) -> int:
    from llaisys.bench.simulated import run_simulated

    runs = run_simulated(
        options.model if options.shape is None else _shape_model(options),
        given_engine_options(options),
        options.simulate,
        concurrencies,
        SIMULATED_PROMPT,
        options.new_tokens,
    )
    _print_runs(runs, options.json)
    return 0 if all(run["same_tokens"] for run in runs) else 1


def _structured(options: argparse.Namespace) -> int:
    from llaisys.bench.structured import run_structured

    with open_llm(options) as llm:
        runs = run_structured(llm, _concurrencies(options), options.new_tokens, options.repeats)
    _print_runs(runs, options.json)
    return 0


def _perplexity(options: argparse.Namespace) -> int:
    from llaisys.bench.perplexity import PerplexityOptions, run_perplexity
    from llaisys.tokenization import Tokenizer

    given = given_engine_options(
        options, only=PERPLEXITY_OPTIONS, because=NO_ENGINE.format("a model")
    )
    result = run_perplexity(
        PerplexityOptions(
            file=Path(options.file),
            engine=EngineConfig.of(model=options.model, **given),
            reference=options.reference,
            reference_dtype=options.reference_dtype,
            context=check_int("context", options.context, 4, 1 << 20),
            chunks=check_int("chunks", options.chunks, 0, 1 << 40),
        ),
        Tokenizer.from_source,
        lambda done, total, value: print(
            f"\rchunk {done} of {total}: {value:.4f} ", end="", file=sys.stderr, flush=True
        ),
    )
    print(file=sys.stderr)
    _print_fields(result, options.json)
    return 0


def _serve(options: argparse.Namespace) -> int:
    """Return 1 if no request succeeds."""
    from llaisys.bench.serve import ServeOptions, run_serve

    result = run_serve(
        ServeOptions(
            url=options.url,
            api_key=options.api_key or os.environ.get("LLAISYS_API_KEY", "").split(",")[0] or None,
            model=options.model,
            chat=options.endpoint == "chat",
            concurrency=options.concurrency,
            rate=options.rate,
            requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            plain=options.plain,
            timeout=options.timeout,
            insecure=options.insecure,
            seed=options.seed,
        )
    )
    report = result.report
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print(
            f"{report['requests']} requests, concurrency {report['concurrency']}, "
            f"{result.prompt_tokens:.0f} + {result.new_tokens:.1f} tokens each, "
            f"{report['duration_s']:.2f} s" + ("" if result.ignored_eos else ", may end early")
        )
        print(f"throughput  {report['throughput_tok_s']:.1f} tok/s")
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            values = [f"{p} {'-' if v is None else v:>9}" for p, v in report[name].items()]
            print(f"{name:11s} {'  '.join(values)}")
        print(f"errors      {report['errors']}")
    for reason, count in result.reasons.most_common():
        print(f"  {count} x {reason}", file=sys.stderr if options.json else sys.stdout)
    return 0 if report["errors"] < report["requests"] else 1
