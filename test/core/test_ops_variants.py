"""Operators of families other than Llama against NumPy: RoPE of some pairs, attention with sinks
and soft caps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from attention_case import make_case
from error_helpers import naming
from native_helpers import REALS, Natives, array, assert_close, normal, op, rounded

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import Stream


@pytest.mark.parametrize("dtype", REALS)
def test_pairs_with_frequency_zero_are_copied(dtype: str) -> None:
    x = rounded(normal(3, 2, 12), dtype)
    frequencies = np.array([1.0, 0.0, 0.25, 0.0, 0.0, 1e-3], np.float32)
    with Natives() as native:
        out = native.empty(x.shape, dtype)
        positions = native(np.array([0, 7, 100000]), "i64")
        op("Rope", out, native(x, dtype), positions, native(frequencies, "f32"))
        kept = np.flatnonzero(frequencies == 0)
        got = array(out)
        np.testing.assert_array_equal(got[..., kept], x[..., kept])
        np.testing.assert_array_equal(got[..., kept + 6], x[..., kept + 6])
        assert (got[1:, :, 0] != x[1:, :, 0]).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_attention_with_a_soft_cap(kv_dtype: str) -> None:
    for length, heads, d in ((1, 4, 6), (65, 4, 33), (130, 14, 64), (1100, 2, 256)):
        case = make_case((length, 70), 5, heads, 2, d, 4, dtypes=("f32", kv_dtype, "f32"))
        case.scale, case.soft_cap = 1.0, 3.0
        with Stream(n_threads=2) as stream:
            capped = case.run(stream=stream)
        assert_close(capped, case.reference(), *case.rounding(64))
        case.soft_cap = 0.0
        assert np.abs(case.run() - capped).max() > 1e-2 or length == 1


@pytest.mark.parametrize("dtypes", list(product(REALS, REALS, REALS)))
def test_attention_with_sinks(dtypes: tuple[str, str, str]) -> None:
    for length, heads, d, window in (
        (1, 4, 6, 0),
        (65, 6, 33, 9),
        (130, 14, 64, 0),
        (1100, 2, 8, 0),
    ):
        case = make_case((length, 70), 5, heads, 2, d, 4, dtypes=dtypes, window=window)
        case.sinks = (normal(heads) * 3).astype(np.float32)
        case.sinks[0], case.sinks[-1] = -200.0, 30.0  # no effect, and nearly all of the weight
        case.seen[2] = (case.seen[2][0], 1, 1)  # nothing visible
        for threads in (1, 3):
            with Stream(n_threads=threads) as stream:
                assert_close(case.run(stream=stream), case.reference(), *case.rounding(32))
        case.soft_cap = 2.0
        assert_close(case.run(), case.reference(), *case.rounding(64))


def test_a_sink_above_every_score_does_not_overflow() -> None:
    case = make_case((20,), 3, 2, 1, 8)
    case.sinks = np.array([1e6, -1e6], np.float32)
    got = case.run()
    assert (got[:, 0] == 0).all()
    assert_close(got, case.reference(), "f32", 16)


def test_attention_rejects_other_sinks() -> None:
    case = make_case((5,), 1, 4, 2, 8)
    case.sinks = np.zeros(3, np.float32)
    with naming(InvalidInputError, "attention: sinks"):
        case.run()
