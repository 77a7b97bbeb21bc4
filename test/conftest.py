"""Options and markers that every test file shares."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# `--device auto` is the CPU in every test and in the processes that tests start; tests of CUDA
# (test/cuda) name their device.
os.environ.setdefault("LLAISYS_DEVICE", "cpu")

# Fakes, reference models and servers that several folders use.
sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

if TYPE_CHECKING:
    import httpx
    from server_helpers import ServerProcess

MARKERS = {
    "parity": "compares with transformers or torch models (needs transformers)",
    "hf": "needs a real model from outside the repository (--model-path)",
    "slow": "takes more than a few seconds",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model-path",
        type=Path,
        default=None,
        metavar="DIR",
        help="a real model (config.json, tokenizer.json, *.safetensors) for the `hf` tests",
    )
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="run N test files at a time, each in a fork of this process",
    )
    parser.addoption(
        "--cpu-by-file",
        type=int,
        default=0,
        metavar="N",
        help="print the N files that took most CPU time, processes that ended included",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Imports allocate much and free little: no garbage collection during them, and none of later
    ones scans the millions of objects of torch and pytest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if count := config.getoption("--workers"):
        from forked_workers import ForkedWorkers

        config.pluginmanager.register(ForkedWorkers(count, library_error))


_cpu_seconds = [0.0]  # when the last test began


def cpu_seconds() -> float:
    """CPU time of this process, of its ended children and of the ended servers of prefork."""
    prefork = sys.modules.get("prefork")
    return sum(os.times()[:4]) + (prefork.ended_seconds[0] if prefork else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add the CPU seconds since the last test to the report of a teardown."""
    report = yield
    if call.when == "teardown":
        now = cpu_seconds()
        report.user_properties.append(("cpu_seconds", now - _cpu_seconds[0]))
        _cpu_seconds[0] = now
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seconds: Counter[str] = Counter()
    for report in chain(*terminalreporter.stats.values()):
        for name, value in getattr(report, "user_properties", ()):
            if name == "cpu_seconds":
                seconds[report.nodeid.split("::")[0]] += value
    for path, spent in seconds.most_common(config.getoption("--cpu-by-file")):
        terminalreporter.write_line(f"{spent:8.1f} s of CPU  {path}")


def library_error() -> str | None:
    """LLAISYS_LIBRARY names the library under test (make sanitize): make sure it was that one."""
    library = os.environ.get("LLAISYS_LIBRARY")
    maps = Path("/proc/self/maps")
    if not library or "llaisys.libllaisys" not in sys.modules or not maps.exists():
        return None
    if str(Path(library).resolve()) in maps.read_text():
        return None
    return f"error: LLAISYS_LIBRARY={library} was not loaded"


def pytest_sessionfinish(session: pytest.Session) -> None:
    error = None if session.config.getoption("--workers") else library_error()
    if error:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        print(f"\n{error}", file=sys.stderr)


@pytest.fixture(scope="session")
def model_path(request: pytest.FixtureRequest) -> Path:
    """The directory given by --model-path; a test that asks for it skips, by name, without one."""
    path: Path | None = request.config.getoption("--model-path")
    if path is None:
        pytest.skip("needs --model-path DIR")
    if not (path / "config.json").is_file():
        raise pytest.UsageError(f"--model-path {path}: no config.json there")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of http_helpers, one for each test file; a file may have one of its own."""
    from http_helpers import http_server

    with http_server(tmp_path_factory.mktemp("http")) as process:
        yield process


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks of engines in this process are forks of a process that has imported their modules."""
    from prefork import RankSubprocess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llaisys.processes.child.subprocess", RankSubprocess)
        yield


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """Speaks to `server` with its first key."""
    with server.client(server.key) as client:
        yield client
