"""scripts/run_tests.py --again: reruns failures; a test that fails twice fails the run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/run_tests.py"

TESTS = """
import pathlib

def test_steady(): pass

def test_unsteady():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_broken(): assert {holds}
"""


def run(folder: Path, holds: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "scripts").mkdir(parents=True)
    (folder / "test/some").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test/some/test_some.py").write_text(TESTS.format(holds=holds))
    command = [sys.executable, str(folder / "scripts/run_tests.py"), *arguments]
    # Other plugins take seconds to import.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    plain = {**os.environ, **plugins}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=plain)


def test_flaky_test_is_reported_and_failing_test_fails_the_run(tmp_path: Path) -> None:
    once = run(tmp_path / "once", True, "--again", "2", "--workers", "2")
    assert once.returncode == 0, once.stdout
    named = once.stdout.rsplit("each a defect:", 1)[1]
    assert "test_unsteady" in named and "test_steady" not in named
    assert re.search(r"= 1 failed, 2 passed in ", once.stdout)
    twice = run(tmp_path / "twice", False, "--again", "2", "--workers", "0")
    assert twice.returncode == 1


def test_too_many_failures_are_not_rerun(tmp_path: Path) -> None:
    many = run(tmp_path / "many", False, "--again", "1", "--workers", "0")
    assert many.returncode == 1 and "once more" not in many.stdout


def test_every_file_is_in_one_suite_of_quick_and_slow() -> None:
    def files(suite: str) -> set[str]:
        command = [sys.executable, str(SCRIPT), "--suite", suite, "--list"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
        assert len(listed) == len(set(listed)) > 0
        return set(listed)

    slow = [files(name) for name in ("browsers", "clients", "attack", "soak", "ray")]
    assert set.union(*slow).isdisjoint(files("quick"))
    assert set.union(*slow) | files("quick") == files("all")
