"""What run_llama_cpp_tests.py and run_vllm_tests.py share: servers that are kept between tests, and
counts by file."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_KEPT = 3
START_SECONDS = 300.0


class Servers:
    """Servers by their options. The oldest is stopped when there are more than MAX_KEPT."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.max_kept = MAX_KEPT
        self.running: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, options: Sequence[str]) -> int:
        """Return the port of a server with `options`; it may not be ready yet."""
        key = tuple(options)
        if key in self.running and self.running[key][0].poll() is None and self.max_kept > 1:
            self.running[key] = self.running.pop(key)
            return self.running[key][1]
        self.running.pop(key, None) if self.max_kept > 1 else self.stop_all()
        while len(self.running) >= self.max_kept:
            self._stop(next(iter(self.running)))
        port = free_port()
        command = [sys.executable, "-m", "llaisys.server", *options, "--port", str(port)]
        command += ["--session-file", str(self.logs / f"{port}.sqlite3")]
        with (self.logs / f"{port}.log").open("w") as log:
            log.write(" ".join([*options, "\n"]))
            log.flush()
            env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self.running[key] = process, port
        return port

    def process(self, port: int) -> subprocess.Popen[bytes]:
        return next(process for process, at in self.running.values() if at == port)

    def wait_ready(self, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process(port).poll() is not None:
                raise RuntimeError(f"the server did not start: {self.logs / f'{port}.log'}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise TimeoutError(f"no server after {START_SECONDS} s")

    def keep_none(self) -> None:
        """From now on every `start` starts a new server."""
        self.stop_all()
        self.max_kept = 1

    def _stop(self, key: tuple[str, ...]) -> None:
        process, _ = self.running.pop(key)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()

    def stop_all(self) -> None:
        for key in list(self.running):
            self._stop(key)


class Counts:
    """A plugin of pytest: outcomes by file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}  # by test; the latest

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.nodeid] = report.outcome

    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    def rows(self) -> Iterator[str]:
        yield "| File | Tests | Pass | Fail | Skip |"
        yield "|---|---|---|---|---|"
        files: dict[str, Counter[str]] = {}
        for test, outcome in self.outcomes.items():
            file = Path(test.split("::")[0]).stem.removeprefix("test_")
            files.setdefault(file, Counter())[outcome] += 1
        for file, counts in sorted(files.items()):
            yield self._row(f"`{file}`", counts)
        yield self._row("all", Counter(self.outcomes.values()))

    def _row(self, name: str, counts: Counter[str]) -> str:
        cells = (sum(counts.values()), counts["passed"], counts["failed"], counts["skipped"])
        return f"| {name} | {' | '.join(map(str, cells))} |"


def run(
    settings: Sequence[str],
    arguments: Sequence[str],
    servers: Servers,
    *plugins: Any,
    again: bool = False,
) -> int:
    """Run pytest and print the counts. `again`: tests that fail run once more, each on a new
    server."""
    pytest = importlib.import_module("pytest")  # of the test packages
    counts = Counts()

    def end(*_: object) -> None:
        servers.stop_all()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    try:
        status = pytest.main([*settings, *arguments], [counts, *plugins])
        if again and (failed := counts.failed()):
            servers.keep_none()
            flags = [argument for argument in arguments if argument.startswith("-")]
            status = pytest.main([*settings, *flags, *failed], [counts, *plugins])
    finally:
        servers.stop_all()
    print(*counts.rows(), sep="\n")
    return int(status)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
