"""`llaisys serve` during loading: a progress bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest
from server_helpers import HELPERS, PACKAGE, Gate, ServerProcess
from terminal import Terminal

from llaisys.common.errors import InvalidInputError
from llaisys.server.http_server import PORT_IN_USE, bind

PROGRAM = (str(HELPERS / "fault_server.py"),)


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.order("load 1 4")
    options = ("--port", "0", "--session-file", str(tmp_path / "s.db"), "--log-level", "error")
    path = f"{PACKAGE}:{HELPERS}"
    with Terminal(*options, program=PROGRAM, env={**gate.env, "PYTHONPATH": path}) as terminal:
        terminal.read_until("loading weights [" + "#" * 7 + "." * 23 + "]  25 %")
        gate.order("load 3 4")
        terminal.read_until(" 75 %")
        gate.open()
        terminal.read_until("llaisys: serving fake at http://127.0.0.1:")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 0
    assert "%" not in terminal.screen  # the bar is erased at the end


def test_log_line_per_stage_without_a_terminal(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.order("load 1 4")
    with ServerProcess(env=gate.env) as server:

        def stages() -> list[str]:
            return [event["stage"] for event in server.events() if event["message"] == "loading"]

        server.wait_for(lambda: "loading weights" in stages(), "the stage in the log")
        gate.order("load 2 4")
        gate.open()
        server.wait_ready()
        assert stages().count("loading weights") == 1
        assert "%" not in "".join(server.log)


def test_failed_load_is_reported_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    with ServerProcess(missing, real=True) as server:
        assert server.process.wait(60) == 1
    errors = [event for event in server.events() if event["level"] == "error"]
    assert len(errors) == 1 and missing in errors[0]["message"]


def test_health_is_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    """Compose files and proxies that wait for /health must not send early; /live reports only the
    process."""
    gate = Gate(tmp_path)
    gate.order("load 1 4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with ServerProcess("--port", str(port), "--api-key", "k", env=gate.env) as server:

        def health() -> tuple[int, dict[str, object]]:
            try:
                answer = httpx.get(f"{url}/health", timeout=60)
            except httpx.ConnectError:
                return 0, {}
            return answer.status_code, answer.json()

        body = {"status": "loading", "stage": "loading weights", "progress": 0.25}
        server.wait_for(lambda: health() == (503, body), "the progress")
        assert httpx.get(f"{url}/health", timeout=60).headers["retry-after"] == "1"
        assert httpx.get(f"{url}/live", timeout=60).json() == {"status": "alive"}
        gate.open()
        server.wait_ready()
        assert health() == (200, {"status": "ok"})
        assert httpx.get(f"{url}/live", timeout=60).status_code == 200


def test_port_accepts_connections_and_is_exclusive_from_start() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
        with pytest.raises(InvalidInputError, match="--port ") as caught:
            bind("127.0.0.1", port)
        assert (caught.value.code, caught.value.value) == (PORT_IN_USE, port)
