"""A server without descriptors or memory, with a clock that jumps, beyond its context, and with
damaged configuration files: it answers or rejects, and works again afterwards."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import HELPERS, PACKAGE, ServerProcess, wait_for

from llaisys.common.errors import LlaisysError
from llaisys.common.flags import OptionParser
from llaisys.server.options import add_arguments, config_from_args

pytestmark = pytest.mark.slow

TEXT = "/v1/completions"
SHORT = {"prompt": "hi", "max_tokens": 3, "temperature": 0}


def works(server: ServerProcess) -> bool:
    with server.client(timeout=20) as client, contextlib.suppress(httpx.HTTPError):
        healthy = client.get("/health").status_code == 200
        return healthy and client.post(TEXT, json=SHORT).status_code == 200
    return False


@contextlib.contextmanager
def limited(pid: int, kind: int, value: int) -> Any:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, (soft, hard))


def test_server_without_descriptors_answers_again_when_there_are_some() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        assert works(server)
        pid = server.process.pid
        used = len(os.listdir(f"/proc/{pid}/fd"))
        connections: list[socket.socket] = []
        with limited(pid, resource.RLIMIT_NOFILE, used + 6):
            for _ in range(40):  # beyond the limit they wait in the backlog
                connections.append(server.connect())
            connections[0].sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connections[0].recv(4096).startswith(b"HTTP/1.1 200")
            for connection in connections:
                connection.close()
        wait_for(lambda: works(server), "answers with descriptors")
        wait_for(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= used + 2, "closed descriptors")
        assert server.process.poll() is None and server.stop() == 0


def test_server_without_memory_answers_again_when_there_is_some() -> None:
    """RLIMIT_DATA, as a container's limit would fail allocations."""
    with ServerProcess() as server:
        server.wait_ready()
        assert works(server)
        pid = server.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        data = next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
        body = json.dumps({"prompt": [1] * 130_000 + ["x" * 6_000_000], "max_tokens": 1}).encode()
        seen = set()
        with limited(pid, resource.RLIMIT_DATA, (data << 10) + (4 << 20)):
            for _ in range(8):
                with (
                    contextlib.suppress(httpx.HTTPError),
                    server.client(headers={"content-type": "application/json"}) as client,
                ):
                    seen.add(client.post(TEXT, content=body).status_code)
        wait_for(lambda: works(server), "answers with memory")
        assert seen <= {400, 413, 500, 503}, seen
        assert server.process.poll() is None


CLOCK = """
import mmap, os, struct, time
with open(os.environ["TEST_CLOCK"], "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
real = time.time
time.time = lambda: real() + struct.unpack("d", offset[:8])[0]
"""


def test_jumps_of_the_wall_clock_end_no_request(tmp_path: Path) -> None:
    site, clock = tmp_path / "site", tmp_path / "clock"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK)
    clock.write_bytes(bytes(8))
    path = os.pathsep.join([str(site), str(PACKAGE), str(HELPERS)])
    env = {"PYTHONPATH": path, "TEST_CLOCK": str(clock), "LLAISYS_TEST_STEP_SECONDS": "0.01"}
    keys = tmp_path / "keys"
    key = {"key": "k", "name": "n", "requests_per_minute": 1000, "tokens_per_minute": 1_000_000}
    keys.write_text(json.dumps(key) + "\n")
    with (
        ServerProcess("--api-key-file", str(keys), env=env) as server,
        clock.open("r+b") as file,
        mmap.mmap(file.fileno(), 8) as offset,
    ):
        server.wait_ready()
        body = {**SHORT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with server.client("k") as client:
            for seconds in (-86_400.0, 400 * 86_400.0, -4e8, 1e9, 0.0):
                count, finished = 0, False
                with client.stream("POST", TEXT, json=body) as response:
                    assert response.status_code == 200
                    for line in response.iter_lines():
                        count += line.startswith("data: {")
                        finished |= '"finish_reason":"length"' in line
                        if count == 20:
                            offset[:8] = struct.pack("d", seconds)
                assert finished, f"jump of {seconds} s"
                assert client.get("/health").status_code == 200
        server.wait_idle("k")


def test_hostile_requests_with_context_shift() -> None:
    """Answers of many contexts, prompts at the limit, every `n_keep`: tokens or a 400."""
    with ServerProcess(
        "--context-shift", "--max-model-len", "64", "--num-kv-blocks", "64"
    ) as server:
        server.wait_ready()
        chance = random.Random(3)
        statuses = []
        with server.client() as client:
            for _ in range(60):
                length = chance.choice([1, 2, 31, 32, 33, 62, 63, 64, 65, 200])
                keep = chance.choice([None, -1, 0, 1, 31, 62, 63, 64, 10**6])
                most = chance.choice([1, 3, 64, 65, 300])
                body = {"prompt": [97] * length, "max_tokens": most, "ignore_eos": True}
                body |= {} if keep is None else {"n_keep": keep}
                body |= {"n": chance.choice([1, 3])}
                answer = client.post(TEXT, json=body)
                statuses.append(answer.status_code)
                assert answer.status_code in (200, 400), answer.text
                if answer.status_code == 200:
                    usage = answer.json()["usage"]["completion_tokens"]
                    assert usage == most * body["n"], (body, usage)
            assert {200, 400} <= set(statuses)
        server.wait_idle()


CONFIG = """
port = 8000
max_queued = 10
log_level = "info"
allowed_host = ["a.example", "b.example"]
memory_budget = "2GiB"
[models.a]
model = "org/name"
max_model_len = 512
[models.b]
model = "mock"
aliases = ["x"]
"""


def test_mutated_configuration_files_are_read_or_rejected(tmp_path: Path) -> None:
    parser = OptionParser()
    add_arguments(parser)
    file = tmp_path / "serve.toml"
    rejected = 0
    for seed in range(400):
        chance, data = random.Random(seed), bytearray(CONFIG.encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            kind = chance.randrange(4)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at : at + chance.randint(1, 20)]
            elif kind == 2:
                data[at:at] = chance.choice([b"[[", b"{", b'"""', b"= 1e999", b"\x00", b"[" * 5000])
            else:
                data[at:at] = data[: chance.randrange(len(data))]
        file.write_bytes(bytes(data))
        try:
            config_from_args(parser.parse_args(["--config", str(file)]))
        except LlaisysError as error:
            rejected += 1
            assert len(str(error)) < 2000, f"seed {seed}"
    assert rejected > 100
