#!/usr/bin/env python3
"""Fail when the working tree is slower than the baseline of this kind of machine.

    make bench-check [ARGS="--base v0.4.0 --rounds 5"]
    scripts/bench_check.py [--base REVISION | --base-tree DIRECTORY] [--rounds 5]
                           [--shape qwen2.5-0.5b] [--device auto] [--accept]

Builds the baseline revision in build/bench-check, runs `llaisys bench latency` and `llaisys bench
throughput` of both trees in turns and compares the medians of the ratios with LIMITS. Exit status
1: a ratio is outside its limit. scripts/bench_baselines.json has one baseline per kind of machine:
the revision to compare with, and its figures; --accept replaces it by HEAD, with the figures of
this run. Without a baseline and --base, the last tag is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "scripts/bench_baselines.json"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """Bound of the ratio current / baseline of a figure."""

    figure: str
    at_least: float = 0.0
    at_most: float = float("inf")
    noise: float = 0.0  # a smaller difference of the figure is not judged


# Throughput at least 98 % of the baseline, first token at most 105 %, copies while decoding at most
# 5 % more.
LIMITS = (
    Limit("prefill_tok_s", at_least=0.98),
    Limit("decode_tok_s", at_least=0.98),
    Limit("batch_tok_s", at_least=0.98),
    Limit("ttft_s", at_most=1.05, noise=0.005),
    Limit("memcpy_ms_per_token", at_most=1.05, noise=0.002),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    figure: str
    base: float  # medians
    now: float
    ratio: float
    limit: str
    is_met: bool


def judge(rounds: Sequence[tuple[Figures, Figures]]) -> list[Verdict]:
    """Compare (baseline, current) figures of several rounds: medians of the ratios of a round."""
    verdicts = []
    for limit in LIMITS:
        pairs = [(base[limit.figure], now[limit.figure]) for base, now in rounds]
        ratio = statistics.median(now / base if base else 1.0 for base, now in pairs)
        base, now = (statistics.median(values) for values in zip(*pairs, strict=True))
        is_met = limit.at_least <= ratio <= limit.at_most or abs(now - base) < limit.noise
        text = f">= {limit.at_least:.0%}" if limit.at_least else f"<= {limit.at_most:.0%}"
        verdicts.append(Verdict(limit.figure, base, now, ratio, text, is_met))
    return verdicts


def format_verdicts(verdicts: Iterable[Verdict]) -> str:
    lines = [f"{'':20s} {'baseline':>10s} {'current':>10s} {'ratio':>8s}  limit"]
    for v in verdicts:
        mark = "" if v.is_met else "  FAILED"
        lines.append(f"{v.figure:20s} {v.base:10.4g} {v.now:10.4g} {v.ratio:8.1%}  {v.limit}{mark}")
    return "\n".join(lines)


def figures_of(latency: Mapping[str, Any], throughput: Mapping[str, Any]) -> Figures:
    return {
        **{name: latency[name] for name in ("prefill_tok_s", "decode_tok_s", "ttft_s")},
        "memcpy_ms_per_token": latency["stage_ms_per_token"]["memcpy"],
        "batch_tok_s": throughput["runs"][0]["total_tok_s"],
    }


# `make develop` installs an import hook for the working tree; PYTHONPATH must win.
_RUN = """
import runpy, sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
import llaisys
assert llaisys.__file__.startswith(sys.argv[1]), f"imported {llaisys.__file__}"
del sys.argv[1]
runpy.run_module("llaisys", run_name="__main__", alter_sys=True)
"""


def run_in(tree: Path, *words: str) -> Any:
    """The JSON result of `llaisys bench` of a tree that has its library in build/native."""
    package = str(tree / "python")
    command = [sys.executable, "-c", _RUN, package, "bench", *words, "--json"]
    environment = {**os.environ, "PYTHONPATH": package}
    found = subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(found.stdout)


def measure(tree: Path, shape: str, device: str) -> Figures:
    common = ("--shape", shape, "--device", device, "--profile")
    return figures_of(
        run_in(tree, "latency", *common),
        run_in(tree, "throughput", *common, "--concurrency", "8", "--repeats", "1"),
    )


def measure_in_turns(trees: tuple[Path, Path], n: int, *what: str) -> list[tuple[Figures, Figures]]:
    """n rounds of (baseline, current); every second round runs the current tree first."""
    rounds = []
    for i in range(n):
        print(f"round {i + 1} of {n}", file=sys.stderr, flush=True)
        found = {tree: measure(tree, *what) for tree in (trees if i % 2 == 0 else trees[::-1])}
        rounds.append((found[trees[0]], found[trees[1]]))
    return rounds


# ---- baselines -----------------------------------------------------------------------------------


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def machine_kind(device: str) -> str:
    """The GPU, or the CPU and its number of cores."""
    from llaisys.bench.machine import cpu_name_of
    from llaisys.engine.config import EngineConfig
    from llaisys.engine.executor.device_choice import resolve_device
    from llaisys.libllaisys.handles import describe_devices

    if (used := resolve_device(EngineConfig.of(device=device)).device) != "cpu":
        return describe_devices(used)[0]
    cpu = cpu_name_of(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{cpu}, {os.cpu_count()} cores"


def build(revision: str) -> Path:
    """The tree of a revision with its library, with the CMake options of build/native."""
    tree = ROOT / "build/bench-check" / revision
    if not tree.is_dir():
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, check=True
        )
    cmake = ROOT / "build/tools/bin/cmake"
    cache = (ROOT / "build/native/CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    kept = (
        "LLAISYS_CUDA:",
        "LLAISYS_CUDA_ARCHITECTURES:",
        "CMAKE_BUILD_TYPE:",
        "CMAKE_CXX_COMPILER:",
    )
    options = [f"-D{line}" for line in cache if line.startswith(kept)]
    native = str(tree / "build/native")
    ninja = f"-DCMAKE_MAKE_PROGRAM={ROOT / 'build/tools/bin/ninja'}"
    subprocess.run([cmake, "-S", tree, "-B", native, "-G", "Ninja", ninja, *options], check=True)
    subprocess.run([cmake, "--build", native, "--target", "llaisys_package"], check=True)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="revision to compare with")
    parser.add_argument("--base-tree", type=Path, help="built checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--accept", action="store_true", help="make HEAD the baseline")
    options = parser.parse_args()
    baselines = json.loads(BASELINES.read_text(encoding="utf-8")) if BASELINES.is_file() else {}
    kind = machine_kind(options.device)
    stored = baselines.get(kind, {})
    if options.base_tree is None:
        revision = options.base or stored.get("revision") or git("describe", "--tags", "--abbrev=0")
        if not (revision := git("rev-parse", "--verify", f"{revision}^{{commit}}")):
            parser.error(f"no baseline for {kind!r}: give --base REVISION, and --accept to keep it")
        options.base_tree = build(revision)
    trees = (options.base_tree.resolve(), ROOT)
    rounds = measure_in_turns(trees, options.rounds, options.shape, options.device)
    verdicts = judge(rounds)
    print(f"{kind}, {options.shape}, {options.rounds} rounds\n{format_verdicts(verdicts)}")
    if options.accept:
        baselines[kind] = {
            "revision": git("rev-parse", "HEAD"),
            "date": datetime.now(UTC).date().isoformat(),
            "shape": options.shape,
            "figures": {verdict.figure: verdict.now for verdict in verdicts},
        }
        BASELINES.write_text(json.dumps(baselines, indent=1) + "\n", encoding="utf-8")
    return 0 if all(verdict.is_met for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
