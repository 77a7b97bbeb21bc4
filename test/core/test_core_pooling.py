"""Pooled hidden states through the C API, against a reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import BlockRow, MockModel, block_step

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.library import last_error, lib

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
LAST, MEAN = 1, 2


@pytest.fixture
def model() -> Iterator[MockModel]:
    with MockModel(max_batch_tokens=3) as made:
        yield made


def vector(model: MockModel, seq: int) -> Any:
    found = np.full(model.shape.hs + 1, np.inf, np.float32)
    model.pooled(seq, found.ctypes.data, model.shape.hs)
    assert np.isinf(found[-1])
    return found[:-1]


def marks_of(how: int) -> list[int]:
    return [0] * 7 + [LAST] if how == LAST else [MEAN] * 8


@pytest.mark.parametrize("how", [LAST, MEAN])
@pytest.mark.parametrize("logits", [[0] * 8, [0, 1] * 4, None], ids=["none", "some", "last"])
def test_embedding_is_the_mean_of_pooled_states(
    model: MockModel, how: int, logits: list[int] | None
) -> None:
    """Micro-batches of 3 tokens; pooling does not change logits."""
    states = model.shape.sequence_hidden(TOKENS)
    wanted = states[-1] if how == LAST else states.mean(axis=0)
    plain = model.run(TOKENS, marks=logits, seqs=[[5]] * 8)
    pooled = model.run(TOKENS, marks=logits, seqs=[[6]] * 8, pooling=marks_of(how))
    np.testing.assert_array_equal(pooled, plain)
    np.testing.assert_allclose(vector(model, 6), wanted, atol=2e-5)
    with naming(InvalidInputError, "seq_id 5"):
        vector(model, 5)


def test_embedding_is_independent_of_steps_and_batch(model: MockModel) -> None:
    model.run(TOKENS, seqs=[[0]] * 8, pooling=[MEAN] * 8)
    for token in TOKENS:
        model.run([token, 7], seqs=[[1], [2]], pooling=[MEAN, LAST])
    model.run(TOKENS[:5], seqs=[[3]] * 5, pooling=[MEAN] * 5)
    mixed = [[3], [4], [3], [4], [3]]
    model.run([TOKENS[5], 8, TOKENS[6], 2, TOKENS[7]], seqs=mixed, pooling=[2, 1, 2, 1, 2])
    expected = vector(model, 0)
    for seq in (1, 3):
        np.testing.assert_array_equal(vector(model, seq), expected)


def test_last_pooling_replaces_and_forget_restarts(model: MockModel) -> None:
    states = model.shape.sequence_hidden(TOKENS)
    model.run(TOKENS[:3], pooling=[MEAN] * 3)
    model.run(TOKENS[3:5], pooling=[LAST, MEAN])
    np.testing.assert_allclose(vector(model, 0), states[3:5].mean(axis=0), atol=2e-5)
    model.pool_forget(0)
    model.pool_forget(99)  # unknown
    model.run(TOKENS[5:], pooling=[MEAN] * 3)
    np.testing.assert_allclose(vector(model, 0), states[5:].mean(axis=0), atol=2e-5)


def test_block_step_is_pooled() -> None:
    with MockModel(
        kv_cache_layout=1, kv_cache_block_size=4, kv_cache_capacity_tokens=32, max_batch_tokens=3
    ) as model:
        row = BlockRow(seq=11, blocks=[5, 2], tokens=TOKENS, length=8)
        model.run(**block_step([row], 4), pooling=[MEAN] * 8)
        wanted = model.shape.sequence_hidden(TOKENS).mean(axis=0)
        np.testing.assert_allclose(vector(model, 11), wanted, atol=2e-5)


def test_rejected_step_pools_nothing(model: MockModel) -> None:
    model.run(TOKENS[:2], pooling=[MEAN] * 2)
    before = vector(model, 0)
    assert model.try_step([1, 2], pooling=[MEAN, 3]) == -1
    assert "pooling[1] must be in [0, 2], got 3" in last_error()
    assert model.try_step([1], seqs=[[0, 1]], pooling=[MEAN]) == -1
    assert "pooling[0] needs a token of one sequence, it has 2" in last_error()
    assert model.try_step([1, 10**6], pooling=[MEAN, MEAN]) == -1
    np.testing.assert_array_equal(vector(model, 0), before)


def test_invalid_arguments_are_rejected(model: MockModel) -> None:
    found = np.zeros(model.shape.hs, np.float32)
    model.run(TOKENS, pooling=[MEAN] * 8)
    assert lib().llaisysModelPooled(model.handle, 0, None, len(found)) == -1
    assert lib().llaisysModelPooled(model.handle, 0, found.ctypes.data, len(found) - 1) == -1
    assert f"n must be the hidden size, {len(found)}, got" in last_error()
    assert lib().llaisysModelPooled(None, 0, found.ctypes.data, len(found)) == -1
    assert lib().llaisysModelPoolForget(None, 0) == -1
