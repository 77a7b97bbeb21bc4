"""AsyncLLMEngine and its engine process; cancellation and disconnects over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_fakes
import fault_server
import httpx
import pytest
import zmq
from engine_fakes import FakeTokenizer, expected_tokens
from fault_engine import STEP_SECONDS
from server_helpers import LONG, PACKAGE, ServerProcess, alive, socket_directories
from wire_helpers import raw_request, reset, sse_events

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import StreamOutput
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.server.config import Limits, ServerConfig
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import RejectedError, UnknownRequestError

CHAT = "/v1/chat/completions"


# ---- AsyncLLMEngine ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running_engine(**limits: Any) -> AsyncIterator[AsyncLLMEngine]:
    config = ServerConfig(
        engine=EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            scheduler=SchedulerConfig(8, 64, min_prefill_chunk=4),
            cache=CacheConfig(block_size=4, num_kv_blocks=300),
            warmup=False,
        ),
        limits=Limits(**limits),
        engine_module="fault_engine",
    )
    engine = AsyncLLMEngine(config)
    try:
        await engine.start()
        await asyncio.wait_for(engine.ready.wait(), 60)
        assert engine.is_ready
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def test_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(engine_fakes.__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(root)]))


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def read(engine: AsyncLLMEngine, name: str) -> list[StreamOutput]:
    return [part async for part in engine.stream(name)]


def test_async_engine(test_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine process for all checks, since its start is slow."""
    monkeypatch.setenv(STEP_SECONDS, "0.002")
    before = socket_directories()

    async def run() -> int:
        async with running_engine() as engine:
            pid = engine._link.process.popen.pid
            await streams_match_the_offline_engine(engine)
            await illegal_moves_are_refused(engine)
            await cancelled_requests_end_with_abort(engine)
            await cancelling_takes_effect_at_the_next_step(engine)
            await impossible_requests_are_rejected(engine)
            await long_texts_and_bad_words_are_tokenised_in_a_thread(engine)
            await leaving_a_stream_cancels(engine)
            await garbage_is_survived(engine)
        return pid

    pid = asyncio.run(run())
    assert not alive(pid)
    assert socket_directories() <= before


async def streams_match_the_offline_engine(engine: AsyncLLMEngine) -> None:
    names = [
        await engine.submit(f"prompt {i}", greedy(20 + i), stream=bool(i % 2)) for i in range(12)
    ]
    for i, parts in enumerate(await asyncio.gather(*[read(engine, name) for name in names])):
        expected = expected_tokens(list(f"prompt {i}".encode()), 20 + i, stops=())
        output = parts[-1].output
        assert output is not None and output.token_ids == expected
        assert [part.output for part in parts[:-1]] == [None] * (len(parts) - 1)
        if i % 2:
            assert [t for part in parts for t in part.token_ids] == expected
            assert "".join(part.text for part in parts) == output.text
    assert not engine.debug_state()["requests"]


async def illegal_moves_are_refused(engine: AsyncLLMEngine) -> None:
    with pytest.raises(UnknownRequestError):
        await read(engine, "unknown")
    name = await engine.submit("x", greedy(50), stream=True)
    stream = engine.stream(name)
    await anext(stream)
    with pytest.raises(UnknownRequestError):
        await read(engine, name)
    async for _ in stream:
        pass
    with pytest.raises(UnknownRequestError):
        await read(engine, name)
    assert not await engine.cancel(name)
    with pytest.raises(InvalidInputError):
        await engine.submit([], greedy(1))


async def cancelled_requests_end_with_abort(engine: AsyncLLMEngine) -> None:
    for stream in (True, False):
        names = [await engine.submit("y" * i, greedy(1000), stream=stream) for i in range(1, 13)]
        readers = [asyncio.create_task(read(engine, name)) for name in names]
        await asyncio.sleep(0)
        for name in names:  # eight run, four wait
            assert await engine.cancel(name)
        for parts in await asyncio.gather(*readers):
            assert parts[-1].finish_reason == "abort" and parts[-1].output is not None
    await idle(engine)


async def cancelling_takes_effect_at_the_next_step(engine: AsyncLLMEngine) -> None:
    name = await engine.submit("u", greedy(1000), stream=True)
    parts = engine.stream(name)
    await anext(parts)
    before = engine.stats.num_steps
    await engine.cancel(name)
    async for part in parts:
        if part.output is not None:
            assert part.finish_reason == "abort"
    assert engine.stats.num_steps - before < 10  # of a thousand


async def impossible_requests_are_rejected(engine: AsyncLLMEngine) -> None:
    name = await engine.submit("z" * 1300, greedy(5))
    with pytest.raises(RejectedError) as caught:
        await read(engine, name)
    assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")
    assert not any(engine.debug_state().values())


