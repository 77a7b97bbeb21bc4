"""README and docs: every path that they name exists, and so does every page that they link to."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

import llaisys
from llaisys.entrypoints.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "llaisys"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSIDE = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir())
SOURCES = ("include", "src", "python", "webui", "test", "scripts", "docs", "cmake", "examples")
# engine/core.py and the like are said from python/llaisys.
NAMED = re.compile(
    rf"(?<![\w./:~-])(?:{'|'.join([*SOURCES, *INSIDE])})/[\w./*-]*[\w*/](?![\w/<{{])", re.ASCII
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    missing = []
    for name in NAMED.findall(page.read_text()):
        if "**" in name:  # says what a build takes if it is there
            continue
        found = any(any(base.glob(name.rstrip("/"))) for base in (ROOT, PACKAGE))
        if not found:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_python_import_what_they_use(page: Path) -> None:
    for block in PYTHON.findall(page.read_text()):
        tree = ast.parse(block)
        nodes = list(ast.walk(tree))
        imported = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llaisys"):
                names = [name.name for name in node.names]
                module = importlib.import_module(node.module or "")
                assert [name for name in names if not hasattr(module, name)] == []
                imported.update(names)
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert (used & set(llaisys.__all__)) <= imported


SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(llaisys [^`]+)`")
# Placeholders of prose; a word in brackets is optional and left out.
OPTIONAL = re.compile(r"\[[^\]]*\]")
SHELL_END = re.compile(r"\s(?:[|;&]|&&|[0-9]?>{1,2}).*")  # what follows belongs to the shell


def commands_of(text: str) -> list[list[str]]:
    """The words of every `llaisys ...` command in the code blocks and in the prose."""
    lines = []
    for block in SHELL.findall(text):
        lines += block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [inline.replace("\n", " ") for inline in INLINE.findall(prose)]
    found = []
    for line in lines:
        match = re.match(r"(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?llaisys\s+(.*)", line.strip())
        if match is None:
            continue
        words = shlex.split(SHELL_END.sub("", OPTIONAL.sub("", match[1])), comments=True)
        if words and not {"...", "COMMAND"} & set(words):
            found.append(words)
    return found


# Of prose: how options and values are left out.
VALUES = {"N": "1", "N,N": "1,2", "SIZE": "1GiB", "PORT": "8000", "X": "0.5", "SECONDS": "1"}


def parse(words: list[str]) -> str:
    """The error of the argument parser; empty: none. Prose may leave out what a command needs."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            build_parser().parse_args([VALUES.get(word, word) for word in words])
        except SystemExit as end:
            is_left_out = "arguments are required" in errors.getvalue()
            return errors.getvalue() if end.code and not is_left_out else ""
    return "" if "warning" not in errors.getvalue() else errors.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_the_pages_show(page: Path) -> None:
    wrong = {" ".join(words): parse(words) for words in commands_of(page.read_text())}
    assert {command: error for command, error in wrong.items() if error} == {}


def test_a_wrong_command_is_found() -> None:
    text = (
        "Use `llaisys serve --prot 1` or `llaisys chat [MODEL]`.\n"
        "```sh\n.venv/bin/llaisys bench latency --shap x  # a size\nllaisys serve MODEL \\\n"
        '  --port 1 | tee log\nllaisys generate m "a # b" > out\n```\n'
    )
    found = commands_of(text)
    assert [words[0] for words in found] == ["bench", "serve", "generate", "serve", "chat"]
    assert found[1] == ["serve", "MODEL", "--port", "1"] and found[2][-1] == "a # b"
    assert [bool(parse(words)) for words in found] == [True, False, False, True, False]
