"""Errors of a model handle: each names the cause and changes nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import BlockRow, KvStatus, MockModel, Shape, block_step, create_params

from llaisys.common.errors import InvalidInputError, LlaisysError, NativeError
from llaisys.libllaisys import types
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import LlaisysBatch

BLOCK = {"kv_cache_layout": 1, "kv_cache_block_size": 4}


@pytest.fixture
def model() -> Iterator[MockModel]:
    with MockModel() as made:
        yield made


# -- Creation -------------------------------------------------------------------------------------


def error_of(words: str, code: int = types.ERROR_INVALID, meta: Any = None, **fields: Any) -> None:
    shape = Shape()
    with pytest.raises(LlaisysError, match=words) as caught:
        Model(create_params(shape.meta(**(meta or {})), **fields)).close()
    if code == types.ERROR_INVALID:
        assert isinstance(caught.value, InvalidInputError)
    else:
        assert isinstance(caught.value, NativeError) and caught.value.code == code


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("model_type", {"model_type": "unknown"}),
        ("ndevice", {"ndevice": -1}),
        ("ndevice", {"ndevice": 2147483647}),
        ("device_ids", {"ndevice": 1}),
        ("kv_cache_layout", {"kv_cache_layout": 2}),
        ("kv_cache_block_size", {"kv_cache_block_size": -1}),
        ("kv_cache_block_size", {"kv_cache_block_size": 5000}),
        ("max_model_len", {"max_model_len": -1}),
        ("max_model_len", {"max_model_len": 513}),
        ("kv_cache_capacity_tokens", {"kv_cache_capacity_tokens": -1}),
        ("kv_cache_capacity_tokens", {"kv_cache_capacity_tokens": 1 << 40}),
        ("kv_cache_dtype", {"kv_cache_dtype": 5}),
        ("kv_cache_dtype", {"kv_cache_dtype": 99}),
        ("max_batch_tokens", {"max_batch_tokens": -1}),
        ("n_threads", {"n_threads": -1}),
        ("pipeline_parallel_size", {"pipeline_parallel_size": 65}),
        ("world_size", {"pipeline_parallel_size": 2}),
        ("tensor_parallel_size", {"tensor_parallel_size": 65, "world_size": 65}),
        ("world_size", {"tensor_parallel_size": 2, "world_size": 3}),
        ("local_rank", {"local_rank": 1}),
        ("local_rank", {"local_rank": -1}),
    ],
)
def test_invalid_parameters_are_rejected(words: str, fields: dict[str, Any]) -> None:
    error_of(f"params.{words}", **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", 0), ("dtype", 5), ("nlayer", 0), ("nlayer", 2), ("hs", 0), ("hs", 23), ("nh", 0),
        ("nh", 3), ("nkvh", 0), ("nkvh", 3), ("dh", 5), ("dh", 0), ("di", 0), ("maxseq", 0),
        ("maxseq", 1 << 60), ("voc", 0), ("voc", 1 << 62), ("epsilon", 0.0),
        ("epsilon", float("nan")), ("theta", -1.0), ("theta", float("inf")), ("sliding_window", -1),
        ("rope_attention_factor", -1.0), ("rope_attention_factor", float("nan")),
    ],
)  # fmt: skip
def test_invalid_hyper_parameters_are_rejected(name: str, value: Any) -> None:
    error_of("meta.", meta={name: value})


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_invalid_rope_divisors_are_rejected(value: float) -> None:
    divisors = (ctypes.c_float * (Shape().dh // 2))(1.0, value)
    error_of(r"meta\.rope_divisors\[1\]", meta={"rope_divisors": ctypes.addressof(divisors)})


def test_unsupported_features_are_rejected() -> None:
    error_of("nvidia", types.ERROR_UNSUPPORTED, device=1)
    error_of("one rank", types.ERROR_UNSUPPORTED, tensor_parallel_size=2, world_size=2)
    error_of("'slurm'", types.ERROR_UNSUPPORTED, distributed_executor_backend=b"slurm")


def test_null_and_wrong_struct_size() -> None:
    assert lib().llaisysModelCreate(None) is None
    assert b"params is NULL" in lib().llaisysLastError()
    params = create_params(Shape().meta())
    params.struct_size -= 4
    assert lib().llaisysModelCreate(ctypes.byref(params)) is None
    assert b"struct_size" in lib().llaisysLastError()
    assert lib().llaisysModelCreate(ctypes.byref(create_params(None))) is None
    assert b"params.meta is NULL" in lib().llaisysLastError()
    assert lib().llaisysModelParams(None, ctypes.byref(params)) == -1
    assert lib().llaisysModelWeights(None) is None
    assert lib().llaisysModelType(None) == 0


# -- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("n_tokens must be at least 1, got 0", {"tokens": []}),
        ("n_tokens must be at least 1, got -1", {"tokens": [1], "n_tokens": -1}),
        ("token_ids[1] must be in [0, 37), got 37", {"tokens": [0, 37]}),
        ("token_ids[0] must be in [0, 37), got -1", {"tokens": [-1]}),
        ("token_ids and embd are both NULL", {"tokens": None, "n_tokens": 1}),
        ("positions[0] must be in [0, 512), got -1", {"tokens": [1], "positions": [-1]}),
        ("positions[0] must be in [0, 512), got 512", {"tokens": [1], "positions": [512]}),
        ("positions[1] must be above 3", {"tokens": [1, 1], "positions": [3, 3]}),
        ("must not be negative, got -1", {"tokens": [1], "seqs": [[-1]]}),
        ("names sequence 4 twice", {"tokens": [1], "seqs": [[4, 2, 4]]}),
        ("n_seq_id[0] must be", {"tokens": [1, 1], "seqs": [[], [1, 2]]}),
        ("n_seq_ids must be the sum", {"tokens": [1], "seqs": [[1]], "n_seq_ids": 2}),
        ("struct_size", {"tokens": [1], "struct_size": 8}),
    ],
)
def test_invalid_steps_are_rejected(
    model: MockModel, words: str, arguments: dict[str, Any]
) -> None:
    model.run([3, 1], seqs=[[8]] * 2)
    before = (model.kv_dump(), bytes(model.kv_stats()))
    assert model.try_step(**arguments) == -1
    assert words in lib().llaisysLastError().decode()
    assert (model.kv_dump(), bytes(model.kv_stats())) == before
    assert model.n_outputs == 0


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("positions is NULL", {"positions": None}),
        ("n_seq must be at least 1", {"n_seq": 0}),
        ("block_table_width", {"block_table_width": 0}),
        ("slot_mapping is NULL", {"slot_mapping": None}),
        ("context_lens is NULL", {"context_lens": None}),
        ("batch_seq_ids is NULL", {"batch_seq_ids": None}),
        ("block_tables is NULL", {"block_tables": None}),
        ("slot_mapping[1] must be 9", {"slot_mapping": [8, 10, 10]}),
        ("slot_mapping[0] must be in", {"slot_mapping": [-1, 9, 10]}),
        ("context_lens[0]", {"context_lens": [0]}),
        ("context_lens[0]", {"context_lens": [5]}),
        ("positions[2] must be in [0, 2)", {"context_lens": [2]}),
        ("batch_seq_ids[0]", {"batch_seq_ids": [-1]}),
        ("seq_ids[0] must be one of", {"batch_seq_ids": [3]}),
        ("block_tables[0][0] must be in [0, 128)", {"block_tables": [[128]]}),
        ("block_tables[0][0]", {"block_tables": [[-1]]}),
        ("n_seq_id must be 1", {"seqs": [[6], [6, 7], [6]]}),
    ],
)
def test_invalid_block_steps_are_rejected(words: str, changes: dict[str, Any]) -> None:
    with MockModel(**BLOCK) as model:
        good = block_step([BlockRow(6, [2], [1, 2, 3], 3)], 4)
        given = good | changes
        given = {name: value for name, value in given.items() if value is not None}
        assert model.try_step(**given) == -1
        assert words in lib().llaisysLastError().decode()
        assert model.try_step(**good) == 0
        assert model.kv_seq_rm(6, 0, -1) == KvStatus.INTERNAL_ERROR
        assert "BLOCK layout" in lib().llaisysLastError().decode()
        assert model.kv_seq_pos_max(6) == model.kv_seq_pos_min(6) == -1
        assert "BLOCK" in model.kv_dump()


def test_slot_cannot_be_written_twice_in_a_step() -> None:
    with MockModel(**BLOCK) as model:
        rows = [BlockRow(0, [2], [1], 1), BlockRow(1, [2], [1], 1)]
        assert model.try_step(**block_step(rows, 4)) == -1
        assert "second time" in lib().llaisysLastError().decode()
        assert model.kv_stats().used_slots == 0
        rows = [BlockRow(0, [2], [1], 1), BlockRow(0, [3], [1], 1)]
        assert model.try_step(**block_step(rows, 4)) == -1
        rows = [BlockRow(0, [2], [1, 4], 2), BlockRow(1, [3], [1], 1)]
        model.run_blocks(rows)
        stats = model.kv_stats()
        assert (stats.used_slots, stats.peak_used_slots, stats.n_sequences) == (3, 3, 2)


# -- Batches and slots ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 1), (-1, 0, 1), (1, -1, 1), (1, 0, 0), (2147483647, 2147483647, 1),
     (2147483647, 0, 2147483647)],
)  # fmt: skip
def test_invalid_batch_sizes_give_an_empty_batch(sizes: tuple[int, int, int]) -> None:
    batch = lib().llaisysBatchInit(*sizes)
    assert bytes(batch) == bytes(LlaisysBatch())
    lib().llaisysBatchFree(batch)


def test_batch_get_one_without_tokens() -> None:
    one = ctypes.c_int64()
    assert lib().llaisysBatchGetOne(None, 3).n_tokens == 0
    assert lib().llaisysBatchGetOne(ctypes.byref(one), -3).n_tokens == 0


def test_slot_calls_check_their_arguments(model: MockModel) -> None:
    one, bad = np.zeros(1, np.int32), np.array([512], np.int32)
    with pytest.raises(InvalidInputError):
        model.kv_copy_slots(one.ctypes.data, one.ctypes.data, 1)
    with pytest.raises(InvalidInputError):
        model.kv_shift_slots(one.ctypes.data, one.ctypes.data, 1)
    with MockModel(**BLOCK) as block:
        delta = np.zeros(1, np.int64)
        with naming(InvalidInputError, "src[0]"):
            block.kv_copy_slots(bad.ctypes.data, one.ctypes.data, 1)
        with naming(InvalidInputError, "dst[0]"):
            block.kv_copy_slots(one.ctypes.data, (-one - 1).ctypes.data, 1)
        with naming(InvalidInputError, "slots[0]"):
            block.kv_shift_slots(bad.ctypes.data, delta.ctypes.data, 1)
        for n, words in ((-1, "negative"), (1, "NULL")):
            with pytest.raises(InvalidInputError, match=words):
                block.kv_copy_slots(0, 0, n)
            with pytest.raises(InvalidInputError, match=words):
                block.kv_shift_slots(0, 0, n)
        block.kv_copy_slots(0, 0, 0)
        block.kv_shift_slots(0, 0, 0)


def test_host_block_calls_check_their_arguments(model: MockModel) -> None:
    one = np.zeros(1, np.int32)
    with pytest.raises(InvalidInputError):
        model.kv_reserve_host(1)
    with MockModel(**BLOCK) as block:
        for move in (block.kv_to_host, block.kv_from_host):
            with pytest.raises(InvalidInputError):
                move(one.ctypes.data, one.ctypes.data, 1)
            move(0, 0, 0)
        with naming(InvalidInputError, "n_blocks"):
            block.kv_reserve_host(-1)
        block.kv_reserve_host(2)
        for move in (block.kv_to_host, block.kv_from_host):
            for n, words in ((-1, "negative"), (1, "NULL")):
                with pytest.raises(InvalidInputError, match=words):
                    move(0, 0, n)
            with naming(InvalidInputError, "blocks[0]"):
                move((one + 128).ctypes.data, one.ctypes.data, 1)
            with naming(InvalidInputError, "host_slots[0]"):
                move(one.ctypes.data, (one + 2).ctypes.data, 1)
        block.kv_reserve_host(0)
        with pytest.raises(InvalidInputError):
            block.kv_to_host(one.ctypes.data, one.ctypes.data, 1)
