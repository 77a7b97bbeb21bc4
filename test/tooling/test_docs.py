"""README and docs: every path that they name exists, and so does every page that they link to."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llaisys

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


def is_generated(page: Path) -> bool:
    return page.parent.name == "reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_and_prose_is_wrapped(page: Path) -> None:
    if is_generated(page):
        return
    lines = page.read_text().splitlines()
    assert len(lines) <= 300
    is_code, wide = False, []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "    ", "<!--")) and len(line) > 100:
            wide.append((number, len(line)))
    assert not wide


def test_plots_follow_their_tables() -> None:
    script = ROOT / "scripts" / "plot_benchmarks.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0


def test_missing_path_is_found() -> None:
    """The pattern sees what the pages say, and only that."""
    text = "`engine/nothing.py`, test/none/*.py (src/ops/<op>/op.cpp) https://a.b/src/x ~/docs/y"
    assert NAMED.findall(text) == ["engine/nothing.py", "test/none/*.py"]
