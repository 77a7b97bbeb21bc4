"""A real server in real processes for tests, with a model that has no weights and faults on demand.

    python test/helpers/server_helpers.py serve [options of `llaisys serve`]

runs the server's own code; only the engine process is this file instead of
`llaisys.server.engine_client.process`, so that its model is `FaultAdapter`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
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
from engine_fakes import FakeAdapter, FakeTokenizer

import llaisys
from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput
from llaisys.models.base import AdapterOptions

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(llaisys.__file__).resolve().parent.parent  # the one under test, installed or not
# Servers of other test runs on this machine must not be taken for ours: a folder of our own, which
# the processes started here inherit.
if "LLAISYS_TEST_TMP" not in os.environ:
    own = tempfile.mkdtemp(prefix="ll-")
    os.environ["LLAISYS_TEST_TMP"] = os.environ["TMPDIR"] = tempfile.tempdir = own
    atexit.register(shutil.rmtree, own, ignore_errors=True)
FAULT_FILE = "LLAISYS_TEST_FAULT_FILE"
STEP_SECONDS = "LLAISYS_TEST_STEP_SECONDS"
CONTEXT = 2048
START_SECONDS = 90.0
PANIC = "the tokenizer panics"
UNTOUCHABLE = "not to be tokenised"
INLINE_CHARS = 4096  # what the server tokenises at once
LONG = {"prompt": "long", "max_tokens": CONTEXT - 100, "ignore_eos": True, "temperature": 0}


class PanicException(BaseException):
    """As PyO3 raises it."""


class OffLoopTokenizer(FakeTokenizer):
    """Long texts must not be tokenised on the event loop, which is the main thread, and
    UNTOUCHABLE not at all: either is a 500."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        on_loop = threading.current_thread() is threading.main_thread()
        if on_loop and len(text) > INLINE_CHARS:
            raise AssertionError(f"{len(text)} characters were tokenised on the event loop")
        if text == UNTOUCHABLE:
            raise AssertionError("this text was tokenised")
        if text.startswith(PANIC):
            raise PanicException("a panic inside Rust")
        return super().encode(text, add_special_tokens)


class FaultAdapter(FakeAdapter):
    """`FakeAdapter` that does what the fault file says: `raise`, `raise once`, `hang`, `exit`,
    `wait` for as long as it says so, or `prefill N`: wait where a prompt is not complete. What it
    is waiting for then stands in the file `*.held`. `load DONE TOTAL`: stand there with loading.
    See `Gate`."""

    max_len = CONTEXT

    @classmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> FakeAdapter:
        while (fault := cls.fault()).startswith("load"):
            _, done, total = fault.split()
            report("loading weights", int(done), int(total))
            time.sleep(0.002)
        return super().load(checkpoint, options)

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        pause = float(os.environ.get(STEP_SECONDS, "0"))
        if pause:
            time.sleep(pause)
        halves = len(set(step.seq_ids.tolist())) > int(step.logits_mask.sum())
        held = ""
        while (fault := self.fault()) == "wait" or (halves and fault.startswith("prefill")):
            if held and fault != held:
                break  # another order: for the next step
            held = fault
            Path(os.environ[FAULT_FILE] + ".held").write_text(held)
            time.sleep(0.002)
        if fault == "raise once":
            Path(os.environ[FAULT_FILE]).unlink()
        if fault.startswith("raise"):
            raise RuntimeError("secret detail at 0x7f00deadbeef in /root/model")
        if fault == "hang":
            time.sleep(3600)
        if fault == "exit":
            os._exit(17)
        return super().forward(step, attention)

    @staticmethod
    def fault() -> str:
        name = os.environ.get(FAULT_FILE)
        if not name or not os.path.exists(name):
            return ""
        with contextlib.suppress(FileNotFoundError):
            return Path(name).read_text()
        return ""


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
        """Lets go, and returns when the engine stands still in the middle of a prompt again."""
        self._number += 1
        self._hold(f"prefill {self._number}")

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
        command: list[str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`real`: with the product's own engine; `command`: started in another way."""
        if real:
            command = ["-m", "llaisys.server"]
        elif command is None:
            command = [str(ROOT / "test" / "helpers" / "server_helpers.py"), "serve"]
        named = "--api-key" in options
        self.key = options[options.index("--api-key") + 1] if named else None  # the first
        self._folder = tempfile.TemporaryDirectory(prefix="test-server-")
        kept = session_file or Path(self._folder.name) / "sessions.sqlite3"
        options = (*options, "--session-file", str(kept))
        path = os.pathsep.join([str(PACKAGE), str(ROOT / "test" / "helpers")])
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0", "--log-format", "json", *options],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
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

    def metric(self, name: str, key: str | None = None) -> float:
        """The sum over the labels of a metric."""
        with self.client(key) as client:
            text = client.get("/metrics").text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"llaisys:{name}{{", f"llaisys:{name} "))
        ]
        assert values, f"no metric {name}"
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


def main() -> int:
    from llaisys.server.options import add_arguments, config_from_args

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--exit-delay", type=float, default=1.5)
    args = parser.parse_args(sys.argv[2:])
    config = config_from_args(args)
    engine = dataclasses.replace(config.engine, model="mock", tokenizer=OffLoopTokenizer())
    health = dataclasses.replace(config.health, exit_delay=args.exit_delay)
    names = config.served_model_names or ("fake",)
    from llaisys.server.http_server import serve

    return serve(
        dataclasses.replace(
            config,
            engine=engine,
            engine_module="server_helpers",
            served_model_names=names,
            health=health,
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(main())
    from llaisys.common.model_registry import MODEL_REGISTRY
    from llaisys.server.engine_client import process as engine_process

    MODEL_REGISTRY["mock"] = "server_helpers:FaultAdapter"
    engine_process.main()
