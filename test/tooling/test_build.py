"""The set-up: progress and failures of a step, GPUs that CMake finds, arguments of `make run`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import run_server  # noqa: E402


def run_step(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/step.py"), *options, "Compiling"]
    command += [str(tmp_path / "logs/compile.txt"), "--", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_step_prints_its_result_and_keeps_the_output(tmp_path: Path) -> None:
    result = run_step(tmp_path, "print('[1/2] Building CXX object a/b.cpp.o')")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("Compiling: done, ")
    assert "b.cpp" not in result.stdout
    assert "a/b.cpp.o" in (tmp_path / "logs/compile.txt").read_text()


def test_a_failed_step_ends_with_a_sentence_that_names_log_and_remedy(tmp_path: Path) -> None:
    result = run_step(tmp_path, "print('no such header'); exit(3)", "--hint", "Install g++.")
    assert result.returncode == 3
    assert "  | no such header" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: Compiling failed") and "compile.txt" in last
    assert last.endswith("Install g++.")


def cmake() -> str:
    beside = [ROOT / "build/tools/bin", Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, beside), os.environ["PATH"]])
    found = shutil.which("cmake", path=path)
    assert found, "cmake is in build/tools after any make target that builds"
    return found


@pytest.mark.parametrize(
    ("capabilities", "found", "architectures"),
    [
        ("9.0", "TRUE", "90a"),
        ("8.6\n8.0\n8.6", "TRUE", "86;80"),
        ("12.0", "TRUE", "120"),
        ("7.5", "FALSE", ""),
        ("", "FALSE", ""),
    ],
)
def test_cmake_compiles_for_the_gpus_of_this_machine(
    tmp_path: Path, capabilities: str, found: str, architectures: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{capabilities}'\n")
    smi.chmod(0o755)
    script = tmp_path / "look.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/find_gpu.cmake")\n'
        "llaisys_find_gpu(found architectures)\n"
        'message("${found} [${architectures}]")\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        [cmake(), "-P", str(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.stderr.strip() == f"{found} [{architectures}]"


@pytest.mark.parametrize(
    ("on_path", "installed", "expected"),
    [(True, True, "path"), (False, True, "toolkit"), (False, False, "")],
)
def test_nvcc_is_found_outside_of_the_path(
    on_path: bool, installed: bool, expected: str, tmp_path: Path
) -> None:
    for name, is_there in (("path", on_path), ("toolkit", installed)):
        (tmp_path / name).mkdir()
        if is_there:
            (tmp_path / name / "nvcc").touch()
    script = tmp_path / "find.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/find_gpu.cmake")\n'
        f'llaisys_find_nvcc(nvcc "{tmp_path}/toolkit")\n'
        'message("[${nvcc}]")\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}/path"}
    result = subprocess.run(
        [cmake(), "-P", str(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    nvcc = f"{tmp_path}/{expected}/nvcc" if expected else ""
    assert result.stderr.strip() == f"[{nvcc}]"


def test_make_run_fetches_the_default_model_only_if_it_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str | None] = []
    monkeypatch.setattr(run_server, "fetch_model", fetched.append)
    for given, times in (([], 1), (["--port", "9000"], 2), (["org/model"], 2), (["-m", "dir"], 2)):
        assert run_server.main(["--fetch", *given]) == 0
        assert fetched == [None] * times


SERVER = """
import signal, sys
def stop(number, frame): sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("llaisys: serving tiny at http://127.0.0.1:9000", flush=True)
signal.pause()
"""


def test_make_run_prints_what_to_type_next_and_forwards_signals() -> None:
    script = (
        "import sys, run_server; sys.exit(run_server.serve([sys.executable, '-c', sys.argv[1]]))"
    )
    started = {"LLAISYS_STARTED": str(time.time() - 61.5), "PYTHONPATH": str(ROOT / "scripts")}
    if "PYTHONPATH" in os.environ:
        started["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, SERVER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **started},
    )
    assert process.stdout is not None
    lines = []
    while not lines or not lines[-1].startswith("Ctrl-C"):
        lines.append(process.stdout.readline())
        assert lines[-1], "the output ended early"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7
    text = "".join(lines)
    assert re.search(r"Ready after 1 min \d\d s\. Open http://127\.0\.0\.1:9000 ", text)
    commands = [line.split() for line in lines if line.startswith("  ")]
    assert [command[1] for command in commands] == ["chat", "generate", "bench"]
    assert commands[-1][-1] == "http://127.0.0.1:9000"
    assert all(Path(command[0]).name == "llaisys" for command in commands)
