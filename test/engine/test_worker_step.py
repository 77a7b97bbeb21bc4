"""The worker's five stages on a fake adapter: order, arrays, rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    VOCAB,
    FakeAdapter,
    adapter_of,
    expected_tokens,
    greedy,
    make_config,
    make_engine,
    run_all,
    run_prompts,
)

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.step import ForwardOutput
from llaisys.common.types import NewSequence, SchedulerOutputs
from llaisys.engine.executor import UniProcExecutor
from llaisys.engine.worker import STAGES, Worker
from llaisys.engine.worker import worker as worker_module
from llaisys.engine.worker.sampler import output_rows


def make_worker(**settings) -> Worker:
    worker = Worker(make_config(**settings))
    worker.init_device()
    worker.load_model()
    return worker


def sequence(seq_id: int, tokens: list[int], prompt: int = 0, **params) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        token_ids=tokens,
        num_prompt_tokens=prompt or len(tokens),
        sampling=SamplingParams(**params).with_defaults(None),
        seed=17,
        choice=0,
        stop_token_ids=frozenset({EOS}),
        bad_words=(),
    )


def two_sequences() -> SchedulerOutputs:
    """Sequence 5 computes tokens 2..6 of 7 and samples nothing; sequence 9 finishes its prompt."""
    return SchedulerOutputs(
        step_id=3,
        seq_ids=[5, 9],
        request_ids=["r5", "r9"],
        starts=[2, 0],
        counts=[4, 3],
        samples=[False, True],
        new_seqs=[
            sequence(5, [10, 11, 12, 13, 14, 15, 16], temperature=0.0),
            sequence(9, [20, 21, 22], temperature=0.0),
        ],
        new_blocks={5: [7, 3], 9: [2]},
    )


def test_prepare_step_inputs_concatenates_token_ranges():
    step = make_worker().prepare_step_inputs(two_sequences())
    assert step.token_ids.tolist() == [12, 13, 14, 15, 20, 21, 22]
    assert step.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert step.seq_ids.tolist() == [5, 5, 5, 5, 9, 9, 9]
    assert step.logits_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    dtypes = (step.token_ids, step.positions, step.seq_ids, step.logits_mask)
    assert [a.dtype for a in dtypes] == [np.int64, np.int64, np.int64, np.int8]
    assert all(a.flags.c_contiguous for a in dtypes)


def test_build_attention_metadata_returns_slots_and_tables():
    worker = make_worker(block_size=4)
    attention = worker.build_attention_metadata(worker.prepare_step_inputs(two_sequences()))
    assert attention.slot_mapping.tolist() == [30, 31, 12, 13, 8, 9, 10]
    assert attention.batch_seq_ids.tolist() == [5, 9]
    assert attention.context_lens.tolist() == [6, 3]
    assert attention.block_tables.tolist() == [[7, 3], [2, -1]]
    assert attention.slot_mapping.dtype == attention.context_lens.dtype == np.int32
    assert attention.block_tables.dtype == np.int32 and attention.block_tables.flags.c_contiguous


def test_stages_run_in_order():
    worker = make_worker()
    seen = []
    for stage in STAGES:
        original = getattr(worker, stage)

        def record(*args, stage=stage, original=original):
            seen.append(stage)
            return original(*args)

        setattr(worker, stage, record)
    adapter = worker.adapter
    adapter.kv[[28, 29]] = [10, 11]  # computed in an earlier step
    worker.execute_model(two_sequences())
    assert tuple(seen) == STAGES[:3]
    output = worker.sample_tokens()
    assert tuple(seen) == STAGES
    assert output.step_id == 3
    assert output.sampled == {9: expected_tokens([20, 21, 22], 1)}
    with pytest.raises(RuntimeError):
        worker.sample_tokens()


def test_buffers_are_allocated_once():
    worker = make_worker()
    first = worker.prepare_step_inputs(two_sequences()).token_ids
    plan = SchedulerOutputs(4, [9], ["r9"], [2], [1], [True])
    second = worker.prepare_step_inputs(plan).token_ids
    assert np.shares_memory(first, second)


def test_output_rows_find_their_request_in_any_order():
    forward = ForwardOutput(3, np.array([9, 2, 5], dtype=np.int32))
    assert output_rows(forward, np.array([2, 5, 9])).tolist() == [1, 2, 0]
    with pytest.raises(RuntimeError):
        output_rows(forward, np.array([2, 5, 8]))
    with pytest.raises(RuntimeError):
        output_rows(ForwardOutput(0, np.zeros(0, dtype=np.int32)), np.array([1]))
    prompts = [[1 + i, 2, 3] for i in range(7)]
    engine = make_engine()
    adapter_of(engine).reverse_rows = True
    outputs = run_prompts(engine, prompts, greedy(6, ignore_eos=True))
    assert outputs == [expected_tokens(p, 6, stops=()) for p in prompts]


def test_released_row_has_no_state_left():
    worker = make_worker(max_num_seqs=2)
    worker.prepare_step_inputs(two_sequences())
    plan = SchedulerOutputs(
        4,
        [9, 11],
        ["r9", "r11"],
        [3, 0],
        [2, 2],
        [True, True],
        new_seqs=[sequence(11, [1, 2])],
        new_blocks={9: [8], 11: [4]},
        released_seq_ids=[5, 77],
    )
    attention = worker.build_attention_metadata(worker.prepare_step_inputs(plan))
    assert attention.block_tables.tolist() == [[2, 8], [4, -1]]
    assert worker.batch.row_of.keys() == {9, 11}


def test_token_outside_its_blocks_is_an_error():
    worker = make_worker(block_size=4)
    plan = two_sequences()
    plan.new_blocks[5] = [7]
    with pytest.raises(InvalidInputError):
        worker.build_attention_metadata(worker.prepare_step_inputs(plan))


def test_profile_gives_the_time_of_each_stage():
    engine = make_engine()
    run_prompts(engine, [[1, 2]], greedy(4, ignore_eos=True))
    profile = engine.profile(reset=True)
    assert profile["steps"] == 4 and set(profile["stages"]) == set(STAGES)
    assert all(seconds > 0 for seconds in profile["stages"].values())
    assert 0 < profile["native_seconds"] < profile["step_seconds"]
    assert profile["outside_native_ms_per_step"] > 0
    assert engine.profile()["steps"] == 0


def test_profile_has_the_stages_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    resets = []

    def profile(reset: bool = False) -> dict[str, tuple[float, int]]:
        resets.append(reset)
        return {"forward": (1.5, 3)}

    monkeypatch.setattr(adapter_of(engine), "profile", profile)
    found = engine.profile(reset=True)
    assert found["stages"]["native_forward"] == 1.5 and found["counts"] == {"native_forward": 3}
    assert resets == [True]


def test_profile_does_not_count_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    adapter, resets, rows = adapter_of(engine), [], {"device": 7, "host": 2}

    def profile(reset: bool = False) -> dict[str, tuple[float, int]]:
        resets.append(reset)
        return {}

    monkeypatch.setattr(adapter, "profile", profile)
    monkeypatch.setattr(adapter, "sample_counts", lambda: dict(rows))
    engine.core.executor.worker.warmup()
    assert resets == [True]
    rows["host"] += 3
    assert engine.profile()["sample_counts"] == {"device": 0, "host": 3}


def test_warmup_leaves_no_sequence():
    engine = make_engine(warmup=True)
    assert adapter_of(engine).num_forwards == 1
    assert run_prompts(engine, [[1, 2]], greedy(4)) == [expected_tokens([1, 2], 4)]


def test_worker_has_its_rank_and_closes():
    worker = Worker(make_config(), local_rank=0, rank=0, distributed_init_method="tcp://x:1")
    assert (worker.rank, worker.local_rank, worker.is_driver_worker) == (0, 0, True)
    with pytest.raises(ClosedError):
        worker.check_health()
    worker.init_device()
    info = worker.load_model()
    assert info.num_blocks == 256 and info.max_model_len == 512 and info.vocab_size == VOCAB
    worker.check_health()
    worker.close()
    worker.close()
    with pytest.raises(ClosedError):
        worker.check_health()


def test_256_decoding_requests_reuse_the_buffers():
    """Steady decoding allocates no row, block table or buffer."""

    class Quick(FakeAdapter):
        def forward(self, step, attention):
            marked = np.flatnonzero(step.logits_mask)
            return ForwardOutput(len(marked), marked.astype(np.int32))

        def sample(self, sampling):
            return np.ones(len(sampling.rows), dtype=np.int32)

    engine = make_engine(
        adapter_class=Quick,
        num_blocks=8192,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
    )
    for index in range(256):
        engine.submit([1 + index % 200, 2, 3], greedy(40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    rows = engine.core.executor.worker.batch
    tokens, blocks = rows.tokens, rows.blocks
    for _ in range(20):
        engine.step()
        assert engine.core.steps[-1].num_decode_tokens == 256
    assert rows.tokens is tokens and rows.blocks is blocks
    run_all(engine)


def test_ranks_agree_on_the_smallest_number_of_blocks(monkeypatch):
    """Nothing is allocated before every rank has reported its KV blocks."""
    asked = []

    class Ranks(UniProcExecutor):
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            results = super().collective_rpc(method, timeout, args, kwargs)
            if method == "open_model":
                assert self.worker.adapter is None
                asked.extend(results)
                return [*results, 40, 70]
            return results

    executor = Ranks(make_config(num_blocks=256))
    assert asked == [256]
    assert executor.model_info.num_blocks == 40
    assert executor.worker.adapter.kv_capacity_tokens == 40 * 4
    executor.shutdown()


def test_opened_model_that_is_not_loaded_is_closed(monkeypatch):
    closed = []
    checkpoint = SimpleNamespace(close=lambda: closed.append(True))
    plain = worker_module.open_model
    opened = lambda *args: replace(plain(*args), checkpoint=checkpoint)  # noqa: E731
    monkeypatch.setattr(worker_module, "open_model", opened)
    worker = Worker(make_config())
    worker.open_model()
    worker.close()
    worker.close()
    assert closed == [True]
