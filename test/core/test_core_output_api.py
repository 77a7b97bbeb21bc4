"""Output rows of a step: number, tokens, addresses and lifetime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from native_helpers import BlockRow, MockModel, Shape, address, block_step

from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import LlaisysBatch, LlaisysStepInput

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def model() -> Iterator[MockModel]:
    with MockModel(max_batch_tokens=3) as made:
        yield made


def test_no_rows_before_the_first_step(model: MockModel) -> None:
    assert model.n_outputs == 0
    assert lib().llaisysModelGetLogits(model.handle) is None
    assert lib().llaisysModelGetLogitsIth(model.handle, 0) is None
    assert lib().llaisysModelGetHidden(model.handle) is None


@pytest.mark.parametrize(
    "marks",
    [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, -1, 0, 127],  # any value except 0 is a mark
        [0, 0, 0, 1, 1, 1, 0, 0],
    ],
)
def test_rows_are_the_marked_tokens_in_order(model: MockModel, marks: list[int]) -> None:
    """Micro-batches of 3 tokens, some without outputs."""
    expected = model.shape.sequence_logits(TOKENS)
    got = model.run(TOKENS, marks=marks)
    marked = [i for i, mark in enumerate(marks) if mark]
    assert model.output_ids() == marked
    np.testing.assert_allclose(got, expected[marked], atol=2e-4)


def test_default_is_one_row_for_the_last_token(model: MockModel) -> None:
    got = model.run(TOKENS)
    assert model.output_ids() == [7]
    np.testing.assert_allclose(got, model.shape.sequence_logits(TOKENS)[7:], atol=2e-4)


def test_zero_outputs(model: MockModel) -> None:
    model.run(TOKENS)
    assert model.run(TOKENS, marks=[0] * 8, seqs=[[1]] * 8).shape == (0, model.shape.voc)
    assert model.n_outputs == 0
    assert lib().llaisysModelGetLogits(model.handle) is None
    assert lib().llaisysModelGetLogitsIth(model.handle, 0) is None
    assert model.kv_seq_pos_max(1) == 7  # the step ran


def test_row_pointers_point_into_one_matrix(model: MockModel) -> None:
    model.run(TOKENS, marks=[1, 0, 1, 0, 1, 0, 1, 0])
    base = lib().llaisysModelGetLogits(model.handle)
    for i in range(4):
        row = lib().llaisysModelGetLogitsIth(model.handle, i)
        assert row == base + i * model.shape.voc * 4
    for i in (-1, 4, 2147483647, -2147483648):
        assert lib().llaisysModelGetLogitsIth(model.handle, i) is None


def test_pointers_and_values_are_stable_until_the_next_step(model: MockModel) -> None:
    before = model.run(TOKENS, marks=[1] * 8)
    pointers = (model.logits_address, model.output_ids_address)
    model.sample_rows(8, temperature=[0.7] * 8, n_logprobs=[3] * 8)
    model.kv_stats()
    model.kv_dump()
    model.kv_seq_cp(5, 0, -1, -1)
    model.kv_seq_add(0, 0, -1, 3)
    model.kv_seq_rm(5, -1, -1)
    assert (model.logits_address, model.output_ids_address) == pointers
    assert model.logits().tobytes() == before.tobytes()
    assert model.output_ids() == list(range(8))


def test_smaller_step_does_not_expose_older_rows(model: MockModel) -> None:
    model.run(TOKENS, marks=[1] * 8)
    got = model.run([2], seqs=[[1]])
    assert model.output_ids() == [0]
    np.testing.assert_allclose(got, model.shape.sequence_logits([2]), atol=2e-4)


def fail_with_bad_token(model: MockModel) -> int:
    return model.try_step([0, 99])


def fail_without_room(model: MockModel) -> int:
    return model.try_step([0] * 600)


def fail_with_struct_size(model: MockModel) -> int:
    return model.try_step([0], struct_size=4)


def fail_with_null(model: MockModel) -> int:
    return int(lib().llaisysModelStep(model.handle, None))


def fail_with_count(model: MockModel) -> int:
    return model.try_step([0], n_tokens=-1)


def fail_in_decode(model: MockModel) -> int:
    return int(lib().llaisysModelDecode(model.handle, LlaisysBatch(n_tokens=0)))


def fail_in_decode_with_a_missing_list(model: MockModel) -> int:
    token, lists = np.zeros(1, np.int64), np.zeros(1, np.int64)
    batch = LlaisysBatch(n_tokens=1, token=address(token), seq_id=address(lists))
    return int(lib().llaisysModelDecode(model.handle, batch))


@pytest.mark.parametrize(
    "failing",
    [
        fail_with_bad_token,
        fail_without_room,
        fail_with_struct_size,
        fail_with_null,
        fail_with_count,
        fail_in_decode,
        fail_in_decode_with_a_missing_list,
    ],
)
def test_failed_step_has_no_rows(model: MockModel, failing: object) -> None:
    model.run(TOKENS, marks=[1] * 8)
    dump, stats = model.kv_dump(), bytes(model.kv_stats())
    assert failing(model) != 0  # type: ignore[operator]
    assert model.n_outputs == 0
    assert lib().llaisysModelGetLogits(model.handle) is None
    assert lib().llaisysModelGetLogitsIth(model.handle, 0) is None
    assert (model.kv_dump(), bytes(model.kv_stats())) == (dump, stats)
    got = model.run([7])  # the model continues
    np.testing.assert_allclose(got[0], model.shape.sequence_logits([*TOKENS, 7])[8], atol=2e-4)


def test_failed_block_step_has_no_rows() -> None:
    with MockModel(Shape(), kv_cache_layout=1, kv_cache_block_size=4) as model:
        row = BlockRow(seq=0, blocks=[2, 5], tokens=TOKENS, length=8)
        model.run_blocks([row], marks=[1] * 8)
        assert model.output_ids() == list(range(8))
        good = block_step([row], 4)
        assert model.try_step(**(good | {"slot_mapping": [0] * 8})) == -1
        assert model.n_outputs == 0


def test_null_models() -> None:
    native = lib()
    assert native.llaisysModelNOutputs(None) == -1
    assert native.llaisysModelOutputIds(None) is None
    assert native.llaisysModelGetLogits(None) is None
    assert native.llaisysModelGetLogitsIth(None, 0) is None
    assert native.llaisysModelGetHidden(None) is None
    step = LlaisysStepInput(struct_size=ctypes.sizeof(LlaisysStepInput))
    assert native.llaisysModelStep(None, ctypes.byref(step)) == -1
    assert native.llaisysModelDecode(None, LlaisysBatch()) == -1
