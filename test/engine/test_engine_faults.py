"""Failed steps, timeouts and lost workers; start of an executor."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
from engine_fakes import (
    adapter_of,
    expected_tokens,
    greedy,
    make_config,
    make_engine,
    run_all,
)
from error_helpers import invalid_input, naming

from llaisys.common.errors import ClosedError
from llaisys.common.request import RequestStatus
from llaisys.engine.config import CacheConfig
from llaisys.engine.executor import (
    Executor,
    ExecutorTimeoutError,
    UniProcExecutor,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.llm_engine import LLMEngine

S = RequestStatus


def test_a_fault_ends_the_requests_of_its_step_and_no_others():
    engine = make_engine(max_num_seqs=2)
    first = [engine.submit([1 + i, 2], greedy(5, ignore_eos=True)) for i in range(2)]
    later = [engine.submit([7 + i, 2], greedy(5, ignore_eos=True)) for i in range(2)]
    engine.step()

    def explode(step):
        adapter_of(engine).on_forward = None
        raise MemoryError("no more of it")

    adapter_of(engine).on_forward = explode
    outputs = run_all(engine)
    for name in first:
        choice = outputs[name].outputs[0]
        assert (choice.status, choice.finish_reason) == (S.FINISHED_ERROR, "error")
        assert "rank 0" in choice.error and "no more of it" in choice.error
        assert len(choice.token_ids) == 1
    for index, name in enumerate(later):
        assert outputs[name].token_ids == expected_tokens([7 + index, 2], 5, stops=())
    stats = engine.stats()
    assert stats["worker_errors"] == 1 and stats["executor_timeouts"] == 0
    assert stats["kv_blocks_used"] == 0


def test_a_fault_in_the_sampler_is_a_fault_of_the_step():
    engine = make_engine()
    name = engine.submit([1, 2], greedy(5))

    def explode(sampling):
        adapter_of(engine).on_sample = None
        raise ValueError("bad row")

    adapter_of(engine).on_sample = explode
    assert run_all(engine)[name].finish_reason == "error"
    again = engine.submit([1, 2], greedy(5))
    assert run_all(engine)[again].token_ids == expected_tokens([1, 2], 5)


def test_blocks_of_a_failed_step_are_not_reused_as_a_prefix():
    engine = make_engine(block_size=4)
    prompt = list(range(1, 14))

    def explode(step):
        adapter_of(engine).on_forward = None
        raise RuntimeError("lost")

    adapter_of(engine).on_forward = explode
    engine.submit(prompt, greedy(3, ignore_eos=True))
    run_all(engine)
    name = engine.submit(prompt, greedy(3, ignore_eos=True))
    output = run_all(engine)[name]
    assert output.usage.cached_tokens == 0
    assert output.token_ids == expected_tokens(prompt, 3, stops=())


def test_worker_errors_have_the_rank():
    executor = Executor.get_class(make_config())(make_config())
    with pytest.raises(
        WorkerError, match=r"worker rank 0 \(local rank 0\): sample_tokens"
    ) as caught:
        executor.sample_tokens()
    assert caught.value.rank == caught.value.local_rank == 0
    assert isinstance(caught.value.__cause__, RuntimeError)
    executor.shutdown()


def test_failed_steps_are_counted_until_one_succeeds():
    engine = make_engine(max_num_seqs=1)
    adapter, core = adapter_of(engine), engine.core

    def explode(step):
        raise RuntimeError("lost")

    for _ in range(3):
        engine.submit([1, 2], greedy(3))
    adapter.on_forward = explode
    for count in (1, 2):
        engine.step()
        assert core.failed_steps == count
    adapter.on_forward = None
    engine.step()
    assert core.failed_steps == 0


def test_a_lost_worker_ends_the_engine(monkeypatch):
    engine = make_engine()
    engine.submit([1, 2], greedy(3))

    def lost(*_):
        raise WorkerLostError("worker rank 0 ended with status 9")

    monkeypatch.setattr(engine.core.executor, "sample_tokens", lost)
    with naming(WorkerLostError, "9"):
        engine.step()


def test_a_step_after_a_timeout_waits_for_the_worker():
    """A slow worker fails only the step that timed out."""
    engine = make_engine(step_timeout=5.0, max_num_seqs=1)
    adapter, release = adapter_of(engine), threading.Event()

    def hang(step):
        adapter.on_forward = None
        release.wait(30)

    adapter.on_forward = hang
    engine.core.executor.config = replace(engine.config, step_timeout=0.05)
    first, second = (engine.submit([1 + i, 2], greedy(3)) for i in range(2))
    engine.step()
    engine.core.executor.config = replace(engine.config, step_timeout=30.0)
    threading.Timer(0.1, release.set).start()
    outputs = run_all(engine)
    assert outputs[second].token_ids == expected_tokens([2, 2], 3)
    assert engine.core.executor.stats.timeouts == 1 and engine.core.failed_steps == 0
    assert first not in outputs
    engine.close()


def test_timeouts_are_counted_apart_from_worker_errors():
    engine = make_engine(step_timeout=0.05)
    adapter, release = adapter_of(engine), threading.Event()

    def hang(step):
        adapter.on_forward = None
        release.wait(30)

    adapter.on_forward = hang
    first = engine.submit([1, 2], greedy(3))
    assert run_all(engine)[first].finish_reason == "error"
    assert engine.core.executor.stats.timeouts == 1
    assert engine.core.executor.stats.worker_errors == 0
    with pytest.raises(ExecutorTimeoutError):
        engine.core.executor.check_health()
    release.set()
    engine.core.executor.local_ranks[0].wait_idle(30)
    engine.core.executor.check_health()
    again = engine.submit([1, 2], greedy(3))
    assert run_all(engine)[again].token_ids == expected_tokens([1, 2], 3)
    engine.close()


def test_worker_releases_the_sequences_of_timed_out_steps():
    """More sequences than rows; the plan that released some arrived while the worker was busy."""
    engine = make_engine(step_timeout=0.05, max_num_seqs=2)
    adapter, executor = adapter_of(engine), engine.core.executor
    for _ in range(3):
        release = threading.Event()

        def hang(step, release=release):
            adapter.on_forward = None
            release.wait(30)

        adapter.on_forward = hang
        for _ in range(2):  # the first two hang, the next two meet a busy worker
            names = [engine.submit([1, 2], greedy(3)) for _ in range(2)]
            outputs = run_all(engine)
            assert [outputs[name].finish_reason for name in names] == ["error"] * 2
        release.set()
        executor.local_ranks[0].wait_idle(30)
    names = [engine.submit([i, 2], greedy(3)) for i in (1, 3)]
    outputs = run_all(engine)
    assert [outputs[name].token_ids for name in names] == [
        expected_tokens([i, 2], 3) for i in (1, 3)
    ]
    assert len(executor.worker.batch.row_of) <= 2
    engine.close()


# ---- starting ------------------------------------------------------------------------------------


def test_executor_methods_and_start_up_line(caplog):
    config = make_config()
    assert Executor.get_class(config) is UniProcExecutor
    with caplog.at_level(logging.INFO, "llaisys.engine"):
        executor = UniProcExecutor(config)
    for part in ("backend=uni", "tp_size=1", "world_size=1", "rank=0", "device=cpu", "kv_blocks="):
        assert part in caplog.text
    assert executor.worker.distributed_init_method == "tcp://127.0.0.1:29501"
    assert executor.collective_rpc("profile")[0]["steps"] == 0
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ClosedError):
        executor.check_health()


def test_kv_cache_memory_becomes_blocks():
    engine = LLMEngine(make_config(cache=CacheConfig(block_size=16, kv_cache_memory_bytes=100_000)))
    assert engine.model_info.num_blocks == 100_000 // (16 * 64)
    with invalid_input("kv_cache_memory_bytes") as e:
        LLMEngine(make_config(cache=CacheConfig(kv_cache_memory_bytes=10)))
    assert (e.value.field, e.value.value) == ("kv_cache_memory_bytes", 10)


def test_kv_cache_memory_beyond_the_machine_is_rejected_with_both_numbers(monkeypatch):
    monkeypatch.setattr("llaisys.engine.worker.model_opening.available_memory", lambda: 99_999)
    with invalid_input("kv_cache_memory_bytes"):
        LLMEngine(make_config(cache=CacheConfig(block_size=16, kv_cache_memory_bytes=100_000)))
