"""Test servers by fork, in a tenth of the CPU time of a start that imports everything again.

    python test/helpers/prefork.py FD

is the process that has imported the modules of a server and of its engine. `start` sends it the
program to run in a fork; it reports the exit status of each. In a fork, an engine that is started
before there are threads is a fork as well. Tests of the start itself do not use it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PRODUCT = "llaisys.server.__main__"
PROGRAMS = ("fault_server", "scripted_server", PRODUCT)
ENGINES = ("fault_engine", "scripted_engine", "llaisys.server.engine_client.process")
MODULES = (
    "llaisys.entrypoints.cli",
    "llaisys.server.lifecycle",
    "llaisys.server.app",
    "llaisys.server.route.main",
)
MESSAGE = 1 << 17  # bytes at most

# ---- in the test process -------------------------------------------------------------------------


class ForkedServer:
    """What tests use of subprocess.Popen."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()
        self.stdout = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.stderr = os.fdopen(stderr, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preforked:
    """The process of this module, from the test's side."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._servers: dict[int, ForkedServer] = {}
        self._started: list[int] = []
        self._condition = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while message := self._socket.recv(MESSAGE):
            report = json.loads(message)
            with self._condition:
                if "started" in report:
                    self._started.append(report["started"])
                    self._condition.notify_all()
                    self._condition.wait_for(lambda: not self._started)
                else:
                    server = self._servers.pop(report["pid"])
                    server.returncode = report["status"]
                    server.ended.set()

    def start(
        self, program: str, arguments: list[str], environment: dict[str, str]
    ) -> ForkedServer:
        """Run `main()` of a module."""
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        order = {"program": program, "arguments": arguments, "environment": environment}
        with self._condition:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [their_out, their_err])
            self._condition.wait_for(lambda: self._started)
            server = ForkedServer(self._started.pop(), out, err)
            self._servers[server.pid] = server
            self._condition.notify_all()
        os.close(their_out)
        os.close(their_err)
        return server

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)


@functools.cache
def preforked() -> Preforked:
    """The one of this test process, started when it is first needed."""
    from server_helpers import HELPERS, PACKAGE

    path = os.pathsep.join([str(PACKAGE), str(HELPERS)])
    found = Preforked({**os.environ, "PYTHONPATH": path})
    atexit.register(found.close)
    return found


# ---- in the process that forks -------------------------------------------------------------------


class ForkedEngine:
    """What `ChildProcess` uses of subprocess.Popen."""

    def __init__(self, module: str, environment: dict[str, str], stdout: int) -> None:
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.dup2(reading, 0)
            os.dup2(stdout, 1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            run_engine(module, environment)
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is None
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run_engine(module: str, environment: dict[str, str]) -> None:
    """Does not return."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        importlib.import_module(module).main()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def popen(command: list[str], env: dict[str, str], stdout: int, **options: Any) -> Any:
    """subprocess.Popen in `llaisys.processes.child`: engines by fork where that is safe."""
    if command[-1] in ENGINES and threading.active_count() == 1:
        return ForkedEngine(command[-1], env, stdout)
    return subprocess.Popen(command, env=env, stdout=stdout, **options)


class Subprocess:
    """The module `subprocess`, as `llaisys.processes.child` uses it."""

    PIPE = subprocess.PIPE
    Popen = staticmethod(popen)


def report_ended(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        report = {"pid": pid, "status": os.waitstatus_to_exitcode(status)}
        channel.send(json.dumps(report).encode())


def serve_forks(channel: socket.socket) -> dict[str, Any] | None:
    """Return what to run in each fork, and None in this process once the test process has ended."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            report_ended(channel)
        if channel not in ready:
            continue
        message, files, _, _ = socket.recv_fds(channel, MESSAGE, 2)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
            for used in (*files, channel.detach(), wake.detach(), woken.detach()):
                os.close(used)
            order: dict[str, Any] = json.loads(message)
            return order
        for file in files:
            os.close(file)
        channel.send(json.dumps({"started": pid}).encode())


def main() -> int:
    for module in (*MODULES, *PROGRAMS, *ENGINES):
        importlib.import_module(module)
    order = serve_forks(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        return 0
    os.environ.clear()
    os.environ.update(order["environment"])
    from llaisys.processes import child

    child.subprocess = Subprocess  # type: ignore[assignment]
    sys.argv[1:] = order["arguments"]
    return int(importlib.import_module(order["program"]).main())


if __name__ == "__main__":
    sys.exit(main())
