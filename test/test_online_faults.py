"""An engine that dies, hangs or raises: one final error for everybody, 503, a non-zero exit, and
nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import (
    FAULT_FILE,
    STEP_SECONDS,
    ServerProcess,
    alive,
    socket_directories,
    sse_events,
    wait_for,
)

PATH = "/v1/completions"
LONG = {"prompt": "long", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SECRETS = ("0x7f00", "/root/model", "Traceback", "RuntimeError")


class Scene:
    """A server with two streams and two whole requests running, and two more waiting."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.fault = folder / "fault"
        self.before = socket_directories()
        self.server = ServerProcess(
            "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--engine-dead-after", "2",
            *options,
            env={STEP_SECONDS: "0.005", FAULT_FILE: str(self.fault)},
            session_file=folder / "s.db",
        ).wait_ready()  # fmt: skip
        self.engine_pid = self.server.engine_pid
        self.streams: list[list[str]] = [[] for _ in range(3)]
        self.answers: list[httpx.Response] = []
        self.began = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._stream, args=(i,)) for i in range(2)]
        self.threads += [threading.Thread(target=self._ask) for _ in range(4)]
        try:
            for thread in self.threads[:2]:
                thread.start()
            for _ in range(2):
                assert self.began.acquire(timeout=30)
            for thread in self.threads[2:]:
                thread.start()
            self.server.wait_for(
                lambda: self.server.metric("num_requests_running") == 4, "four running"
            )
            self.server.wait_for(
                lambda: self.server.metric("num_requests_waiting") == 2, "two waiting"
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave nothing of a failed test behind."""
        self.server.process.kill()
        self.server.process.wait()
        if alive(self.engine_pid):
            os.kill(self.engine_pid, signal.SIGKILL)

    def _stream(self, index: int) -> None:
        with (
            self.server.client() as client,
            client.stream(
                "POST", PATH, json={**LONG, "prompt": f"s{index}", "stream": True}
            ) as response,
        ):
            for event in sse_events(response):
                if not self.streams[index]:
                    self.began.release()
                self.streams[index].append(event)

    def _ask(self) -> None:
        with self.server.client() as client:
            self.answers.append(client.post(PATH, json=LONG))

    def finish(self, statuses: set[int]) -> None:
        """Everybody has been told once, in a well-formed way, and the processes are gone."""
        assert self.server.process.wait(30) == 1
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        for events in self.streams[:2]:
            assert events[-1] == "[DONE]"
            errors = [e for e in events[:-1] if "error" in json.loads(e)]
            assert len(errors) == 1
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "error"
            assert not any(secret in errors[0] for secret in SECRETS)
        assert len(self.answers) == 4
        for answer in self.answers:
            assert answer.status_code in statuses, answer.text
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
            assert not any(secret in answer.text for secret in SECRETS)
        assert not alive(self.engine_pid)
        assert socket_directories() <= self.before


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def health_fails_within(server: ServerProcess, seconds: float) -> None:
    start = time.monotonic()
    with server.client() as client:
        while client.get("/health").status_code == 200:
            assert time.monotonic() - start < seconds + 1.0, "health stayed green"
            time.sleep(0.02)
        assert client.get("/ready").status_code == 503
        refused = client.post(PATH, json={"prompt": "x"})
        assert refused.status_code == 503 or refused.status_code == 200


def test_killed_engine(scene: Scene) -> None:
    os.kill(scene.engine_pid, signal.SIGKILL)
    health_fails_within(scene.server, 1.0)
    scene.finish({503})


def test_stopped_engine(scene: Scene) -> None:
    """SIGSTOP: the watchdog notices the silence, /health first, then the server gives it up."""
    os.kill(scene.engine_pid, signal.SIGSTOP)
    start = time.monotonic()
    with scene.server.client() as client:
        while client.get("/health").status_code == 200:
            assert time.monotonic() - start < 2.0, "health stayed green"
            time.sleep(0.02)
    scene.finish({503})


def test_raising_forward(scene: Scene) -> None:
    """The requests of the step get 500, those that waited 503."""
    scene.fault.write_text("raise")
    health_fails_within(scene.server, 1.0)
    scene.finish({500, 503})
    assert any("0x7f00deadbeef" in line for line in scene.server.log)  # for the operator only


def test_hanging_step(tmp_path: Path) -> None:
    """The heart beats and the loop does not turn."""
    scene = Scene(tmp_path, "--engine-step-limit", "1.0")
    try:
        scene.fault.write_text("hang")
        health_fails_within(scene.server, 2.0)
        scene.finish({503})
    finally:
        scene.close()


def test_a_stopped_engine_that_comes_back_in_time_is_forgiven(tmp_path: Path) -> None:
    with (
        ServerProcess("--engine-dead-after", "30", session_file=tmp_path / "s.db") as server,
        server.wait_ready().client() as client,
    ):
        pid = server.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: client.get("/health").status_code == 503, "red health")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: client.get("/health").status_code == 200, "green health")
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        assert server.stop() == 0


def test_failed_steps_can_be_tolerated(tmp_path: Path) -> None:
    """--max-failed-steps: only the requests of the failed step end, the server goes on."""
    fault = tmp_path / "fault"
    with (
        ServerProcess(
            "--max-failed-steps", "5", env={FAULT_FILE: str(fault)}, session_file=tmp_path / "s.db"
        ) as server,
        server.wait_ready().client() as client,
    ):
        fault.write_text("raise")
        failed = client.post(PATH, json={"prompt": "x"})
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_error"
        fault.unlink()
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert server.metric("worker_errors_total") == 1
        server.wait_idle()
        assert server.stop() == 0


def test_no_orphan_when_the_server_is_killed(tmp_path: Path) -> None:
    before = socket_directories()
    with ServerProcess(env={STEP_SECONDS: "0.005"}, session_file=tmp_path / "s.db") as server:
        pid = server.wait_ready().engine_pid
        thread = threading.Thread(target=ask_quietly, args=(server, LONG))
        thread.start()
        server.wait_for(lambda: server.metric("num_requests_running") == 1, "a running request")
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not alive(pid), "the engine's end")
        wait_for(lambda: socket_directories() <= before, "its sockets' end")
        thread.join(30)


def ask_quietly(server: ServerProcess, body: dict[str, Any]) -> None:
    try:
        with server.client() as client:
            client.post(PATH, json=body)
    except httpx.HTTPError:
        pass


def test_engine_that_fails_to_start(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.write_text("exit")  # in the warm-up
    before = socket_directories()
    with ServerProcess(env={FAULT_FILE: str(fault)}, session_file=tmp_path / "s.db") as server:
        assert server.process.wait(60) == 1
    assert socket_directories() <= before
