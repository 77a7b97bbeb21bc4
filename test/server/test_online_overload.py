"""Overload: a KV cache of eight blocks for 64 requests, and ten times the admitted clients."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from engine_fakes import FakeTokenizer, expected_tokens
from server_helpers import CONTEXT, Gate, ServerProcess
from wire_helpers import completion_choices

PATH = "/v1/completions"


def ask(server: ServerProcess, body: dict[str, Any]) -> list[int]:
    """Return the token ids of an answer, whole or streamed."""
    choices = completion_choices(server, body)
    assert choices[-1]["finish_reason"] == "length"
    return [token for choice in choices for token in choice.get("token_ids", [])]


def expected_tokens_of(body: dict[str, Any]) -> list[int]:
    """Return the expected token ids, computed without an engine."""
    seed = body["seed"] if body["temperature"] else None
    return expected_tokens(
        FakeTokenizer().encode(body["prompt"]), body["max_tokens"], seed, stops=()
    )


# ---- the KV pool ---------------------------------------------------------------------------------


def test_request_over_the_kv_cache_is_rejected_at_once(tmp_path: Path) -> None:
    """Limits of the KV cache, of characters before tokenization, and of messages."""
    with (
        ServerProcess("--num-kv-blocks", "8", session_file=tmp_path / "s.db") as server,
        server.wait_ready().client() as client,
    ):
        refused = client.post(PATH, json={"prompt": "x" * (16 * 8)})
        assert refused.status_code == 400 and "KV cache" in refused.json()["error"]["message"]
        refused = client.post(PATH, json={"prompt": "x" * (64 * CONTEXT + 1)})
        assert refused.status_code == 400 and "characters" in refused.json()["error"]["message"]
        messages = [{"role": "user", "content": ""}] * 4097
        refused = client.post("/v1/chat/completions", json={"messages": messages})
        assert refused.status_code == 400 and "4096" in refused.json()["error"]["message"]
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_eight_blocks_serve_64_requests_with_exact_results(tmp_path: Path) -> None:
    """Each request needs three or four blocks, so they preempt each other constantly; the results
    equal those with a large cache."""
    bodies = [
        {
            **{"prompt": f"pool {number}", "max_tokens": 40 + number % 9, "ignore_eos": True},
            **{"temperature": number % 2, "seed": number, "return_token_ids": True},
            "stream": number % 4 < 2,
        }
        for number in range(64)
    ]

    def serve(folder: Path, blocks: int) -> tuple[list[list[int]], float]:
        """Return (answers, preemptions); the engine is paused until all requests are queued."""
        folder.mkdir()
        gate = Gate(folder)
        with ServerProcess(
            "--num-kv-blocks", str(blocks), env=gate.env, session_file=folder / "s.db"
        ) as server:
            server.wait_ready()
            gate.order("wait")
            with ThreadPoolExecutor(64) as pool:
                asked = [pool.submit(ask, server, body) for body in bodies]
                try:
                    server.wait_for(lambda: server.num_connections >= 64, "all connections")
                finally:
                    gate.open()
                answers = [future.result(120) for future in asked]
            server.wait_idle()
            preemptions = server.metric("num_preemptions_total")
            assert server.stop() == 0
        return answers, preemptions

    roomy, none = serve(tmp_path / "roomy", 400)
    tight, some = serve(tmp_path / "tight", 8)
    assert tight == roomy == [expected_tokens_of(body) for body in bodies]
    assert none == 0 and some > 0


# ---- ten times the clients -----------------------------------------------------------------------

MAX_SEQS, QUEUE = 4, 8
CLIENTS = 10 * (MAX_SEQS + QUEUE)


def test_tenfold_load_rejects_exactly_the_surplus(tmp_path: Path) -> None:
    """The engine is paused until the surplus has been rejected: rejections are immediate, and every
    admitted request completes."""
    gate = Gate(tmp_path)
    with (
        ServerProcess(
            "--max-num-seqs", str(MAX_SEQS), "--max-queued", str(QUEUE),
            env=gate.env, session_file=tmp_path / "s.db",
        ) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):  # fmt: skip
        server.wait_ready()
        for turn in range(2):  # the capacity is released afterwards
            gate.order("wait")
            try:
                asked = crowd(server, pool, turn)
                server.wait_for(
                    lambda asked=asked: (
                        sum(f.done() for _, f in asked) >= CLIENTS - MAX_SEQS - QUEUE
                    ),
                    "the refusals",
                )
                refused = [future.result() for _, future in asked if future.done()]
                admitted = [(body, future) for body, future in asked if not future.done()]
                with server.client() as client:
                    assert client.get("/health").status_code == 200
            finally:
                gate.open()
            assert len(refused) == CLIENTS - MAX_SEQS - QUEUE
            for answer in refused:
                assert answer.status_code == 429, answer.text
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["code"] == "full"
            for body, future in admitted:
                assert future.result(60).status_code == 200
                assert future.result().json()["choices"][0]["token_ids"] == expected_tokens_of(body)
            server.wait_idle()
            with server.client() as client:
                assert client.get("/ready").status_code == 200
        assert server.stop() == 0


def crowd(
    server: ServerProcess, pool: ThreadPoolExecutor, turn: int
) -> Sequence[tuple[dict[str, Any], Future[httpx.Response]]]:
    def post(body: dict[str, Any]) -> httpx.Response:
        with server.client() as client:
            return client.post(PATH, json=body)

    bodies = [
        {
            **{"prompt": f"client {turn} {number}", "max_tokens": 10, "temperature": 0},
            **{"ignore_eos": True, "return_token_ids": True},
        }
        for number in range(CLIENTS)
    ]
    return [(body, pool.submit(post, body)) for body in bodies]
