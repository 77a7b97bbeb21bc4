"""Bounded thread pools: limits, fairness, independence of each other."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_helpers import CHAT, chat, error_of
from server_helpers import Gate, ServerProcess, wait_for

from llaisys.server.errors import ApiError
from llaisys.server.thread_pool import BoundedThreadPool, current_owner


def test_full_pool_rejects_and_cancelled_jobs_are_removed() -> None:
    async def use() -> None:
        pool, gate, ran = BoundedThreadPool("test", 1, 2), threading.Event(), []

        def work(number: int) -> int:
            ran.append(number)
            gate.wait(30)
            return number

        jobs = [asyncio.create_task(pool.run(work, number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await pool.run(work, 3)
        assert (caught.value.status, caught.value.code) == (503, "test_busy")
        assert caught.value.retry_after == 1
        jobs[1].cancel()  # waiting: never runs
        with pytest.raises(asyncio.CancelledError):
            await jobs[1]
        await asyncio.sleep(0)
        assert pool.jobs == 2
        gate.set()
        assert [await jobs[0], await jobs[2]] == [0, 2] and ran == [0, 2]
        while pool.jobs:
            await asyncio.sleep(0.001)
        assert await pool.run(work, 4) == 4
        pool.close()

    asyncio.run(use())


def test_cancelled_running_job_keeps_its_thread() -> None:
    async def use() -> None:
        pool, gate = BoundedThreadPool("test", 1, 0), threading.Event()
        job = asyncio.create_task(pool.run(gate.wait, 30))
        while not pool.jobs:
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        with pytest.raises(ApiError):
            await pool.run(gate.wait, 30)
        gate.set()
        pool.close()

    asyncio.run(use())


def test_pool_is_fair_and_limited_per_key() -> None:
    async def use() -> None:
        pool, gate, ran = BoundedThreadPool("test", 1, 4), threading.Event(), []

        def work(name: str) -> None:
            gate.wait(30)
            ran.append(name)

        async def ask(owner: str, number: int) -> None:
            current_owner.set(owner)  # in this task only
            await pool.run(work, f"{owner}{number}")

        many = [asyncio.create_task(ask("a", number)) for number in range(6)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(ask(owner, number)) for number in (0, 1) for owner in "bc"]
        await asyncio.sleep(0)
        gate.set()
        results = await asyncio.gather(*many, *few, return_exceptions=True)
        assert [type(result) for result in results] == [*[type(None)] * 5, ApiError] + [
            type(None)
        ] * 4
        assert ran == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "a3", "a4"]
        assert pool.jobs == 0
        pool.close()

    asyncio.run(use())


def test_finish_waits_where_run_is_rejected() -> None:
    async def use() -> None:
        pool, gate = BoundedThreadPool("test", 1, 0), threading.Event()
        first = asyncio.create_task(pool.run(gate.wait, 30))
        last = asyncio.create_task(pool.finish(gate.wait, 30))
        while pool.jobs < 2:
            await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await pool.run(gate.wait, 30)
        gate.set()
        assert await first and await last
        pool.close()

    asyncio.run(use())


@pytest.mark.parametrize("stream", [False, True])
def test_answered_turn_is_stored_despite_a_full_database_queue(
    tmp_path: Path, stream: bool
) -> None:
    file, gate = tmp_path / "sessions.db", Gate(tmp_path)
    server = ServerProcess(session_file=file, env=gate.env)
    with server, server.wait_ready().client() as client, ThreadPoolExecutor(80) as pool:
        gate.order("wait")
        body = chat(session_id="kept", max_tokens=2, stream=stream)
        turn = pool.submit(client.post, CHAT, json=body)
        gate.hold()  # the turn is open: its next database access is the last
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        waiting = [pool.submit(client.post, "/v1/sessions", json={}) for _ in range(66)]
        wait_for(lambda: any(job.done() for job in waiting), "one to be refused", 9)
        gate.open()
        done = "llaisys:request_success_total{"
        server.wait_for(lambda: done in client.get("/metrics").text, "the answer", 9)
        other.execute("COMMIT")
        answer = turn.result()
        assert answer.status_code == 200 and "database_busy" not in answer.text
        roles = [message["role"] for message in client.get("/v1/sessions/kept").json()["messages"]]
        assert roles == ["user", "assistant"]
        other.close()


def test_locked_database_delays_sessions_only(tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    long_text = "x " * 1000  # tokenised in a thread
    with ServerProcess(session_file=file) as server, server.wait_ready().client() as client:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with ThreadPoolExecutor(80) as pool:
            waiting = [pool.submit(client.post, "/v1/sessions", json={}) for _ in range(66)]
            wait_for(lambda: any(job.done() for job in waiting), "one to be refused", 9)
            body = chat(messages=[{"role": "user", "content": long_text}], max_tokens=2)
            assert client.post(CHAT, json=body).status_code == 200
            assert sum(job.done() for job in waiting) == 1  # the others still wait for the lock
            error = error_of(client.get("/v1/sessions"), 503)
            assert error["code"] == "database_busy"
            other.execute("COMMIT")
            statuses = sorted(job.result().status_code for job in waiting)
        assert statuses == [201] * 65 + [503]
        assert len(client.get("/v1/sessions").json()["data"]) == 65
