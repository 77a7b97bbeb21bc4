"""Concurrent streams: each gets its own tokens, complete and in order, and one end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from engine_fakes import FakeTokenizer, expected_tokens
from server_helpers import ServerProcess
from wire_helpers import sse_events

STREAMS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """max_num_seqs is below the number of streams, so that some run while others wait."""
    with ServerProcess(
        "--max-num-seqs", "5", "--max-num-batched-tokens", "32", "--max-queued", "1000",
        session_file=tmp_path_factory.mktemp("isolation") / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def expected_tokens_of(prompt: str, max_tokens: int) -> list[int]:
    return expected_tokens(FakeTokenizer().encode(prompt), max_tokens, stops=())


async def stream_tokens(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> list[int]:
    """Return the token ids of one stream; checks its format."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    tokens: list[int] = []
    text, ends, done = "", [], False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line:
                continue
            assert not done, "something came after [DONE]"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
                continue
            choice = json.loads(data)["choices"][0]
            assert not ends, "something came after the finish chunk"
            tokens += choice.get("token_ids", [])
            text += choice["text"]
            if choice["finish_reason"] is not None:
                ends.append(choice["finish_reason"])
    assert ends == ["length"] and done
    assert text == FakeTokenizer().decode_tokens(tokens)
    return tokens


def test_eight_streams_do_not_mix(server: ServerProcess) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as client:
            jobs = [(f"session {i} " * (i + 1), 40 + 7 * i) for i in range(STREAMS)]
            results = await asyncio.gather(*[stream_tokens(client, *job) for job in jobs])
            for job, tokens in zip(jobs, results, strict=True):
                assert tokens == expected_tokens_of(*job)

    asyncio.run(run())
    server.wait_idle()


def test_500_concurrent_streams_are_complete(server: ServerProcess) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [  # 20 per client, since client-side cost grows with its connections
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=server.url, timeout=120, verify=False)
                )
                for _ in range(25)
            ]
            jobs = [(f"client {i}", 4 + i % 5) for i in range(500)]
            results = await asyncio.gather(
                *[stream_tokens(clients[i % 25], *job) for i, job in enumerate(jobs)]
            )
            for job, tokens in zip(jobs, results, strict=True):
                assert tokens == expected_tokens_of(*job)

    asyncio.run(run())
    server.wait_idle()


def test_choices_of_one_stream_do_not_mix(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "prompt": ["one", "two", "three"],
        "n": 3,
        "seed": 11,
        "max_tokens": 15,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with server.client() as client:
        whole = client.post("/v1/completions", json=body).json()["choices"]
        streamed: dict[int, list[int]] = {index: [] for index in range(9)}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            events = list(sse_events(response))
        for event in events[:-1]:
            choice = json.loads(event)["choices"][0]
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert [choice["token_ids"] for choice in whole] == list(streamed.values())
    assert len({tuple(tokens) for tokens in streamed.values()}) == 9


def test_stop_strings_of_streams_do_not_mix(server: ServerProcess) -> None:
    """Each stream has its own stop string, which must not end the others."""

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        prompts = [f"stop {i}" for i in range(STREAMS)]
        texts = [
            FakeTokenizer().decode_tokens(expected_tokens_of(prompt, 60)) for prompt in prompts
        ]
        stops = [text[30:33] for text in texts]

        async def ask(prompt: str, stop: str) -> tuple[str, str | None]:
            text, reason = "", None
            stream = await client.completions.create(
                model="fake",
                prompt=prompt,
                max_tokens=60,
                temperature=0,
                stop=[stop],
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
            return text, reason

        for text, stop, (got, reason) in zip(
            texts, stops, await asyncio.gather(*map(ask, prompts, stops)), strict=True
        ):
            assert got == text[: text.index(stop)] and reason == "stop"

    asyncio.run(run())
