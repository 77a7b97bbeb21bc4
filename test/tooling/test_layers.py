"""scripts/check_layers.py: the repository passes, and planted violations are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_layers  # noqa: E402


def test_the_repository_follows_its_layers() -> None:
    assert check_layers.check(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        ("python/llaisys/common/types.py", "import llaisys.engine.core", "engine/core"),
        ("python/llaisys/engine/scheduler.py", "import numpy", "numpy"),
        ("python/llaisys/models/base.py", "import pickle", "pickle"),
        (
            "python/llaisys/server/generation/job.py",
            "import llaisys.server.openai.x",
            "server/openai",
        ),
        ("src/tensor/tensor.hpp", '#include "models/model.hpp"', "models/model.hpp"),
        ("test/engine/test_a.py", "from test_b import make", "test_b"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, text: str, rule: str) -> None:
    server = "python/llaisys/server/openai/x.py"
    for name in ("python/llaisys/engine/core.py", server, "src/models/model.hpp", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(f"{text}\n")
    (found,) = check_layers.check(tmp_path)
    assert rule in found.rule and (str(found.path), found.line) == (file, 1)
