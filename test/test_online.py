"""AsyncLLMEngine and its engine process; cancelling and hanging up through the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from engine_fakes import FakeTokenizer, expected_tokens
from server_helpers import (
    CONTEXT,
    STEP_SECONDS,
    ServerProcess,
    alive,
    socket_directories,
    sse_events,
    wait_for,
)

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestStatus, StreamOutput, TokenLogprobs, TokenUpdate
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.server.async_engine import AsyncLLMEngine, merge_parts
from llaisys.server.config import Limits, ServerConfig
from llaisys.server.errors import RejectedError, UnknownRequestError
from llaisys.server.messages import (
    Finish,
    Sampling,
    Submit,
    Update,
    decode_from_engine,
    decode_to_engine,
    encode,
)

CHAT = "/v1/chat/completions"


# ---- messages ------------------------------------------------------------------------------------


def test_every_sampling_field_crosses_the_wire() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.2, logit_bias={3: 1.5}, bad_words=["x"],
        allowed_token_ids=[1, 2], seed=(1 << 64) - 1, stop=["a", "b"], stop_token_ids=[4],
        include_stop_str_in_output=True, ignore_eos=True, max_tokens=5, min_tokens=1, logprobs=3,
        skip_special_tokens=False, samplers=["top_k", "temperature"],
    )  # fmt: skip
    assert set(Sampling.__struct_fields__) == set(params.to_dict())
    frame = encode(Sampling.of(params))
    assert msgspec.msgpack.decode(frame, type=Sampling).params() == params


def test_token_updates_cross_the_wire() -> None:
    update = TokenUpdate(
        "r1", [5, 6], RequestStatus.FINISHED_STOPPED, [TokenLogprobs(5, -0.5, 1, [(5, -0.5)])], "x",
        3, 1.5, None,
    )  # fmt: skip
    frame = encode(Update.of(update))
    assert msgspec.msgpack.decode(frame, type=Update).update() == update


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1" * 9, b"cos\nsystem\n(S'id'\ntR.", b"\x80"])
def test_garbage_on_the_channel_is_an_error_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)


def test_messages_refuse_unknown_fields() -> None:
    frame = msgspec.msgpack.encode({"type": "finish", "request_ids": ["a"], "evil": 1})
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(frame)
    assert decode_to_engine(encode(Finish(["a"]))) == Finish(["a"])


def test_parts_that_were_not_fetched_are_put_together() -> None:
    from collections import deque

    parts = deque(
        [
            StreamOutput("r", 0, "a", [1]),
            StreamOutput("r", 0, "b", [2], "stop"),
            StreamOutput("r", 1, "c", [3]),
        ]
    )
    merged = merge_parts(parts)
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("ab", [1, 2], "stop")
    assert merge_parts(parts).text == "c" and not parts


# ---- AsyncLLMEngine ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running_engine(**limits: Any) -> AsyncIterator[AsyncLLMEngine]:
    config = ServerConfig(
        engine=EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            scheduler=SchedulerConfig(8, 64, min_prefill_chunk=4),
            cache=CacheConfig(block_size=4, num_blocks=300),
            warmup=False,
        ),
        limits=Limits(**limits),
        engine_module="server_helpers",
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
    root = Path(__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root.parent / "python"), str(root)]))


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def read(engine: AsyncLLMEngine, name: str) -> list[StreamOutput]:
    return [part async for part in engine.stream(name)]


def test_async_engine(test_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine process for the whole life of requests: it is what costs time here."""
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
        wanted = expected_tokens(list(f"prompt {i}".encode()), 20 + i, stops=())
        output = parts[-1].output
        assert output is not None and output.token_ids == wanted
        assert [part.output for part in parts[:-1]] == [None] * (len(parts) - 1)
        if i % 2:
            assert [t for part in parts for t in part.token_ids] == wanted
            assert "".join(part.text for part in parts) == output.text
    assert engine.num_open == 0


async def illegal_moves_are_refused(engine: AsyncLLMEngine) -> None:
    with pytest.raises(UnknownRequestError):
        await read(engine, "nobody")
    name = await engine.submit("x", greedy(50), stream=True)
    stream = engine.stream(name)
    await anext(stream)
    with pytest.raises(UnknownRequestError, match="streaming"):
        await read(engine, name)
    async for _ in stream:
        pass
    with pytest.raises(UnknownRequestError, match="gone"):
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
    with pytest.raises(RejectedError, match="1300"):
        await read(engine, name)
    assert not engine._outputs._choices and engine.num_open == 0


async def leaving_a_stream_cancels(engine: AsyncLLMEngine) -> None:
    name = await engine.submit("w", greedy(1000), stream=True)
    async with contextlib.aclosing(engine.stream(name)) as parts:  # type: ignore[type-var]
        await anext(parts)
    engine.drop(await engine.submit("v", greedy(1000)))
    await idle(engine)
    assert not engine._outputs._choices


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
    """Slow enough that a request can be met while it runs; four at a time."""
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


LONG = {"prompt": "long", "max_tokens": CONTEXT - 100, "ignore_eos": True, "temperature": 0}


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


