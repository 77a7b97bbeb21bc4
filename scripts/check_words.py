#!/usr/bin/env python3
"""Reject words that docs/glossary.md replaces.

    scripts/check_words.py [PATH ...]    check these files or folders (default: every tracked file)

Prints `file:line: word: use REPLACEMENT` per finding; exit status 1 if there is any. Names count
word by word: `draw_rows` and `TokenDrawer` both contain "draw". File names are checked too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = frozenset(
    ".py .cpp .cc .hpp .h .c .cu .cuh .js .mjs .css .html .md .sh .toml .yml .yaml .cmake".split()
)
NAMES = frozenset({"Makefile", "CMakeLists.txt", "Dockerfile", "run"})


@dataclass(frozen=True)
class Rule:
    """`pattern` matches lower-case words separated by single spaces; `where`: path globs."""

    pattern: str
    replacement: str
    where: tuple[str, ...] = ("*",)


CUDA = ("src/ops/cuda/*", "src/ops/*.cu*", "src/device/cuda/*", "test/cuda/*")
SERVER = ("python/llaisys/server/*", "test/server/*")

RULES = (
    Rule(r"doors?", "protocol adapter"),
    Rule(r"seats?", "running queue"),
    Rule(r"draws?|drawn|drawing|drew|drawers?", "sample"),
    Rule(r"nobody|whoever|everybody|somebody|anybody", "the exact noun: request, client, thread"),
    Rule(r"told", "reported, notified"),
    Rule(r"lets? go( of)?", "release, free"),
    Rule(r"(came|comes|come) of (it|them|this|that)", "result"),
    Rule(r"second level cache", "L2"),
    Rule(r"processors?", "SM", CUDA),
    Rule(r"rings?", "pipeline", CUDA),
    Rule(r"box(es)?", "TMA tile", CUDA),
    Rule(r"skinny", "small M", CUDA),
    Rule(r"lanes?", "bounded thread pool", SERVER),
    Rule(r"figures?", "stats", SERVER),
    Rule(r"twins?", "reference"),
    Rule(r"steps? ahead|async stepping", "asynchronous scheduling"),
    Rule(r"the books|books", "block table, bookkeeping"),
    Rule(r"roads?", "path"),
    Rule(r"in (any )?company", "batch"),
    Rule(r"(looks|look) on", "observe"),
    Rule(r"(gives|give) way", "yield, is preempted"),
    Rule(r"(goes|go) without", "skip"),
    Rule(r"vectors? of (a )?texts?", "embedding"),
    Rule(r"guess(es|ed|ing)?( tokens)? ahead", "speculative decoding"),
    Rule(r"running it for months", "production operation"),
    Rule(r"at hand", "available"),
    Rule(r"neighbours?", "adjacent"),
    Rule(r"(hangs?|hung|hanging) up", "disconnect"),
    Rule(r"brings? back|brought back", "restore"),
    Rule(r"no longer", "the present state"),
    Rule(r"in one go|under way", "at once, in flight"),
)


@dataclass(frozen=True)
class Allowed:
    """Findings of `pattern` in files that match `path` are accepted, for `reason`."""

    path: str
    pattern: str
    reason: str


ALLOWED = (
    Allowed("scripts/check_words.py", ".*", "the list itself"),
    Allowed("docs/glossary.md", ".*", "names what it replaces"),
    Allowed("src/device/cuda/cuda_runtime.cpp", "processors?", "multiProcessorCount of CUDA"),
    Allowed("python/llaisys/engine/config.py", "async stepping", "deprecated name of an option"),
    Allowed("test/entrypoints/test_option_names.py", "async stepping", "deprecated name"),
    Allowed("docs/reference/configuration.md", "async stepping", "deprecated name"),
    Allowed("CHANGELOG.md", "async stepping", "deprecated name"),
    Allowed("src/ops/sample_rows/*", "processors?", "logits processors"),
    Allowed("test/cpp/sample_rows_reference.hpp", "processors?", "logits processors"),
    Allowed("test/cuda/native/check_sample_rows.cu", "processors?", "logits processors"),
    Allowed("test/*.py", "draw", "the API of hypothesis"),
    Allowed("scripts/draft_training/prompts.py", ".*", "training prompts are ordinary prose"),
)

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NOT_WORD = re.compile(r"[^a-z0-9]+")
_COMPILED = [(re.compile(rf"(?<![^ ])(?:{rule.pattern})(?![^ ])"), rule) for rule in RULES]


def words_of(text: str) -> str:
    """Lower-case words of a line or a name, single spaces between them."""
    return _NOT_WORD.sub(" ", _CAMEL.sub(" ", text).lower()).strip()


def findings(path: str, text: str) -> Iterator[tuple[int, str, Rule]]:
    """(line number, matched words, rule) of a file; line 0 is its name."""
    rules = [entry for entry in _COMPILED if any(fnmatch(path, glob) for glob in entry[1].where)]
    for number, line in enumerate([path, *text.splitlines()]):
        words = words_of(line)
        for pattern, rule in rules:
            for found in pattern.finditer(words):
                if not is_allowed(path, found[0]):
                    yield number, found[0], rule


def is_allowed(path: str, words: str) -> bool:
    return any(
        fnmatch(path, entry.path) and re.fullmatch(entry.pattern, words) for entry in ALLOWED
    )


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return listed.stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    given = [str(Path(name).resolve().relative_to(ROOT)) for name in arguments]
    count = 0
    for path in tracked_files():
        file = ROOT / path
        if given and not any(path == name or path.startswith(f"{name}/") for name in given):
            continue
        if not (file.suffix in SUFFIXES or file.name in NAMES) or not file.is_file():
            continue
        for number, words, rule in findings(path, file.read_text(encoding="utf-8")):
            count += 1
            print(f"{path}:{number}: {words}: use {rule.replacement}")
    if count:
        print(f"{count} words that docs/glossary.md replaces")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
