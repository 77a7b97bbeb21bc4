"""scripts/check_gpu.sh without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_gpu.sh"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_dry_run_lists_stages_and_changes_nothing(tmp_path):
    ended = run(str(tmp_path / "gpu"), DRY_RUN="1")
    assert ended.returncode == 0, ended.stderr
    report = ended.stdout.split("== report\n")[1].splitlines()
    assert all(line.startswith("not run ") for line in report)
    stages = [line.removeprefix("not run ") for line in report]
    assert stages[:4] == ["configure", "build", "environment", "C++ tests"]
    assert stages[4:6] == ["tests", "memcheck"]
    assert stages[6:8] == ["memcheck of layer norm, GELU and scaling", "memcheck of sample_rows"]
    assert "racecheck" in stages and "racecheck of sample_rows" in stages
    assert "LLAISYS_SMALL_SHAPES=1 compute-sanitizer --tool racecheck" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_prebuilt_library_is_not_rebuilt(tmp_path):
    ended = run(str(tmp_path / "gpu"), DRY_RUN="1", PREBUILT="1")
    assert ended.returncode == 0, ended.stderr
    stages = ended.stdout.split("== report\n")[1].splitlines()
    assert stages[0] == "not run environment" and "not run kernels" in stages


def test_failed_build_is_reported_and_stops_the_run(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cmake").write_text("#!/bin/sh\nexit 3\n")
    (tools / "cmake").chmod(0o755)
    ended = run(str(tmp_path / "gpu"), PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert ended.returncode == 1 and "tests" not in ended.stdout
    report = (tmp_path / "gpu" / "report.txt").read_text()
    assert report.startswith("FAILED  configure: status 3")
