"""scripts/check_words.py finds replaced terms in text, names and file names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_checker() -> ModuleType:
    path = ROOT / "scripts" / "check_words.py"
    spec = importlib.util.spec_from_file_location("check_words", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_words"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


checker = load_checker()


@pytest.mark.parametrize(
    "path, text, words",
    [
        ("python/x.py", "def draw_rows():", "draw"),
        ("python/x.py", "class TokenDrawer:", "drawer"),
        ("src/x.cpp", "// the block is let go of here", "let go of"),
        ("docs/x.md", "Steps ahead hide the host.", "steps ahead"),
        ("test/server/test_doors.py", "", "doors"),
        ("src/ops/cuda/x.cuh", "int ring_slots;", "ring"),
    ],
)
def test_replaced_terms_are_found(path: str, text: str, words: str) -> None:
    assert [found for _, found, _ in checker.findings(path, text)] == [words]


@pytest.mark.parametrize(
    "path, text",
    [
        ("python/llaisys/server/keys.py", "class KeyRing:"),  # a ring elsewhere than in CUDA
        ("webui/styles.css", "box-sizing: border-box;"),
        ("python/x.py", "withdraw = redrawn_rows"),
        ("docs/glossary.md", "draw: sample"),
    ],
)
def test_other_words_pass(path: str, text: str) -> None:
    assert not list(checker.findings(path, text))


def test_every_exception_is_explained() -> None:
    assert all(entry.reason for entry in checker.ALLOWED)


@pytest.mark.parametrize(
    "term, path",
    [
        ("paged attention", "src/ops/attention/op.hpp"),
        ("prefix caching", "python/llaisys/engine/prefix_nodes.py"),
        ("chunked prefill", "python/llaisys/engine/batch_builder.py"),
        ("cuda graph capture", "src/runtime/graph/captured_steps.hpp"),
        ("epilogue", "src/ops/cuda/gemm_epilogue.cuh"),
        ("split-k", "src/ops/cuda/gemm_tma_splitk.cuh"),
        ("eagle", "src/models/draft_head/draft_head.hpp"),
        ("structured output", "python/llaisys/engine/structured/__init__.py"),
        ("preemption", "python/llaisys/engine/request_queues.py"),
        ("data parallel", "python/llaisys/server/engine_client/replicas/__init__.py"),
    ],
)
def test_a_search_for_a_term_finds_the_file_that_implements_it(term: str, path: str) -> None:
    """The opening comment of the file contains the term that a newcomer searches for."""
    opening = " ".join((ROOT / path).read_text(encoding="utf-8").splitlines()[:4])
    assert term in opening.lower()
