#!/usr/bin/env python3
"""Compare this engine with other engines on the CPU: the same workloads, in turns.

    scripts/bench_compare_peers.py --shape qwen2.5-1.5b [--format 16-bit q8_0 q4_0 q4_k_m]
        [--engine ours llama.cpp openvino transformers torch.compile]
        [--case decode1 decode8 decode32 prompt512 prompt4000] [--threads N] [--repeats 3]
        [--peers-python PATH]   an interpreter with the other engines (default: this one)
        [--new-tokens 64] [--json]
    scripts/bench_compare_peers.py --engine onnxruntime --model DIR    a folder of its builder

Weights are random (speed does not depend on them) and every engine that reads GGUF reads the same
file; with 16-bit weights the other engines read F16, ours and transformers bf16. Each measurement
runs in a separate process, so that engines do not share threads or memory. Reports medians, the
spread (largest - smallest, relative to the median) and ratios ours / theirs.

  decodeN   N sequences of 128 tokens of context: tokens/s of the steps in which all decode
  promptN   one prompt of N tokens to its first token: tokens/s
  start     seconds from the start of the process to the first token of a prompt of 16 tokens
  memory    peak resident memory, MB
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers.engines import ENGINES, MAX_SEQUENCES, Load

CONTEXT = 128
CASES = ("decode1", "decode8", "decode32", "prompt512", "prompt4000")
FORMATS = ("16-bit", "q8_0", "q4_0", "q4_1", "q4_k_m", "q6_k")
# Engines that read Hugging Face directories in 16 bits only.
UNQUANTIZED = ("transformers", "torch.compile")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["ours", "llama.cpp"])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["16-bit"])
    parser.add_argument("--case", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--model", help="a model instead of random weights")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--prepare", action="store_true", help="write the models and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, metavar=("ENGINE", "PATH", "FORMAT", "SPAWNED"))
    options = parser.parse_args()
    for case in options.case:
        if not case.startswith(("decode", "prompt")) or not case[6:].isdigit():
            parser.error(f"--case: expected decodeN or promptN, got {case!r}")
    if options.worker:
        print(json.dumps(measure(options)))
        return 0
    for name in options.format:
        models = {engine: _model(engine, name, options) for engine in options.engine}
        if options.prepare:
            continue
        result = compare(name, {k: v for k, v in models.items() if v is not None}, options)
        print(json.dumps({name: result}) if options.json else table(name, result), flush=True)
    return 0


def _model(engine: str, format_name: str, options: argparse.Namespace) -> Path | None:
    """The model file of an engine; None when it cannot read this format."""
    if options.model:
        return Path(options.model)
    if engine == "onnxruntime" or (engine in UNQUANTIZED and format_name != "16-bit"):
        return None
    from peers.model_files import model_file

    source = "transformers" if engine in UNQUANTIZED else engine
    return model_file(options.shape, source, _dtype(engine, format_name))


def _dtype(engine: str, format_name: str) -> str:
    if format_name != "16-bit":
        return format_name
    return "f16" if engine in ("llama.cpp", "openvino") else "bf16"


def compare(
    format_name: str, models: dict[str, Path], options: argparse.Namespace
) -> dict[str, Any]:
    samples: dict[str, list[dict[str, Any]]] = {engine: [] for engine in models}
    for repeat in range(options.repeats):
        for engine, path in models.items():
            python = sys.executable if engine == "ours" else options.peers_python
            command = [python, __file__, "--threads", str(options.threads)]
            command += ["--case", *options.case, "--new-tokens", str(options.new_tokens)]
            command += ["--worker", engine, str(path), _dtype(engine, format_name)]
            done = subprocess.run(
                [*command, str(time.time())], stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode != 0:
                print(f"{engine} {format_name} failed: {done.returncode}", file=sys.stderr)
                continue
            samples[engine].append(json.loads(done.stdout.splitlines()[-1]))
            values = " ".join(
                f"{k} {v:.4g}" for k, v in samples[engine][-1].items() if k != "version"
            )
            print(
                f"{repeat + 1}/{options.repeats} {format_name} {engine}: {values}",
                file=sys.stderr,
                flush=True,
            )
    return {engine: _summary(runs) for engine, runs in samples.items() if runs}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in runs[0] if name != "version"]
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    spread = {
        name: round((max(r[name] for r in runs) - min(r[name] for r in runs)) / median, 3)
        for name, median in medians.items()
        if median
    }
    return {"version": runs[0]["version"], **medians, "spread": spread}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases in one engine; each case is the better of two runs."""
    name, path, format_name, spawned = options.worker
    cases = [(case[:6], int(case[6:])) for case in options.case]
    room = CONTEXT + options.new_tokens + 8
    longest = max([room, *(n + 8 for kind, n in cases if kind == "prompt")])
    widest = max([1, *(min(n, MAX_SEQUENCES) for kind, n in cases if kind == "decode")])
    load = Load(
        Path(path), format_name, options.threads, longest, max(longest, widest * (room + 32))
    )
    engine = ENGINES[name](load)
    engine.prefill(16)
    result: dict[str, Any] = {"version": engine.version, "start": time.time() - float(spawned)}
    for kind, n in cases:
        if kind == "prompt":
            engine.prefill(min(n, 512))
            result[kind + str(n)] = n / min(engine.prefill(n) for _ in range(2))
        else:
            rates = [engine.decode(n, CONTEXT, options.new_tokens) for _ in range(2)]
            result[kind + str(n)] = max(rates)
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return result


def table(format_name: str, result: dict[str, Any]) -> str:
    """A Markdown table; ratios above 1 mean that ours is faster."""
    if not result:
        return f"{format_name}: no engine ran"
    columns = [name for name in next(iter(result.values())) if name not in ("version", "spread")]
    lines = [f"| {format_name} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for engine, values in result.items():
        cells = [
            f"{values[name]:.4g} ({100 * values['spread'].get(name, 0):.0f} %)" for name in columns
        ]
        lines.append(f"| {engine} ({values['version']}) | " + " | ".join(cells) + " |")
    for engine, values in result.items():
        if engine != "ours" and "ours" in result:
            cells = [f"{result['ours'][name] / values[name]:.2f}" for name in columns]
            lines.append(f"| ours / {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
