"""500 concurrent clients on the native mock model: complete, in order, constant memory."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from server_helpers import ServerProcess, resident

from llaisys.bench.http_client import ConnectionPool, Endpoint
from llaisys.common.sampling import SamplingParams
from llaisys.entrypoints.llm import LLM

CLIENTS = 500
NEW_TOKENS = 24
GROWTH = 12 << 20  # allowed growth of a process in two waves, in bytes: 1,000 leaks of 12 KiB


def prompt_of(number: int) -> list[int]:
    chance = random.Random(number)
    return chance.choices(range(64), k=8 + number % 13)


def offline_answers() -> list[list[int]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    with LLM("mock") as llm:
        outputs = llm.generate([prompt_of(i) for i in range(CLIENTS)], params)
    return [output.outputs[0].token_ids for output in outputs]


async def stream_tokens(pool: ConnectionPool, number: int) -> list[int]:
    """Return the token ids of one stream in order of arrival; checks its format."""
    body = {"prompt": prompt_of(number), "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    pieces: list[bytes] = []
    status = await pool.exchange(
        "POST", "/v1/completions", json.dumps(body).encode(), lambda _, data: pieces.append(data)
    )
    events = b"".join(pieces).decode().split("\n\n")
    assert status == 200 and events[-2:] == ["data: [DONE]", ""], events[-3:]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    return [token for choice in choices for token in choice.get("token_ids", [])]


def test_500_clients_complete_without_leaks(tmp_path: Path) -> None:
    expected = offline_answers()

    async def wave(url: str) -> list[list[int]]:
        pool = ConnectionPool(Endpoint.of(url), {})  # empty: 500 connections
        try:
            return await asyncio.gather(*[stream_tokens(pool, i) for i in range(CLIENTS)])
        finally:
            pool.close()

    with ServerProcess("mock", real=True, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        pids = (server.process.pid, server.engine_pid)
        sizes = []
        for _ in range(3):
            assert asyncio.run(wave(server.url)) == expected
            server.wait_idle()
            sizes.append([resident(pid) for pid in pids])
        assert server.metric("generation_tokens_total") == 3 * CLIENTS * NEW_TOKENS
    for first, last in zip(sizes[0], sizes[-1], strict=True):
        assert last - first < GROWTH, sizes
    print([[size >> 20 for size in row] for row in sizes])
