"""An engine that dies, hangs or raises: one final error per request, 503, a non-zero exit status,
and no leaked process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fault_engine import STEP_SECONDS
from server_helpers import (
    FAULT_FILE,
    LONG,
    Gate,
    ServerProcess,
    alive,
    socket_directories,
    wait_for,
)
from wire_helpers import raw_events, raw_request, read_to_end

PATH = "/v1/completions"
SECRETS = ("0x7f00", "/root/model", "Traceback", "RuntimeError")
# Time from a fault to a 503 of /health: 1.5 s without heartbeats while the server runs
# (test/processes/test_watchdog.py), plus slack for machines that stall.
HEALTH_SECONDS = 20.0


class HealthWatch(threading.Thread):
    """Polls /health over one connection until the server closes it."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._http = http.client.HTTPConnection(*server.address, timeout=30)
        self.turned_red: float | None = None  # when
        self.statuses_then: list[int] = []  # of /ready and of a new request
        self.green_again = False
        self.start()

    def run(self) -> None:
        try:
            while True:
                red = self._status("GET", "/health") == 503
                if red and self.turned_red is None:
                    self.turned_red = time.monotonic()
                    body = json.dumps({"prompt": "late"})
                    self.statuses_then = [
                        self._status("GET", "/ready"),
                        self._status("POST", PATH, body),
                    ]
                self.green_again |= not red and self.turned_red is not None
                time.sleep(0.002)
        except (OSError, http.client.HTTPException):
            self._http.close()

    def _status(self, method: str, path: str, body: str | None = None) -> int:
        self._http.request(method, path, body, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        response.read()
        return response.status


class Scene:
    """A server with two streams and two whole requests running, and three waiting."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.gate = Gate(folder)
        self.before = socket_directories()
        self.server = ServerProcess(
            "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--engine-dead-after", "2",
            *options,
            env={STEP_SECONDS: "0.005", **self.gate.env},
            session_file=folder / "s.db",
        ).wait_ready()  # fmt: skip
        self.engine_pid = self.server.engine_pid
        self.pool = ThreadPoolExecutor(8)
        try:
            self.streams = [self._ask(stream=True) for _ in range(2)]
            self._wait_for_metrics(running=2, waiting=0)
            self.running = [self._ask(stream=False) for _ in range(2)]
            self._wait_for_metrics(running=4, waiting=0)
            self.waiting = [self._ask(stream=stream) for stream in (False, False, True)]
            self._wait_for_metrics(running=4, waiting=3)
            self.health = HealthWatch(self.server)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes of a failed test."""
        self.server.process.kill()
        self.server.process.wait()
        if alive(self.engine_pid):
            os.kill(self.engine_pid, signal.SIGKILL)
        self.pool.shutdown()

    def _ask(self, stream: bool) -> Future[bytes]:
        connection = raw_request(self.server, {**LONG, "stream": stream})
        return self.pool.submit(read_to_end, connection)

    def _wait_for_metrics(self, running: int, waiting: int) -> None:
        expected = {"num_requests_running": running, "num_requests_waiting": waiting}
        self.server.wait_for(
            lambda: all(self.server.metric(name) == n for name, n in expected.items()),
            str(expected),
        )

    def health_turns_red(self, since: float, within: float = HEALTH_SECONDS) -> None:
        wait_for(lambda: self.health.turned_red is not None, "red health")
        assert self.health.turned_red is not None
        took = self.health.turned_red - since
        assert took < within, f"/health turned red after {took:.3f} s"

    def finish(self, running: int, waiting: int = 503) -> None:
        """Check that every request got one well-formed error and that the processes ended.
        `running`, `waiting`: the expected status of requests in that state."""
        assert self.server.process.wait(30) == 1
        self.health.join(30)
        assert not self.health.green_again
        assert self.health.statuses_then == [503, 503]
        for stream in self.streams:
            check_broken_stream(stream.result(30))
        for status, answers in ((running, self.running), (waiting, self.waiting)):
            for answer in answers:
                check_error(answer.result(30), status)
        assert not alive(self.engine_pid)
        assert socket_directories() <= self.before


def check_broken_stream(received: bytes) -> None:
    """Exactly one error and one end, and no data after them."""
    assert received.count(b"HTTP/1.1 ") == 1 and received.startswith(b"HTTP/1.1 200")
    *events, done = raw_events(received)
    assert done == "[DONE]" and received.endswith(b"0\r\n\r\n")
    chunks = [json.loads(event) for event in events]
    assert [number for number, chunk in enumerate(chunks) if "error" in chunk] == [len(chunks) - 2]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if "choices" in c]
    assert reasons == [None] * (len(reasons) - 1) + ["error"]
    assert not any(secret in received.decode() for secret in SECRETS)


def check_error(received: bytes, status: int) -> None:
    """One response with an API error."""
    assert received.count(b"HTTP/1.1 ") == 1 and received.startswith(b"HTTP/1.1 %d" % status)
    head, _, body = received.decode().partition("\r\n\r\n")
    assert f"x-request-id: {json.loads(body)['error']['request_id']}" in head
    assert not any(secret in body for secret in SECRETS)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def test_killed_engine(scene: Scene) -> None:
    start = time.monotonic()
    os.kill(scene.engine_pid, signal.SIGKILL)
    scene.health_turns_red(start)
    scene.finish(running=503)


def test_stopped_engine(scene: Scene) -> None:
    """SIGSTOP: missing heartbeats turn /health to 503, then the engine is declared dead."""
    start = time.monotonic()
    os.kill(scene.engine_pid, signal.SIGSTOP)
    scene.health_turns_red(start)
    scene.finish(running=503)


def test_raising_forward(tmp_path: Path) -> None:
    """Requests of the last failing step get 500, waiting ones 503."""
    scene = Scene(tmp_path, "--max-failed-steps", "1")
    try:
        start = time.monotonic()
        scene.gate.order("raise")
        scene.health_turns_red(start)
        scene.finish(running=500)
        assert any("0x7f00deadbeef" in line for line in scene.server.log)  # for the operator only
    finally:
        scene.close()


def test_failed_step_ends_only_its_requests(tmp_path: Path) -> None:
    """Waiting requests run normally."""
    scene = Scene(tmp_path, "--drain-timeout", "0.5")
    try:
        scene.gate.order("raise once")
        scene.server.wait_for(
            lambda: scene.server.metric("num_requests_running") == 3, "the three that waited"
        )
        assert scene.server.metric("worker_errors_total") == 1
        assert scene.health.turned_red is None
        assert scene.server.stop() == 0
        for answer in scene.running:
            check_error(answer.result(30), 500)
        for stream in scene.streams:
            check_broken_stream(stream.result(30))
        for answer in scene.waiting:
            assert answer.result(30).startswith(b"HTTP/1.1 200")
    finally:
        scene.close()


def test_server_exits_after_three_consecutive_failed_steps(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        ServerProcess(env=gate.env, session_file=tmp_path / "s.db") as server,
        server.wait_ready().client() as client,
    ):
        for _ in range(2):  # never three consecutive ones
            gate.order("raise")
            assert [client.post(PATH, json={"prompt": "x"}).status_code for _ in range(2)] == [
                500
            ] * 2
            gate.open()
            assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        gate.order("raise")
        for _ in range(3):
            assert client.post(PATH, json={"prompt": "x"}).status_code == 500
        assert server.process.wait(30) == 1


def test_hanging_step(tmp_path: Path) -> None:
    """Heartbeats arrive but the loop does not advance."""
    limit = 1.0
    scene = Scene(tmp_path, "--engine-step-limit", str(limit))
    try:
        start = time.monotonic()
        scene.gate.order("hang")
        scene.health_turns_red(start, limit + HEALTH_SECONDS)
        scene.finish(running=503)
    finally:
        scene.close()


def test_engine_resumed_in_time_recovers(tmp_path: Path) -> None:
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


def test_stopped_server_does_not_declare_engine_dead(tmp_path: Path) -> None:
    """Requests sent during the stop are answered."""
    with ServerProcess("--engine-dead-after", "1", session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        connections = [http.client.HTTPConnection(*server.address, timeout=60) for _ in range(4)]
        try:
            for seconds in (1.0, 2.0):  # longer than the heartbeat timeouts
                for connection in connections:
                    connection.connect()
                os.kill(server.process.pid, signal.SIGSTOP)
                try:
                    for connection in connections[:2]:
                        connection.request("GET", "/health")
                    body = json.dumps({"prompt": "x", "max_tokens": 3})
                    for connection in connections[2:]:
                        headers = {"Content-Type": "application/json"}
                        connection.request("POST", PATH, body, headers)
                    time.sleep(seconds)
                finally:
                    os.kill(server.process.pid, signal.SIGCONT)
                for connection in connections:
                    response = connection.getresponse()
                    assert response.status == 200, response.read()
                    response.read()
        finally:
            for connection in connections:
                connection.close()
        assert server.stop() == 0


def test_failed_steps_return_500_and_are_counted(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    with (
        ServerProcess(env={FAULT_FILE: str(fault)}, session_file=tmp_path / "s.db") as server,
        server.wait_ready().client() as client,
    ):
        fault.write_text("raise")
        for stream in (False, True):  # a stream without events has a status
            failed = client.post(PATH, json={"prompt": "x", "stream": stream})
            assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_error"
        fault.unlink()
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert server.metric("worker_errors_total") == 2
        server.wait_idle()
        assert server.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_request_without_sampleable_tokens_fails_alone(tmp_path: Path, stream: bool) -> None:
    """This server exits after one failed step."""
    gate = Gate(tmp_path)
    other = {**LONG, "max_tokens": 30, "return_token_ids": True}
    bad = {"prompt": "x", "max_tokens": 5, "allowed_token_ids": [48], "bad_words": ["00"]}
    with (
        ServerProcess("--max-failed-steps", "1", env=gate.env) as server,
        server.wait_ready().client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        alone = client.post(PATH, json=other).json()["choices"][0]["token_ids"]
        gate.order("wait")
        answer = pool.submit(client.post, PATH, json=other)
        gate.hold()  # in its first step
        second = pool.submit(client.post, PATH, json={**bad, "stream": stream})
        server.wait_for(lambda: server.load == 2, "admission of both")
        gate.open()
        failed = second.result(30)
        if stream and failed.status_code == 200:  # its first token succeeded
            assert '"finish_reason":"error"' in failed.text
            assert failed.text.endswith("data: [DONE]\n\n")
        else:
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "engine_error"
        assert answer.result(30).json()["choices"][0]["token_ids"] == alone
        assert client.get("/health").status_code == 200
        assert server.metric("worker_errors_total") == 0
        server.wait_idle()
        assert server.stop() == 0


def test_engine_ends_when_the_server_is_killed(tmp_path: Path) -> None:
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
