"""Every queue with two keys: while one key floods it, the other's small requests are answered in
a stated time. The flood never stops and is limited by its key's own limits (429 and 503 to it).

    pytest -q -s test/attack/test_two_keys.py

prints the waits. The queue of model loads is tested in test/server/test_model_manager.py, streams
with many choices and logprobs in test_streams_beside_others.py.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_files import tiny_config, write_hf_model, write_qwen2_tokenizer
from server_helpers import ServerProcess

pytestmark = pytest.mark.slow

LOUD, QUIET = "key-of-the-flood", "key-of-the-other"
MAX_WAIT = 10.0  # seconds for the quiet key, in half of its requests; two shared cores
FLOODS = 6  # connections of the loud key
ASKED = 4  # requests of the quiet key
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PRIMES = itertools.cycle([99_991, 99_989, 99_971, 99_961, 99_929, 99_923, 99_907, 99_901, 99_881])

Body = dict[str, Any]


def grammar(form: Any) -> Body:
    message = {"role": "user", "content": "x"}
    return {"messages": [message], "max_tokens": 4, "structured_outputs": {"json": form}}


def slow_grammar() -> Body:
    return grammar({"type": "integer", "multipleOf": next(PRIMES), "minimum": time.time_ns()})


LONG_TEXT = "The quick brown fox. " * 20_000
# Queue -> (path, body of the flood, path, body of the quiet key)
QUEUES: dict[str, tuple[str, Callable[[], Body], str, Callable[[], Body]]] = {
    "grammar": (CHAT, slow_grammar, CHAT, lambda: grammar({"enum": [f"{time.time_ns()}"]})),
    "tokenizer": (
        "/tokenize", lambda: {"prompt": LONG_TEXT}, "/tokenize", lambda: {"prompt": "a word " * 900}
    ),
    "prefill": (
        TEXT,
        lambda: {"prompt": [7] * 1500, "max_tokens": 64, "n": 4, "cache_salt": f"{time.time_ns()}"},
        TEXT, lambda: {"prompt": [9] * 8, "max_tokens": 4},
    ),
    "embeddings": (
        "/v1/embeddings", lambda: {"input": ["some text"] * 500},
        "/v1/embeddings", lambda: {"input": "a"},
    ),
    "sessions": (
        "/v1/sessions", lambda: {"messages": [{"role": "user", "content": "x" * 400}] * 2000},
        "/v1/sessions", lambda: {"messages": [{"role": "user", "content": "x"}]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("keys")
    config = tiny_config(max_position_embeddings=32_768, vocab_size=151_936)
    write_hf_model(folder / "model", config)
    write_qwen2_tokenizer(folder / "model")
    options = ("--api-key", LOUD, "--api-key", QUIET, "--threads", "1", "--num-kv-blocks", "2048")
    with ServerProcess(
        str(folder / "model"), *options, real=True, session_file=folder / "s.db"
    ) as process:
        yield process.wait_ready()


class Flood:
    """Sends bodies of the loud key on FLOODS connections from `with` to its end."""

    def __init__(self, server: ServerProcess, path: str, make: Callable[[], Body]) -> None:
        self.server, self.path, self.make = server, path, make
        self.sent = 0
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(FLOODS)]

    def _send(self) -> None:
        with self.server.client(LOUD, timeout=120) as client:
            while not self._done.is_set():
                try:
                    answer = client.post(self.path, content=json.dumps(self.make()).encode(),
                                         headers={"content-type": "application/json"})  # fmt: skip
                except httpx.HTTPError:
                    continue
                self.sent += 1
                if answer.status_code in (400, 429, 503):  # the limits of its key
                    self._done.wait(0.05)

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 60
        while self.sent < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("queue", QUEUES)
def test_quiet_key_waits_a_bounded_time(server: ServerProcess, queue: str) -> None:
    loud_path, loud, quiet_path, quiet = QUEUES[queue]
    with server.client(QUIET, timeout=120) as client:
        answer = client.post(quiet_path, json=quiet())  # starts what the first request starts
        assert answer.status_code < 300, answer.text
        waits = []
        with Flood(server, loud_path, loud) as flood:
            for _ in range(ASKED):
                start = time.monotonic()
                answer = client.post(quiet_path, json=quiet())
                waits.append(time.monotonic() - start)
                assert answer.status_code < 300, answer.text
        assert flood.sent >= 1
    print(f"{queue:<12} quiet key: {max(waits):.2f} s at most; flood: {flood.sent} answers")
    assert sorted(waits)[ASKED // 2 - 1] < MAX_WAIT, waits