def raw_request(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    connection = server.connect()
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST, as a killed client may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_hanging_up_stops_the_work_wherever_it_is(server: ServerProcess) -> None:
    """Streaming or not, running or queued, FIN or RST: nothing is left."""
    aborted = server.metric("request_success_total")
    connections = [raw_request(server, {**LONG, "stream": bool(i % 2)}) for i in range(8)]
    server.wait_for(lambda: server.metric("num_requests_waiting") == 4, "a full engine")
    for i, connection in enumerate(connections):
        reset(connection) if i % 3 else connection.close()
    server.wait_idle()
    server.wait_for(lambda: server.metric("request_success_total") == aborted + 8, "eight aborts")


def test_survivors_of_a_storm_of_hang_ups_do_not_notice(server: ServerProcess) -> None:
    chance = random.Random(7)
    stop = threading.Event()

    def vandal() -> int:
        count = 0
        while not stop.is_set() and count < 50:
            body = {**LONG, "prompt": f"vandal {count}", "stream": chance.random() < 0.5}
            connection = raw_request(server, body)
            if chance.random() < 0.5:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    connection.recv(1)
            reset(connection) if chance.random() < 0.5 else connection.close()
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool, server.client() as client:
        vandals = [pool.submit(vandal) for _ in range(4)]
        for number in range(12):
            body = {"prompt": f"survivor {number}", "max_tokens": 16, "temperature": 0}
            answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
            tokens = answer.json()["choices"][0]["token_ids"]
            assert tokens == expected_tokens(list(f"survivor {number}".encode()), 16)
        stop.set()
        assert sum(v.result(60) for v in vandals) > 0
    server.wait_idle()


def test_a_small_pool_serves_many_requests_exactly(tmp_path: Path) -> None:
    """8 blocks, 64 requests: they take turns, and nobody can tell."""
    with ServerProcess("--num-kv-blocks", "8", session_file=tmp_path / "s.db") as small:
        small.wait_ready()
        with small.client() as client, ThreadPoolExecutor(16) as pool:

            def ask(number: int) -> list[int]:
                body = {"prompt": f"pool {number}", "max_tokens": 40, "temperature": 0}
                body |= {"return_token_ids": True, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body).json()
                return list(answer["choices"][0]["token_ids"])

            for number, tokens in enumerate(pool.map(ask, range(64))):
                assert tokens == expected_tokens(list(f"pool {number}".encode()), 40, stops=())
            refused = client.post("/v1/completions", json={"prompt": "x" * 200})
            assert refused.status_code == 400 and "KV cache" in refused.json()["error"]["message"]
        small.wait_idle()
        assert small.stop() == 0


def test_a_slow_reader_holds_up_nobody(server: ServerProcess) -> None:
    body = {**LONG, "stream": True, "logprobs": 20, "max_tokens": 80}
    slow = raw_request(server, body)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    with server.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        server.wait_for(
            lambda: server.metric("num_requests_running") == 0, "the end of the slow request"
        )
        assert client.get("/health").status_code == 200
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(1 << 16)
    assert b"data: [DONE]" in received
    slow.close()


# ---- the end -------------------------------------------------------------------------------------


def test_sigterm_drains_and_a_second_one_aborts(tmp_path: Path) -> None:
    with ServerProcess(env={STEP_SECONDS: "0.01"}, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        pid, before = server.engine_pid, socket_directories()
        drained = raw_request(server, {**LONG, "max_tokens": 60})
        endless = raw_request(server, {**LONG, "stream": True})
        server.wait_for(lambda: server.metric("num_requests_running") == 2, "two requests")
        with server.client() as client:
            server.process.terminate()
            wait_for(lambda: client.get("/ready").status_code == 503, "the drain")
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert client.get("/health").status_code == 200
            assert b"200 OK" in drained.recv(1 << 16)
        server.process.terminate()
        received = b""
        while chunk := endless.recv(1 << 16):
            received += chunk
        assert b'"finish_reason":"abort"' in received and b"data: [DONE]" in received
        assert server.process.wait(30) == 1
        assert not alive(pid) and len(socket_directories()) < len(before)


def test_only_one_port_listens_and_it_is_local(server: ServerProcess) -> None:
    inodes = set()
    for pid in (server.process.pid, server.engine_pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1])
    address = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert listening == [f"{address}:{server.address[1]:04X}"]


def test_a_taken_port_and_a_missing_model_are_told_plainly(
    server: ServerProcess, tmp_path: Path
) -> None:
    import sys

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).resolve().parent.parent
        return subprocess.run(
            [sys.executable, "-m", "llaisys.server", *options, "--session-file", tmp_path / "s.db"],
            env={**os.environ, "PYTHONPATH": str(root / "python")},
            capture_output=True,
            text=True,
            timeout=60,
        )

    taken = run("--port", str(server.address[1]))
    assert taken.returncode == 2 and "cannot listen" in taken.stderr
    missing = run(str(tmp_path / "no-model"), "--port", "0")
    assert missing.returncode == 1 and "no-model" in missing.stderr
    assert "Traceback" not in missing.stderr
    bad = run("--max-num-seqs", "0")
    assert bad.returncode == 2 and "max_num_seqs" in bad.stderr


def test_submit_is_one_frame_per_prompt_whatever_n_is() -> None:
    """The prompt crosses once, not once per choice."""
    from llaisys.common.types import ModelInfo
    from llaisys.engine.input_processor import InputProcessor

    info = ModelInfo("m", "mock", 512, 2048, (0,), 10, 16)
    entry = InputProcessor(info).process(list(range(1, 400)), SamplingParams(n=64))
    frame = encode(Submit.of("g", entry.requests, None))
    assert len(frame) < 3000
    message = decode_to_engine(frame)
    assert isinstance(message, Submit)
    requests = message.requests()
    assert [r.choice for r in requests] == list(range(64))
    assert dataclasses.asdict(requests[3].sampling) == dataclasses.asdict(entry.params)
    assert time.monotonic() - requests[0].arrival_time < 60


def test_http_client_timeouts_do_not_leak(server: ServerProcess) -> None:
    with server.client(timeout=0.2) as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=LONG)
    server.wait_idle()
