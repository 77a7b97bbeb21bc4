"""No single request delays others: /health responds within 100 ms during each attack.

A separate process measures over keep-alive connections and compares with an idle server, so that a
busy machine affects both.

    pytest -q -s test/attack/test_one_client_delays_no_other.py

prints a table of all attacks at the end. `LLAISYS_TEST_PRESSURE` (make attack-nightly) makes them
longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model, write_qwen2_tokenizer
from nightly import NIGHTLY
from server_helpers import ServerProcess

pytestmark = pytest.mark.slow

PROMISE = 0.1  # seconds
SECONDS = 1.0 if NIGHTLY else 0.3  # of each abuse
TRIES = 3  # on a machine that others use; one must keep the promise
CONTEXT = 32768
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# Requests /health every 5 ms until standard input ends; prints the latencies as JSON.
PROBE = """
import http.client, json, select, sys, time
host, port = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=60)
times = []
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    start = time.monotonic()
    connection.request("GET", "/health")
    connection.getresponse().read()
    times.append(time.monotonic() - start)
print(json.dumps(times))
"""


class Probe:
    """Measures from `with` to its end."""

    def __init__(self, server: ServerProcess) -> None:
        self.times: list[float] = []
        self._command = [sys.executable, "-c", PROBE, *map(str, server.address)]

    def __enter__(self) -> Probe:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc: object) -> None:
        out, _ = self._process.communicate()
        self.times = sorted(json.loads(out))

    def at(self, share: float) -> float:
        return self.times[int(share * (len(self.times) - 1))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder, tiny_config(max_position_embeddings=CONTEXT, vocab_size=151_936))
    write_qwen2_tokenizer(folder)
    options = ("--threads", "1", "--num-kv-blocks", "4096")
    with ServerProcess(
        str(folder), *options, real=True, session_file=folder.parent / "s.db"
    ) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def quiet(server: ServerProcess) -> float:
    """p99 of /health on an idle server."""
    with Probe(server) as probe:
        threading.Event().wait(1)
    return probe.at(0.99)


@pytest.fixture(scope="module")
def table(quiet: float) -> Iterator[list[str]]:
    """Measured rows, printed at the end (`pytest -s`)."""
    rows: list[str] = []
    yield rows
    print(f"\n/health in ms{'p50':>41}{'p99':>8}{'max':>8}{'answers':>9}")
    print(f"{'nothing happens':<46}{'':>8}{1e3 * quiet:>8.1f}")
    print("\n".join(rows))


def message(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def stops(count: int, length: int) -> list[str]:
    """A pattern that nearly matches everywhere, so the search never advances."""
    return [f"{number:04d}".rjust(length, "a") for number in range(count)]


PARTS = [{"type": "text", "text": "x"}]
LONG_RUN = {"max_tokens": 60 if NIGHTLY else 15, "ignore_eos": True, "temperature": 0}
ABUSES: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: route, body, status
    "2 MB of emoji": ("/tokenize", {"prompt": "😀🏳️" * 200_000, "return_token_strs": True}, 400),
    "a text of as many tokens as are shown": (
        "/tokenize",
        {"prompt": "a😀" * 20_000, "return_token_strs": True},
        200,
    ),
    "8 MB of one letter": (TEXT, {"prompt": "a" * 8_000_000}, 400),
    "2 MB of spaces, then emoji": (TEXT, {"prompt": " " * 1_500_000 + "😀" * 100_000}, 400),
    "two million prompts": (TEXT, {"prompt": [[1]] * 2_000_000}, 400),
    "two million tokens": (TEXT, {"prompt": [1] * 2_000_000}, 400),
    "many short prompts, the last too long": (
        TEXT,
        {"prompt": [*["😀" * 4000] * 63, "😀" * 60_000], "max_tokens": 1},
        400,
    ),
    "200,000 text parts": (CHAT, {"messages": [message(PARTS * 200_000)]}, 400),
    "16,000 text parts": ("/tokenize", {"messages": [message(PARTS * 16_000)]}, 200),
    "4,096 messages": ("/tokenize", {"messages": [message("hi")] * 4096}, 200),
    "100,000 messages": (CHAT, {"messages": [message("hi")] * 100_000}, 400),
    "a message of 2 MB": (CHAT, {"messages": [message("😀" * 500_000)]}, 400),
    "messages of 2 MB": (CHAT, {"messages": [message("😀" * 500)] * 1000}, 400),
    "long stop strings": (TEXT, {"prompt": "a", "n": 32, "stop": stops(63, 1024), **LONG_RUN}, 200),
    "bad words": (
        TEXT,
        {"prompt": "a", "bad_words": [f"{n}😀" * 100 for n in range(256)], "max_tokens": 1},
        400,
    ),
    "allowed tokens": (
        TEXT,
        {"prompt": "a", "allowed_token_ids": list(range(130_000)), "max_tokens": 1},
        200,
    ),
    "logprobs": (TEXT, {"prompt": "a", "n": 64, "logprobs": 20, **LONG_RUN}, 200),
    "chat logprobs in a stream": (
        CHAT,
        {"messages": [message("a")], "n": 64, "logprobs": True, "top_logprobs": 20, "stream": True,
         **LONG_RUN},
        200,
    ),
    "tokens to text": ("/detokenize", {"tokens": list(range(130_000))}, 200),
    "template variables": (
        CHAT,
        {"messages": [message("a")], "chat_template_kwargs": {"x": list(range(130_000))}},
        400,
    ),
    "nested template variables": (
        CHAT,
        {"messages": [message("a")], "chat_template_kwargs": {"x": [[[[]]]] * 4000}},
        400,
    ),
    "many unknown fields": (CHAT, {f"field{number}": 1 for number in range(200_000)}, 400),
    "a session of 4,096 messages": ("/v1/sessions", {"messages": [message("hi")] * 4096}, 201),
    "a session of 4 MB": ("/v1/sessions", {"messages": [message("x" * 4_000_000)]}, 201),
}  # fmt: skip


@pytest.mark.parametrize("name", ABUSES)
def test_health_responds_while_one_client(
    server: ServerProcess, quiet: float, table: list[str], name: str
) -> None:
    path, body, status = ABUSES[name]
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    json_client = server.client(headers={"content-type": "application/json"})
    with json_client as client:
        for _ in range(TRIES):
            with Probe(server) as probe:
                deadline = time.monotonic() + SECONDS
                while time.monotonic() < deadline:
                    answer = client.post(path, content=content)
                    assert answer.status_code == status, answer.text[:500]
            times = "".join(f"{1e3 * probe.at(share):>8.1f}" for share in (0.5, 0.99, 1))
            table.append(f"{name:<46}{times}{len(probe.times):>9}")
            if probe.at(0.99) < PROMISE + 2 * quiet:
                return
    raise AssertionError(f"{table[-TRIES:]}; quiet: {quiet:.3f} s")
