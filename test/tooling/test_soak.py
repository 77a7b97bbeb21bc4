"""A six-second run of scripts/soak.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_short_soak_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--minutes", "0.1", "--pause", "0.5", "--fault-every", "2", "--without-default-model"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "soak.py"), *words, "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert sum(found["faults"].values()) >= 1
    assert found["seen"]["compared"] and not found["seen"]["mismatches"]
