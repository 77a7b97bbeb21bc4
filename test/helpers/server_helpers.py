"""A real server in real processes for tests, with a model that has no weights and faults on demand:
the program is `fault_server`, its engine process `fault_engine`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fault_engine import CONTEXT, FAULT_FILE
from prefork import PRODUCT, preforked

import llaisys

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "test" / "helpers"
PACKAGE = Path(llaisys.__file__).resolve().parent.parent  # the one under test, installed or not
PYTHON_PATH = os.pathsep.join(
    filter(None, [str(PACKAGE), str(HELPERS), os.environ.get("PYTHONPATH")])
)
# Servers of other test runs on this machine must not be taken for ours: a folder of our own, which
# the processes started here inherit.
if "LLAISYS_TEST_TMP" not in os.environ:
    own = tempfile.mkdtemp(prefix="ll-")
    os.environ["LLAISYS_TEST_TMP"] = os.environ["TMPDIR"] = tempfile.tempdir = own
    atexit.register(shutil.rmtree, own, ignore_errors=True)
START_SECONDS = 90.0
LONG = {"prompt": "long", "max_tokens": CONTEXT - 100, "ignore_eos": True, "temperature": 0}


class Gate:
    """The fault file from the test's side; without an order the engine runs freely."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fault"
        self.env = {FAULT_FILE: str(self.path)}
        self._held = folder / "fault.held"
        self._number = 0

    def order(self, fault: str) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(fault)
        draft.replace(self.path)  # in one piece

    def hold(self) -> None:
        """Returns when the engine stands still inside a step."""
        self._hold("wait")

    def hold_in_prefill(self) -> None:
        """Release the engine and wait until it stops in the middle of a prompt again."""
        self._number += 1
        self._hold(f"prefill {self._number}")

    def run_steps(self, count: int) -> None:
        """Release the engine and wait until it stops again after `count` steps."""
        self._number += 1
        self._hold(f"steps {count} {self._number}")

    def _hold(self, order: str) -> None:
        self._held.unlink(missing_ok=True)
        self.order(order)
        wait_for(
            lambda: self._held.exists() and self._held.read_text() == order,
            f"the engine to {order}",
        )

    def open(self) -> None:
        self.path.unlink(missing_ok=True)


class ServerProcess:
    """Started in the constructor; `wait_ready`, `stop` and the context manager do the rest. It has
    a session file of its own unless one is named."""

    def __init__(
        self,
        *options: str,
        env: dict[str, str] | None = None,
        real: bool = False,
        session_file: Path | None = None,
        program: str | None = None,
        command: list[str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`real`: with the product's own engine; `program`: the module of another one, forked by
        `prefork`. `command`: arguments of an interpreter that is started instead, in `cwd`."""
        program = PRODUCT if real else program or "fault_server"
        named = "--api-key" in options
        self.key = options[options.index("--api-key") + 1] if named else None  # the first
        self._folder = tempfile.TemporaryDirectory(prefix="test-server-")
        kept = session_file or Path(self._folder.name) / "sessions.sqlite3"
        options = (*options, "--session-file", str(kept))
        arguments = ["--port", "0", "--log-format", "json", *options]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, **(env or {})}
        self.process: Any
        if command is None:
            self.process = preforked().start(program, arguments, environment)
        else:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *command,
                    *arguments,
                ],
                env=environment,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()
        threading.Thread(target=self._read_output, daemon=True).start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("llaisys: serving"):
                self.url = line.split()[-1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> ServerProcess:
        self._ready.wait(START_SECONDS)
        assert self.url, "the server did not start:\n" + "\n".join(self.log[-30:])
        return self

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].split(":")
        return host, int(port)

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= options.pop("headers", {})
        options.setdefault("timeout", 60)
        options.setdefault("verify", False)  # plain HTTP: do not read the system's certificates
        return httpx.Client(base_url=self.url, headers=headers, **options)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A plain connection; `receive_buffer` bytes are what it takes without being read."""
        connection = socket.socket()
        if receive_buffer is not None:  # before the handshake, or the window is wide open already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(self.address)
        return connection

    @property
    def num_connections(self) -> int:
        """Sockets of clients that the API process holds, dead ones included."""
        sockets = {name for name in open_files(self.process.pid) if name.startswith("socket:")}
        rows = Path("/proc/net/unix").read_text().splitlines()[1:]
        listener = 1
        return len(sockets - {f"socket:[{row.split()[6]}]" for row in rows}) - listener

    @property
    def load(self) -> int:
        """Requests that the API process has admitted and not answered."""
        with self.client(self.key) as client:
            return int(client.get("/load").json()["server_load"])

    def metric(self, name: str, key: str | None = None) -> float:
        """The sum over the labels of a metric; 0 before its first label."""
        with self.client(key) as client:
            text = client.get("/metrics").text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"llaisys:{name}{{", f"llaisys:{name} "))
        ]
        family = name.removesuffix("_total")
        assert values or f"# TYPE llaisys:{family}" in text, f"no metric {name}"
        return sum(values)

    def wait_idle(self, key: str | None = None) -> None:
        """Until the engine says that nothing runs and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
        self.wait_for(lambda: all(self.metric(name, key) == 0 for name in names), "an idle engine")

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """`wait_for` with the server's last log lines in the failure."""
        try:
            wait_for(condition, what, seconds)
        except AssertionError as error:
            telling = [line for line in self.log if '"/metrics"' not in line]
            raise AssertionError(f"{error}\n" + "\n".join(telling[-40:])) from None

    def events(self) -> list[dict[str, Any]]:
        """The log lines of the server that are JSON."""
        found = []
        for line in list(self.log):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            finally:
                if self.process.poll() is None:
                    self.process.kill()
                self.process.wait()
        self._folder.cleanup()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Poll; the time is only a bound for when it never comes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process point at."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            names.append(os.readlink(link))
    return names


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def socket_directories() -> set[str]:
    """Where servers of this test process keep their sockets."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("llaisys-*")}
