"""Requests at the limits of their lists and counts do not block the event loop: CPU time of the
loop thread per iteration."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import engine_fakes
import pytest
from engine_fakes import FakeTokenizer
from loop_meter import MAX_SECONDS, MeteredLoop, run_metered, server_client
from server_helpers import PACKAGE

from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.server.config import Limits, ServerConfig
from llaisys.server.http.request_bodies import Turns

RESPONSES = "/v1/responses"


@pytest.fixture(autouse=True)
def engine_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(engine_fakes.__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(root)]))


def config(max_num_seqs: int = 8, **limits: Any) -> ServerConfig:
    return ServerConfig(
        engine=EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            scheduler=SchedulerConfig(max_num_seqs, 512, min_prefill_chunk=4),
            cache=CacheConfig(block_size=4, num_kv_blocks=4096),
            warmup=False,
        ),
        limits=Limits(**limits),
        engine_module="fault_engine",
    )


def test_item_references_are_counted_before_work_and_expanded_off_the_loop() -> None:
    async def run(loop: MeteredLoop) -> None:
        async with server_client(config(max_body_bytes=1 << 20)) as client:
            stored = await client.post(RESPONSES, json={"input": "hi", "max_output_tokens": 400})
            (item,) = stored.json()["output"]
            reference = {"type": "item_reference", "id": item["id"]}

            async def refer(count: int) -> dict[str, Any]:
                body = {"input": [reference] * count, "max_output_tokens": 2}
                response = await client.post(RESPONSES, json=body)
                assert response.status_code == 400, response.text
                error: dict[str, Any] = response.json()["error"]
                return error

            limits = {"references": 12_000, "expanded size": 4096, "context": 1000}
            for name, count in limits.items():
                error, seconds = await loop.measure(partial(refer, count))
                assert seconds < MAX_SECONDS, (name, seconds)
                assert error["param"] == "input", error
                if name == "references":
                    assert "12000 item references" in error["message"]
                elif name == "expanded size":
                    assert "bytes in its referenced items" in error["message"]

    run_metered(run)


MESSAGE = {"role": "user", "content": "hi"}
MANY_MESSAGES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/messages": {"max_tokens": 2},
    "/api/chat": {"model": "mock"},
    "/v1/responses": {},
    "/tokenize": {},
    "/apply-template": {},
    "/v1/sessions": {},
}


@pytest.mark.parametrize("count", [4000, 16_000])
def test_messages_are_counted_before_conversion_and_converted_off_the_loop(count: int) -> None:
    async def run(loop: MeteredLoop) -> None:
        async with server_client(config()) as client:
            for path, fields in MANY_MESSAGES.items():
                name = "input" if path == RESPONSES else "messages"
                content = json.dumps({**fields, name: [MESSAGE] * count})
                headers = {"content-type": "application/json"}
                work = partial(client.post, path, content=content, headers=headers)
                response, seconds = await loop.measure(work)
                assert seconds < MAX_SECONDS, (path, seconds)
                if count > 4096:
                    assert response.status_code == 400, (path, response.text)
                    assert str(count) in response.text

    run_metered(run)


def test_a_wave_of_requests_begins_over_several_iterations() -> None:
    async def run() -> None:
        turns, begun = Turns(3), []

        async def request(number: int) -> None:
            await turns.take()
            begun.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(20)]
        counts = []
        while len(begun) < 18:
            before = len(begun)
            await asyncio.sleep(0)
            counts.append(len(begun) - before)
            if before == 3:
                tasks[15].cancel()  # while they wait; they take no turns
                tasks[17].cancel()
        assert max(counts) == 3 and sum(counts) == 18
        assert begun == [number for number in range(20) if number not in (15, 17)]
        await request(20)
        assert begun[-1] == 20

    asyncio.run(asyncio.wait_for(run(), 10))
