"""Sampling through a model handle: samples, histories, masks, bias, log-probabilities."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import MockModel

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplerKind
from llaisys.common.step import ROW_NUMBERS, SamplingMetadata
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import LlaisysLogprobs, LlaisysSamplingMetadata
from llaisys.models.native import _SAMPLING_DTYPES

PROMPT = [3, 1, 4, 1, 5]
N = len(PROMPT)


@pytest.fixture
def model() -> Iterator[MockModel]:
    """Return a model with a row for each token of the prompt."""
    with MockModel() as made:
        made.run(PROMPT, marks=[1] * N)
        yield made


def history(model: MockModel, call: str, seq: int, tokens: list[int]) -> None:
    values = np.asarray(tokens, np.int64)
    getattr(model, f"sampler_{call}")(seq, values.ctypes.data, len(values))


def test_greedy_is_the_argmax_and_rows_may_repeat(model: MockModel) -> None:
    best = model.logits().argmax(1).tolist()
    zero = [0.0] * N
    assert model.sample_rows(N, temperature=zero) == best
    rows = [4, 0, 0, 2]
    assert model.sample_rows(4, rows=rows, temperature=zero[:4]) == [best[r] for r in rows]
    assert model.sample_rows(0) == []
    assert model.sample_rows(N, top_k=[1] * N) == best


def test_sampling_depends_on_seed_choice_and_position(model: MockModel) -> None:
    def sample_one(seed: int, position: int, choice: int, row: int = 0) -> int:
        return model.sample_rows(
            1, rows=[row], seeds=[seed], positions=[position], choices=[choice], temperature=[3.0]
        )[0]

    keys = [(s, p, c) for s in (0, 1, 2**64 - 1) for p in range(8) for c in range(3)]
    first = [sample_one(*key) for key in keys]
    assert [sample_one(*key) for key in keys] == first
    assert len(set(first)) > 5
    together = model.sample_rows(
        len(keys), rows=[0] * len(keys), seeds=[k[0] for k in keys],
        positions=[k[1] for k in keys], choices=[k[2] for k in keys],
        temperature=[3.0] * len(keys),
    )  # fmt: skip
    assert together == first


def test_samples_follow_the_probabilities(model: MockModel) -> None:
    n = 4000
    logits = model.logits()[0].astype(np.float64) / 4.0
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    sampled = model.sample_rows(
        n, rows=[0] * n, temperature=[4.0] * n, seeds=np.arange(n), positions=[7] * n
    )
    counts = np.bincount(sampled, minlength=model.shape.voc)
    deviation = (counts - n * expected) / np.sqrt(n * expected * (1 - expected) + 1e-9)
    assert np.abs(deviation[n * expected > 5]).max() < 5


def test_masks_and_bias(model: MockModel) -> None:
    voc = model.shape.voc
    masks = np.zeros((2, (voc + 31) // 32), np.uint32)
    for mask, token in ((0, 35), (0, 2), (1, 7)):
        masks[mask, token // 32] |= np.uint32(1 << (token % 32))
    logits = model.logits()
    zero = [0.0] * N
    got = model.sample_rows(N, temperature=zero, mask_rows=[0, 1, -1, 0, 1], masks=masks)
    either = [35 if row[35] > row[2] else 2 for row in logits]
    assert got == [either[0], 7, int(logits[2].argmax()), either[3], 7]
    bias = {"bias_offsets": [0, 1, 1, 2, 2, 2], "bias_ids": [9, 11], "bias_values": [1e4, 1e4]}
    best = logits.argmax(1).tolist()
    assert model.sample_rows(N, temperature=zero, **bias) == [9, best[1], 11, best[3], best[4]]
    ban = {"bias_offsets": [0, 1], "bias_ids": [best[0]], "bias_values": [-np.inf]}
    assert model.sample_rows(1, temperature=[0.0], **ban) == [int(np.argsort(-logits[0])[1])]
    nothing = np.zeros((1, (voc + 31) // 32), np.uint32)
    with naming(InvalidInputError, "row 0"):
        model.sample_rows(1, mask_rows=[0], masks=nothing)


def test_histories(model: MockModel) -> None:
    logits = model.logits()[:1]
    order = np.argsort(-logits[0])
    best, second = int(order[0]), int(order[1])

    def greedy(**penalty: Any) -> int:
        return model.sample_rows(1, seq_ids=[5], temperature=[0.0], **penalty)[0]

    assert greedy(frequency_penalty=[1e3]) == best  # no history: empty
    history(model, "reset", 5, [best])
    assert greedy(frequency_penalty=[1e3]) == best  # prompt tokens do not count
    assert greedy(presence_penalty=[1e3]) == best
    assert greedy(repetition_penalty=[1e9]) == second  # prompt tokens count
    history(model, "accept", 5, [best])
    assert greedy(frequency_penalty=[1e3]) == second
    assert greedy(presence_penalty=[1e3]) == second
    assert model.sample_rows(1, temperature=[0.0], frequency_penalty=[1e3]) == [best]  # no seq_ids
    gap = float(logits[0, best] - logits[0, second])
    assert greedy(frequency_penalty=[gap * 0.6]) == best
    history(model, "accept", 5, [best])
    assert greedy(frequency_penalty=[gap * 0.6]) == second  # counted twice
    assert greedy(presence_penalty=[gap * 0.6]) == best  # counted once
    model.sampler_forget(5)
    model.sampler_forget(77)
    assert greedy(frequency_penalty=[1e3]) == best
    history(model, "reset", 5, [])
    for call in ("reset", "accept"):
        for bad in ([model.shape.voc], [-1]):
            with pytest.raises(InvalidInputError):
                history(model, call, 5, bad)
        with pytest.raises(InvalidInputError):
            history(model, call, -1, [1])
    assert lib().llaisysModelSamplerReset(model.handle, 0, None, 1) == -1
    assert lib().llaisysModelSamplerAccept(model.handle, 0, None, -1) == -1
    assert lib().llaisysModelSamplerForget(None, 0) == -1


def test_sampling_changes_neither_rows_nor_histories(model: MockModel) -> None:
    history(model, "reset", 1, [1, 2, 3])
    arguments: dict[str, Any] = {
        "seq_ids": [1] * N, "temperature": [0.9] * N, "repetition_penalty": [1.3] * N,
        "seeds": [11] * N, "n_logprobs": [2] * N,
    }  # fmt: skip
    before = model.logits().tobytes()
    first = model.sample_rows(N, **arguments)
    assert model.sample_rows(N, **arguments) == first
    assert model.logits().tobytes() == before


def logprobs(model: MockModel, row: int) -> tuple[int, list[int], list[float]]:
    found = model.logprobs(row)
    if found.n == 0:
        assert found.ids is None or found.logprobs is None
        return 0, [], []
    ids = list((ctypes.c_int32 * found.n).from_address(found.ids))
    return found.sampled_rank, ids, list((ctypes.c_float * found.n).from_address(found.logprobs))


def test_logprobs_are_of_the_raw_distribution(model: MockModel) -> None:
    logits = model.logits().astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    bias = {"bias_offsets": [0, 1, 1, 1, 1], "bias_ids": [9], "bias_values": [1e4]}
    sampled = model.sample_rows(
        4, temperature=[0.0, 0.0, 2.0, 2.0], top_k=[1, 0, 0, 3], n_logprobs=[0, 3, 37, -1], **bias
    )
    assert sampled[0] == 9
    for row, count in ((0, 1), (1, 4), (2, 38)):
        rank, ids, values = logprobs(model, row)
        assert len(ids) == count and ids[0] == sampled[row]
        assert rank == 1 + int((logits[row] > logits[row, sampled[row]]).sum())
        assert ids[1:] == np.argsort(-logits[row], kind="stable")[: count - 1].tolist()
        np.testing.assert_allclose(values, expected[row, ids], atol=1e-4)
    assert logprobs(model, 3) == (0, [], [])
    for row in (-1, 4):
        with pytest.raises(InvalidInputError):
            model.logprobs(row)


@pytest.mark.parametrize(
    ("words", "arrays"),
    [
        ("rows[0] must be in [0, 5), got 5", {"rows": [5, 0]}),
        ("rows[1]", {"rows": [0, -1]}),
        ("seq_ids[0]", {"seq_ids": [-1, 0]}),
        ("temperature[1]", {"temperature": [1.0, -0.5]}),
        ("temperature[0]", {"temperature": [np.nan, 0]}),
        ("temperature[0]", {"temperature": [np.inf, 0]}),
        ("top_p[0]", {"top_p": [0.0, 1]}),
        ("top_p[1]", {"top_p": [1, 1.01]}),
        ("top_p[1]", {"top_p": [1, np.nan]}),
        ("min_p[0]", {"min_p": [-0.1, 0]}),
        ("repetition_penalty[0]", {"repetition_penalty": [0, 1]}),
        ("presence_penalty[0]", {"presence_penalty": [np.inf, 1]}),
        ("frequency_penalty[1]", {"frequency_penalty": [1, np.nan]}),
        ("top_k[0]", {"top_k": [-1, 0]}),
        ("positions[0]", {"positions": [-1, 0]}),
        ("choices[0]", {"choices": [-1, 0]}),
        ("n_logprobs[0]", {"n_logprobs": [-2, 0]}),
        ("n_logprobs[1]", {"n_logprobs": [0, 38]}),
        ("chain_offsets", {"chain_offsets": [1, 1, 1], "chain": [0]}),
        ("chain_offsets", {"chain_offsets": [0, 1, 0], "chain": [0]}),
        ("chain is NULL", {"chain_offsets": [0, 1, 1]}),
        ("chain[0]", {"chain_offsets": [0, 1, 1], "chain": [len(SamplerKind)]}),
        ("chain[1]", {"chain_offsets": [0, 2, 2], "chain": [1, 1]}),
        ("bias_offsets", {"bias_offsets": [0, -1, 0], "bias_ids": [0], "bias_values": [0]}),
        ("bias_ids is NULL", {"bias_offsets": [0, 1, 1], "bias_values": [0]}),
        ("bias_ids[0]", {"bias_offsets": [0, 1, 1], "bias_ids": [37], "bias_values": [0]}),
        ("bias_values[0]", {"bias_offsets": [0, 1, 1], "bias_ids": [3], "bias_values": [np.nan]}),
        ("mask_rows[0]", {"mask_rows": [0, -1]}),
        ("mask_rows[1]", {"mask_rows": [-1, -2]}),
    ],
)
def test_invalid_sampling_is_rejected(model: MockModel, words: str, arrays: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        model.sample_rows(2, **arrays)
    assert words in str(caught.value)
    assert len(model.sample_rows(N)) == N


def test_invalid_counts_and_pointers_are_rejected(model: MockModel) -> None:
    sample = lib().llaisysModelSample
    ids = np.full(8, -7, np.int32)
    size = ctypes.sizeof(LlaisysSamplingMetadata)
    good = LlaisysSamplingMetadata(struct_size=size, n_rows=1)
    assert sample(None, ctypes.byref(good), ids.ctypes.data) == -1
    assert sample(model.handle, None, ids.ctypes.data) == -1
    assert sample(model.handle, ctypes.byref(good), None) == -1
    for fields in ({"n_rows": -1}, {"n_rows": 6}, {"n_rows": 2147483647}, {"n_masks": -1},
                   {"n_numbers": -1}, {"n_numbers": 1}, {"struct_size": 4}):  # fmt: skip
        bad = LlaisysSamplingMetadata(**({"struct_size": size, "n_rows": 1} | fields))
        assert sample(model.handle, ctypes.byref(bad), ids.ctypes.data) == -1
        assert lib().llaisysLastError()
    assert (ids == -7).all()
    assert lib().llaisysModelLogprobs(model.handle, 0, None) == -1
    assert lib().llaisysModelLogprobs(None, 0, ctypes.byref(LlaisysLogprobs())) == -1


def test_sampling_after_a_failed_step_is_rejected(model: MockModel) -> None:
    assert model.try_step([99]) == -1
    with naming(InvalidInputError, "n_rows"):
        model.sample_rows(1)


def test_logprobs_are_discarded_by_the_next_step(model: MockModel) -> None:
    model.sample_rows(1, n_logprobs=[2])
    model.run([1])
    with pytest.raises(InvalidInputError):
        model.logprobs(0)


def test_adapter_passes_every_array_of_the_metadata() -> None:
    names = {field.name for field in dataclasses.fields(SamplingMetadata)}
    assert set(_SAMPLING_DTYPES) == names - {"numbers"}


def test_both_sides_have_the_same_numbers_and_neutral_values(model: MockModel) -> None:
    with pytest.raises(InvalidInputError) as caught:
        model.sample_rows(1, heat=[1.0])
    known = re.search(r"one of (.*), got heat", str(caught.value))
    assert known is not None and set(known[1].split(", ")) == set(ROW_NUMBERS)
    arguments: dict[str, Any] = {"seeds": [11] * N, "positions": range(N), "n_logprobs": [2] * N}
    sampled = model.sample_rows(N, **arguments)
    for name, neutral in ROW_NUMBERS.items():
        assert model.sample_rows(N, **({name: [neutral] * N} | arguments)) == sampled, name
