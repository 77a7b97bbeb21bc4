"""Products with quantised weights against the gguf library: equal values of equal blocks.

test/cpp/test_ops_quant.cpp compares the kernels with their own reference over odd sizes.
"""

from __future__ import annotations

import numpy as np
import pytest
from error_helpers import naming
from gguf.quants import dequantize
from gguf_blocks import HALVES, kind_of, random_blocks
from native_helpers import Array, Natives, array, handle_array, op

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import LinearWeight, Tensor
from llaisys.models.tensors import tensor_from_blocks


def linear(x: Array, blocks: Array, dtype: str) -> Array:
    """Return x [m, k] times the weight of these rows of blocks."""
    shape = (len(blocks), x.shape[1])
    with Natives() as make:
        weight = make.keep(LinearWeight(make.keep(tensor_from_blocks(blocks, shape, dtype))))
        out = make.empty((len(x), len(blocks)), "f32")
        op("Linear", make(x, "f32"), None, 1, handle_array([weight]), None, handle_array([out]))
        return array(out)


@pytest.mark.parametrize("dtype", HALVES)
def test_values_match_the_gguf_library(dtype: str) -> None:
    rows, columns = 37, 256
    blocks = random_blocks(dtype, rows, columns)
    expected = np.asarray(dequantize(blocks, kind_of(dtype)), np.float32)
    ones = np.eye(columns, dtype=np.float32)  # each row picks one column of the weight
    got = linear(ones, blocks, dtype).T
    size = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * size)


@pytest.mark.parametrize("dtype", HALVES)
def test_product_error_is_within_8_bit_activations(dtype: str) -> None:
    rows, columns = 65, 512
    blocks = random_blocks(dtype, rows, columns)
    wide = np.asarray(dequantize(blocks, kind_of(dtype)), np.float64)
    x = np.random.default_rng(0).standard_normal((9, columns), np.float32)
    got = linear(x, blocks, dtype)
    expected = x.astype(np.float64) @ wide.T
    # The error of an activation is at most half a step of its group of 32: largest / 127.
    groups = np.abs(x).reshape(len(x), -1, 32).max(2).repeat(32, 1) / 127 / 2
    assert (np.abs(got - expected) <= groups @ np.abs(wide).T + 1e-4).all()


def test_row_with_a_partial_block_is_rejected() -> None:
    with naming(InvalidInputError, "32"):
        Tensor.create((2, 48), "q8_0")
