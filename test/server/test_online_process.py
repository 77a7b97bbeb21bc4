"""Server processes: signals, ports, errors at start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_engine import STEP_SECONDS
from server_helpers import (
    LONG,
    PACKAGE,
    ServerProcess,
    alive,
    open_files,
    socket_directories,
    wait_for,
)
from wire_helpers import raw_request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(session_file=tmp_path_factory.mktemp("process") / "s.db") as process:
        yield process.wait_ready()


def test_sigterm_drains_and_second_sigterm_aborts(tmp_path: Path) -> None:
    with ServerProcess(env={STEP_SECONDS: "0.01"}, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        pid, before = server.engine_pid, socket_directories()
        drained = raw_request(server, {**LONG, "max_tokens": 60})
        endless = raw_request(server, {**LONG, "stream": True})
        server.wait_for(lambda: server.metric("num_requests_running") == 2, "two requests")
        with server.client() as client:
            server.process.terminate()
            wait_for(lambda: client.get("/ready").status_code == 503, "the drain")
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert client.get("/health").status_code == 200
            assert b"200 OK" in drained.recv(1 << 16)
        server.process.terminate()
        received = b""
        while chunk := endless.recv(1 << 16):
            received += chunk
        assert b'"finish_reason":"abort"' in received and b"data: [DONE]" in received
        assert server.process.wait(30) == 1
        assert not alive(pid) and len(socket_directories()) < len(before)


def test_only_one_port_listens_and_it_is_local(server: ServerProcess) -> None:
    files = [*open_files(server.process.pid), *open_files(server.engine_pid)]
    inodes = {name[8:-1] for name in files if name.startswith("socket:[")}
    listening = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            waits = fields[3] == "0A" or table.startswith("udp")
            if waits and fields[9] in inodes:
                listening.append(fields[1])
    address = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert listening == [f"{address}:{server.address[1]:04X}"]


@pytest.mark.parametrize("command", [("llaisys.server",), ("llaisys", "serve")])
def test_port_in_use_and_missing_model_are_reported(
    server: ServerProcess, tmp_path: Path, command: tuple[str, ...]
) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        options = (*options, "--session-file", str(tmp_path / "s.db"))
        return subprocess.run(
            [sys.executable, "-m", *command, *options],
            env={**os.environ, "PYTHONPATH": str(PACKAGE)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    taken = run("--port", str(server.address[1]))
    assert taken.returncode == 1 and "cannot listen" in taken.stderr
    missing = run(str(tmp_path / "no-model"), "--port", "0")
    assert missing.returncode == 1
    last = missing.stderr.splitlines()[-1]
    assert last.startswith("error: model: ") and "no-model" in last
    assert "Traceback" not in missing.stderr
    bad = run("--max-num-seqs", "0")
    assert bad.returncode == 1 and "max_num_seqs" in bad.stderr
    assert run("--no-such-option").returncode == 2
