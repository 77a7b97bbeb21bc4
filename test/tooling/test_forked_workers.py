"""Workers of the test run: reports, temporary folders, and a worker that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
FILES = {
    "conftest.py": """
        import pytest
        from forked_workers import ForkedWorkers

        def pytest_configure(config):
            config.pluginmanager.register(ForkedWorkers(2, lambda: None))

        @pytest.fixture(scope="session")
        def shared():
            print("set up")
            yield
            open("torn_down", "a").write("x")
        """,
    "test_a.py": """
        import os, warnings

        def test_passes(tmp_path, shared):
            warnings.warn("careful")

        def test_dies():
            os.abort()

        def test_after_the_death(shared):
            pass
        """,
    "test_b.py": """
        def test_fails(shared):
            print("a printed line")
            assert 1 == 2

        def test_passes(shared):
            pass
        """,
    "test_c.py": """
        def test_passes(tmp_path, shared):
            pass
        """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        lines = text.strip("\n").split("\n")
        (tmp_path / name).write_text("\n".join(line[8:] for line in lines) + "\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *arguments]
    env = {**os.environ, "PYTHONPATH": str(HELPERS)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_failures_deaths_and_warnings_are_reported(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 4 passed, 1 warning" in done.stdout, done.stdout
    assert "FAILED test_b.py::test_fails - assert 1 == 2" in done.stdout
    assert "a printed line" in done.stdout and "UserWarning: careful" in done.stdout
    assert "FAILED test_a.py::test_dies - the process ended with status -6" in done.stdout
    assert (folder / "torn_down").read_text() == "xx"  # not by the worker that died


def test_run_stops_at_the_first_failure(folder: Path) -> None:
    done = run(folder, "-x", "test_b.py", "test_c.py")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout
