"""200 clients disconnect at random moments: nothing leaks, and the remaining clients get the same
text as on an idle server."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FakeTokenizer, expected_tokens
from fault_engine import STEP_SECONDS
from server_helpers import LONG, Gate, ServerProcess
from wire_helpers import completion_choices, post_bytes, raw_request, read_to_end, reset

PATH = "/v1/completions"
MAX_SEQS, QUEUE = 8, 52
WAVE = 25
MOMENTS = ("queued", "prefill", "stream", "any")  # two waves of each: 200 clients
LONG_PROMPT = "x" * 1500  # far more than one step takes


@dataclass(frozen=True)
class Victim:
    number: int
    moment: str
    stream: bool
    how: str  # close, reset, half-close
    delay: float  # seconds, for the moment `any`

    @property
    def name(self) -> str:
        return f"victim-{self.number}"

    def body(self) -> dict[str, Any]:
        prompt = LONG_PROMPT if self.moment == "prefill" else "short"
        return {**LONG, "max_tokens": 500, "prompt": f"{self.number} {prompt}"} | {
            "stream": self.stream
        }


def victims(seed: int) -> list[list[Victim]]:
    chance, numbers = random.Random(seed), count()
    return [
        [
            Victim(
                next(numbers),
                moment,
                # A client that waits for the first byte must stream.
                moment == "stream" or chance.random() < 0.5,
                chance.choice(("close", "reset", "half-close")),
                chance.uniform(0, 0.15),
            )
            for _ in range(WAVE)
        ]
        for moment in MOMENTS * 2
    ]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def server(tmp_path: Path, gate: Gate) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--max-num-seqs", str(MAX_SEQS), "--max-queued", str(QUEUE),
        "--max-num-batched-tokens", "64", "--num-kv-blocks", "1200",
        env={STEP_SECONDS: "0.002", **gate.env},
        session_file=tmp_path / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def disconnect(connection: socket.socket, how: str) -> None:
    if how == "reset":
        reset(connection)
        return
    if how == "half-close":  # the server must detect it and close its side
        connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    connection.close()


class Storm:
    """Opens the connections of a wave, waits for the configured moment, and kills them."""

    def __init__(self, server: ServerProcess, gate: Gate) -> None:
        self.server = server
        self.gate = gate
        self.killed: list[Victim] = []

    def run(self, wave: list[Victim]) -> None:
        moment = wave[0].moment
        if moment == "any":
            with ThreadPoolExecutor(WAVE) as pool:
                list(pool.map(self._after_a_while, wave))
            return
        connections = [
            raw_request(self.server, victim.body(), X_Request_Id=victim.name) for victim in wave
        ]
        order = list(zip(wave, connections, strict=True))
        if moment == "queued":
            metric = self.server.metric
            self.server.wait_for(
                lambda: metric("num_requests_waiting") >= WAVE - MAX_SEQS, "the others in the queue"
            )
            random.Random(wave[0].number).shuffle(order)
        for victim, connection in order:
            if moment == "prefill":  # its own prompt or one before it
                self.gate.hold_in_prefill()
                assert not has_bytes(connection), "its prefill is over"
            elif moment == "stream":
                assert connection.recv(1), "no first byte"
            self._kill(victim, connection)
        self.gate.open()

    def _after_a_while(self, victim: Victim) -> None:
        connection = self.server.connect()
        connection.sendall(post_bytes(victim.body(), X_Request_Id=victim.name))
        time.sleep(victim.delay)
        self._kill(victim, connection)

    def _kill(self, victim: Victim, connection: socket.socket) -> None:
        disconnect(connection, victim.how)
        self.killed.append(victim)


def has_bytes(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(30)


class Survivors:
    """Threads that send requests in a loop: streamed and whole, greedy and sampled."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.bodies = [
            {
                "prompt": f"survivor {number} " * (1 + number % 4),
                "max_tokens": 12 + number,
                "temperature": number % 2,
                "seed": number,
                "ignore_eos": True,
                "stream": number % 4 < 2,
            }
            for number in range(8)
        ]
        self.quiet = [self.ask(body) for body in self.bodies]
        self.answers = 0

    def ask(self, body: dict[str, Any]) -> str:
        return "".join(choice["text"] for choice in completion_choices(self.server, body))

    def run(self, number: int, over: Callable[[], bool]) -> int:
        """Run until the storm ends and once more; return the number of correct answers."""
        for turn in count():
            which = (number + 3 * turn) % len(self.bodies)
            last = over()
            assert self.ask(self.bodies[which]) == self.quiet[which]
            if last:
                return turn + 1
        raise AssertionError


def test_200_disconnects_do_not_affect_other_clients(server: ServerProcess, gate: Gate) -> None:
    survivors = Survivors(server)
    for body, text in zip(survivors.bodies, survivors.quiet, strict=True):
        seed = body["seed"] if body["temperature"] else None
        tokens = expected_tokens(
            FakeTokenizer().encode(str(body["prompt"])), int(body["max_tokens"]), seed, stops=()
        )
        assert text == FakeTokenizer().decode_tokens(tokens)

    waves, storm, over = victims(seed=20), Storm(server, gate), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(survivors.run, number, over.is_set) for number in range(3)]
        try:
            for wave in waves:
                storm.run(wave)
        finally:
            over.set()
            gate.open()
        assert sum(future.result(60) for future in asking) >= 10

    # All clients were killed, in each way and moment, streamed or not.
    assert sorted(victim.number for victim in storm.killed) == list(range(200))
    kinds = {(v.moment, v.how, v.stream) for v in storm.killed}
    assert len(kinds) == 3 * (2 + 2 + 1 + 2)

    server.wait_idle()
    server.wait_for(lambda: server.num_connections == 0, "the sockets of the dead to be closed")
    ended = {e["request_id"]: e for e in server.events() if "request_id" in e}
    for victim in storm.killed:
        event = ended.get(victim.name)
        if event is None:  # killed before its request was read
            assert victim.moment == "any"
        else:
            assert event.get("disconnected") or event.get("finish_reason") == "abort", event

    # The capacity is intact: as many requests as the limit are admitted.
    with ThreadPoolExecutor(MAX_SEQS + QUEUE) as pool, server.client() as client:
        asked = [
            pool.submit(client.post, PATH, json={"prompt": str(i), "max_tokens": 2})
            for i in range(MAX_SEQS + QUEUE)
        ]
        assert {future.result(60).status_code for future in asked} == {200}
    server.wait_idle()
