#!/usr/bin/env python3
"""Static performance of the NEON kernels' inner loops on a Neoverse-N1, by llvm-mca.

    scripts/model_neon.py [--cpu neoverse-n1] [PATTERN]     e.g. 'tile<8' or 'bf16'

Prints one line per innermost loop with products: FMAs, instructions, cycles per iteration, and the
fraction of the FMA peak (two per cycle). The model assumes operands in L1 and ignores branches
inside a loop. Needs aarch64-linux-gnu-g++ and llvm-mca of LLVM 17 or newer (Debian:
g++-aarch64-linux-gnu, llvm-19); older versions have no model of this core. Installs nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src/ops/cpu/kernels_neon.cpp", "src/device/cpu/probes_neon.cpp")
FLAGS = "-std=c++17 -O3 -DNDEBUG -ffp-contract=off -Isrc -Iinclude -S -o -".split()
BRANCH = re.compile(r"\s+(?:b\.?\w*\s+|cbn?z\s+\w+, |tbn?z\s+\w+, #?\d+, )(\.L\w+)")
ITERATIONS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="of function names")
    parser.add_argument("--cpu", default="neoverse-n1")
    options = parser.parse_args()
    compiler = shutil.which("aarch64-linux-gnu-g++")
    model = find_model()
    if compiler is None or model is None:
        print(
            "error: needs aarch64-linux-gnu-g++ and llvm-mca of LLVM 17 or newer", file=sys.stderr
        )
        return 1
    for source in SOURCES:
        command = [compiler, *FLAGS, source]
        assembly = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for name, loop in main_loops(assembly.stdout):
            if re.search(options.pattern, name):
                report(name, loop, cycles(model, options.cpu, loop))
    return 0


def find_model() -> str | None:
    for name in ("llvm-mca", *(f"llvm-mca-{version}" for version in range(30, 16, -1))):
        program = shutil.which(name)
        if program is not None:
            said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"version (\d+)", said)
            if version is not None and int(version[1]) >= 17:
                return program
    return None


def main_loops(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """Per function the loops that are mostly products, the tightest of every size; the others
    handle remainders or enter the same loop."""
    best: dict[tuple[str, int], list[str]] = {}
    for name, loop in loops(assembly):
        products = sum("fmla" in line for line in loop)
        known = best.get((name, products))
        if 4 * products >= len(loop) and (known is None or len(loop) < len(known)):
            best[name, products] = loop
    for (name, _), loop in best.items():
        yield name, loop


def loops(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """(function, instructions) of every innermost loop with products."""
    for name, body in functions(assembly):
        labels: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        for number, line in enumerate(body):
            if line.startswith(".L"):
                labels[line.rstrip(":")] = number
            back = BRANCH.match(line)
            if back and back[1] in labels:
                found.append((labels[back[1]], number))
        found = [(a, b) for a, b in found if any("fmla" in line for line in body[a:b])]
        for first, last in found:
            inside = [loop for loop in found if first <= loop[0] and loop[1] <= last]
            if len(inside) == 1:
                yield name, [line for line in body[first : last + 1] if is_instruction(line)]


def functions(assembly: str) -> Iterator[tuple[str, list[str]]]:
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in assembly.splitlines():
        if re.match(r"_Z\w+(\.\w+)*:$", line):
            body = bodies.setdefault(line[:-1], [])
        body.append(line)
    command = ["c++filt", *(mangled.split(".")[0] for mangled in bodies)]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    yield from zip(names, bodies.values(), strict=True)


def is_instruction(line: str) -> bool:
    return re.match(r"\s+[a-z]", line) is not None


def cycles(model: str, cpu: str, loop: list[str]) -> float:
    """Cycles per iteration."""
    command = [model, "-march=aarch64", f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    text = "\n".join(loop) + "\n"
    done = subprocess.run(command, input=text, check=True, capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None, done.stdout
    return int(total[1]) / ITERATIONS


def report(name: str, loop: list[str], time: float) -> None:
    products = sum("fmla" in line for line in loop)
    short = re.sub(r"llaisys::(cpu_neon::)?|\(Start\)|^void ", "", name)
    short = re.sub(r">?\([^<]*\)( \[.*)?$|>\(.*", ">", short)
    peak = 50 * products / time
    print(f"{short:90} fmla {products:3} of {len(loop):3}  cycles {time:6.1f}  {peak:4.0f} %")


if __name__ == "__main__":
    sys.exit(main())