async def long_texts_and_bad_words_are_tokenised_in_a_thread(engine: AsyncLLMEngine) -> None:
    assert INLINE_CHARS == fault_server.INLINE_CHARS
    seen: list[tuple[str, bool]] = []  # (text, on the event loop)
    plain = engine.tokenizer.encode

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append((text, threading.current_thread() is threading.main_thread()))
        return list(plain(text, add_special_tokens))

    engine.tokenizer.encode = encode
    long = "x" * (INLINE_CHARS + 1)
    assert len(await engine.encode("short")) == 5
    assert len(await engine.encode(long)) == len(long)
    assert seen == [("short", True), (long, False)]
    seen.clear()
    name = await engine.submit([1, 2], greedy(2, bad_words=["ab", "cd"]))
    assert (await read(engine, name))[-1].finish_reason == "length"
    assert {text for text, _ in seen} == {"ab", " ab", "cd", " cd"}
    assert not any(on_loop for _, on_loop in seen)
    seen.clear()
    await read(engine, await engine.submit([3, 4], greedy(2, bad_words=["ab", "cd"])))
    assert seen == []  # the same bad words, as for the next prompt
    del engine.tokenizer.encode


async def leaving_a_stream_cancels(engine: AsyncLLMEngine) -> None:
    name = await engine.submit("w", greedy(1000), stream=True)
    async with contextlib.aclosing(engine.stream(name)) as parts:  # type: ignore[type-var]
        await anext(parts)
    engine.discard(await engine.submit("v", greedy(1000)))
    await idle(engine)
    assert not engine.debug_state()["choices"]


async def garbage_is_survived(engine: AsyncLLMEngine) -> None:
    process = engine._link.process
    assert process.directory.stat().st_mode & 0o777 == 0o700
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(process.output_address)
    for _ in range(5):
        socket.send(os.urandom(200))
    socket.close(linger=1000)
    context.term()
    engine._link._send_socket.send(b"cos\nsystem\n(S'id'\ntR.")
    parts = await read(engine, await engine.submit("alive", greedy(3)))
    assert parts[-1].finish_reason == "length"


async def idle(engine: AsyncLLMEngine) -> None:
    for _ in range(500):
        stats = engine.stats
        if not (stats.num_running or stats.num_waiting or stats.kv_blocks_used):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not idle: {engine.stats}")


# ---- cancel and disconnect over HTTP -------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow engine, so that requests can be cancelled while they run; four at a time."""
    with ServerProcess(
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "64",
        "--num-kv-blocks",
        "600",
        env={STEP_SECONDS: "0.005"},
        session_file=tmp_path_factory.mktemp("online") / "s.db",
    ) as process:
        yield process.wait_ready()


@pytest.mark.parametrize("stream", [True, False])
def test_cancel_route_ends_running_and_queued_requests(server: ServerProcess, stream: bool) -> None:
    ids = [f"cancel-{stream}-{i}" for i in range(8)]

    def ask(name: str) -> str:
        body = {**LONG, "stream": stream}
        headers = {"X-Request-Id": name}
        with server.client() as client:
            if not stream:
                answer = client.post("/v1/completions", json=body, headers=headers).json()
                return str(answer["choices"][0]["finish_reason"])
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                events = list(sse_events(response))
            assert events[-1] == "[DONE]"
            return str(json.loads(events[-2])["choices"][0]["finish_reason"])

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, name) for name in ids]
        server.wait_for(lambda: server.metric("num_requests_waiting") == 4, "a full engine")
        with server.client() as client:
            for name in ids:
                assert client.post(f"/v1/requests/{name}/cancel").json()["cancelled"] is True
        assert [answer.result(30) for answer in answers] == ["abort"] * 8
        with server.client() as client:
            assert client.post(f"/v1/requests/{ids[0]}/cancel").status_code == 404
    server.wait_idle()


def test_disconnect_stops_the_request_in_every_state(server: ServerProcess) -> None:
    """Streaming or not, running or queued, FIN or RST: no request is left."""
    aborted = server.metric("request_success_total")
    connections = [raw_request(server, {**LONG, "stream": bool(i % 2)}) for i in range(8)]
    server.wait_for(lambda: server.metric("num_requests_waiting") == 4, "a full engine")
    for i, connection in enumerate(connections):
        reset(connection) if i % 3 else connection.close()
    server.wait_idle()
    server.wait_for(lambda: server.metric("request_success_total") == aborted + 8, "eight aborts")


def test_http_client_timeouts_do_not_leak(server: ServerProcess) -> None:
    with server.client(timeout=0.2) as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=LONG)
    server.wait_idle()
