"""Servers and ranks by fork, in a tenth of the CPU time of a start that imports everything.

    python test/helpers/prefork.py FD

is the process that has imported the modules of a server, its engine and a rank. `start` sends it
the program to run in a fork; it reports the exit status of each. In a fork, an engine that is
started before there are threads is a fork as well. Tests of the start itself do not use it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

PRODUCT = "llaisys.server.__main__"
PROGRAMS = ("fault_server", "scripted_server", PRODUCT)
RANK = "llaisys.engine.executor.rank_process"
ENGINES = ("fault_engine", "scripted_engine", "llaisys.server.engine_client.process")
MODULES = (
    "llaisys.entrypoints.cli",
    "llaisys.server.lifecycle",
    "llaisys.server.app",
    "llaisys.server.route.main",
)
MESSAGE = 1 << 17  # bytes at most
MAX_FILES = 16  # descriptors that are sent with a program
ABOVE = 256  # received descriptors are moved there, out of the way of the numbers they get

# ---- in the test process -------------------------------------------------------------------------

ended_seconds = [0.0]  # CPU time of the servers that have ended, with that of their own children


class Forked:
    """What tests and `ChildProcess` use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
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


class ForkedServer(Forked):
    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        super().__init__(pid)
        self.stdout = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.stderr = os.fdopen(stderr, encoding="utf-8", errors="replace")


class ForkedRank(Forked):
    def __init__(self, pid: int, stdin: int) -> None:
        super().__init__(pid)
        self.stdin = os.fdopen(stdin, "wb")


Process = TypeVar("Process", bound=Forked)


class Preforked:
    """The process of this module, from the test's side."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._running: dict[int, Forked] = {}
        self._started: list[int] = []
        self._closed = False
        self._condition = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while message := self._socket.recv(MESSAGE):
                self._take(json.loads(message))
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _take(self, report: dict[str, Any]) -> None:
        with self._condition:
            if "started" in report:
                self._started.append(report["started"])
                self._condition.notify_all()
                self._condition.wait_for(lambda: not self._started)
            else:
                process = self._running.pop(report["pid"])
                ended_seconds[0] += report["cpu_seconds"]
                process.returncode = report["status"]
                process.ended.set()

    def start(
        self, program: str, arguments: list[str], environment: dict[str, str]
    ) -> ForkedServer:
        """Run `main()` of a module."""
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        order = {"program": program, "arguments": arguments, "environment": environment}
        return self._fork(
            order, {1: their_out, 2: their_err}, lambda pid: ForkedServer(pid, out, err)
        )

    def start_rank(
        self, environment: dict[str, str], stdout: int, pass_fds: Sequence[int]
    ) -> ForkedRank:
        """Run a rank in the working directory and a process group of its own."""
        their_stdin, stdin = os.pipe()
        order = {
            "program": RANK,
            "arguments": [],
            "environment": environment,
            "directory": os.getcwd(),
            "is_group": True,
        }
        files = {0: their_stdin, 1: os.dup(stdout), 2: os.dup(2)}
        files |= {number: os.dup(number) for number in pass_fds}
        return self._fork(order, files, lambda pid: ForkedRank(pid, stdin))

    def _fork(
        self, order: dict[str, Any], files: dict[int, int], make: Callable[[int], Process]
    ) -> Process:
        """`files`: number in the fork -> descriptor here, which is closed."""
        message = json.dumps({**order, "files": list(files)}).encode()
        with self._condition:
            socket.send_fds(self._socket, [message], list(files.values()))
            self._condition.wait_for(lambda: self._started or self._closed)
            assert self._started, "the process that forks servers has ended"
            process = make(self._started.pop())
            self._running[process.pid] = process
            self._condition.notify_all()
        for file in files.values():
            os.close(file)
        return process

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)


@functools.cache
def preforked() -> Preforked:
    """The one of this test process, started when it is first needed."""
    from server_helpers import PYTHON_PATH

    found = Preforked({**os.environ, "PYTHONPATH": PYTHON_PATH})
    atexit.register(found.close)
    return found


class RankSubprocess:
    """The module `subprocess` for `llaisys.processes.child` in a test process: ranks by fork."""

    PIPE = subprocess.PIPE

    @staticmethod
    def Popen(
        command: list[str],
        env: dict[str, str],
        stdout: int,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> Any:
        if command[-1] == RANK:
            return preforked().start_rank(env, stdout, pass_fds)
        return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)


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
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        report = {
            "pid": pid,
            "status": os.waitstatus_to_exitcode(status),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }
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
        message, files, _, _ = socket.recv_fds(channel, MESSAGE, MAX_FILES)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            moved = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
            for used in (*files, channel.detach(), wake.detach(), woken.detach()):
                os.close(used)
            for number, file in zip(order["files"], moved, strict=True):
                os.dup2(file, number)
                os.close(file)
            return order
        if order.get("is_group"):
            os.setpgid(pid, pid)
        for file in files:
            os.close(file)
        channel.send(json.dumps({"started": pid}).encode())


def main() -> int:
    for module in (*MODULES, *PROGRAMS, *ENGINES, RANK):
        importlib.import_module(module)
    order = serve_forks(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        return 0
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order.get("directory", "."))
    from llaisys.processes import child

    child.subprocess = Subprocess  # type: ignore[assignment]
    sys.argv[1:] = order["arguments"]
    return int(importlib.import_module(order["program"]).main())


if __name__ == "__main__":
    sys.exit(main())
