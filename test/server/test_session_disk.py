"""The session file on a full disk: nothing is lost in silence, deleting and restarting work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_fakes
import httpx
import pytest
from engine_fakes import FakeTokenizer
from loop_meter import server_client
from server_helpers import HELPERS, PACKAGE, ServerProcess

from llaisys.common.errors import InvalidInputError
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.server.config import ServerConfig
from llaisys.server.errors import SessionDiskFullError
from llaisys.server.sessions.responses import ResponseStore
from llaisys.server.sessions.store import SessionStore

RESPONSES = "/v1/responses"
DISK_BYTES = 6 << 20
# Mounts a small file system on the folder $0, in a namespace of its own, and runs a command.
ON_SMALL_DISK = f'mount -t tmpfs -o size={DISK_BYTES} small "$0" && exec "$@"'


def small_disk_command(folder: Path, *command: str) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", ON_SMALL_DISK, str(folder), *command]


class SmallDisk:
    """A file system of DISK_BYTES that one server process after the other sees at `path`: it is
    kept by a process that sleeps in the namespace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keeper = subprocess.Popen(
            small_disk_command(path, "sh", "-c", "echo mounted; exec sleep 600"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.keeper.stdout is not None and self.keeper.stderr is not None
        if self.keeper.stdout.readline() != "mounted\n":
            self.keeper.wait()
            pytest.skip(f"no mount namespaces here: {self.keeper.stderr.read().strip()}")
        self.filler = Path(f"/proc/{self.keeper.pid}/root{path}/filler")

    def fill(self) -> None:
        with open(self.filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def serve(self) -> ServerProcess:
        enter = ["nsenter", "-t", str(self.keeper.pid), "-U", "-m", "--preserve-credentials"]
        runner = f"import os, sys; os.execvp({enter[0]!r}, {enter!r} + sys.argv[1:])"
        server = [sys.executable, str(HELPERS / "fault_server.py")]
        command = ["-c", runner, *server]
        return ServerProcess(command=command, session_file=self.path / "s.db", cwd=Path("/"))

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        for stream in (self.keeper.stdout, self.keeper.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    found = SmallDisk(tmp_path)
    yield found
    found.close()


def test_full_disk_is_reported_and_sessions_can_be_deleted(disk: SmallDisk) -> None:
    messages = [{"role": "user", "content": "x" * 50_000}]
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 2}

    def code(response: httpx.Response) -> str:
        assert response.status_code == 507, response.text
        found: str = response.json()["error"]["code"]
        return found

    with disk.serve() as server:
        server.wait_ready()
        with server.client() as client:
            for name in ("a", "b"):
                body = {"session_id": name, "messages": messages}
                assert client.post("/v1/sessions", json=body).status_code == 201
            disk.fill()
            stored = client.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2})
            assert code(stored) == "session_disk_full"
            turn = client.post("/v1/chat/completions", json={"session_id": "a", **question})
            assert code(turn) == "session_disk_full"
            without = {"input": "hi", "max_output_tokens": 2, "store": False}
            assert client.post(RESPONSES, json=without).status_code == 200
            assert client.delete("/v1/sessions/a").status_code == 200
        assert server.stop() == 0
    disk.fill()
    with disk.serve() as server:
        server.wait_ready()
        with server.client() as client:
            assert [s["id"] for s in client.get("/v1/sessions").json()["data"]] == ["b"]
            assert client.delete("/v1/sessions/b").status_code == 200
            disk.filler.unlink()
            stored = client.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2})
            assert stored.json()["store"] is True
            assert client.get(f"{RESPONSES}/{stored.json()['id']}").status_code == 200


def test_disk_that_fills_up_during_an_answer_gives_store_false(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(engine_fakes.__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(root)]))

    async def full(*args: Any) -> None:
        raise SessionDiskFullError

    monkeypatch.setattr(ResponseStore, "store", full)
    config = ServerConfig(
        engine=EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            scheduler=SchedulerConfig(4, 64),
            cache=CacheConfig(block_size=4, num_kv_blocks=64),
            warmup=False,
        ),
        engine_module="fault_engine",
    )

    async def run() -> None:
        body = {"input": "hi", "max_output_tokens": 3}
        async with server_client(config) as client:
            whole = (await client.post(RESPONSES, json=body)).json()
            assert whole["store"] is False and whole["output"]
            streamed = await client.post(RESPONSES, json={**body, "stream": True})
            lines = streamed.text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[0]["response"]["store"] is True
            assert events[-1]["type"] == "response.incomplete"
            assert events[-1]["response"]["store"] is False
            assert "responses_not_stored_total 2.0" in (await client.get("/metrics")).text

    asyncio.run(run())


def test_hard_link_of_a_session_file_is_rejected(tmp_path: Path) -> None:
    file, link = tmp_path / "s.db", tmp_path / "link.db"
    first = SessionStore(file)
    link.hardlink_to(file)
    for path in (file, link):
        with pytest.raises(InvalidInputError, match=r"2 hard links|in use by"):
            SessionStore(path)
    first.close()
    link.unlink()
    SessionStore(file).close()
