"""Random blocks of quantised GGUF types; the gguf library cannot write all of them."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llaisys.models.loading.convert import Array

# Byte offsets of the f16 values of a block.
HALVES = {
    "q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "q2_k": [80, 82], "q3_k": [108], "iq4_nl": [0],
}  # fmt: skip


def kind_of(dtype: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[dtype.upper()]


def random_blocks(dtype: str, rows: int, columns: int, largest: float = 0.1) -> Array:
    """uint8 [rows, bytes per row]; f16 values are at most `largest` in magnitude."""
    rng = np.random.default_rng([len(dtype), rows, columns])
    elements, size = GGML_QUANT_SIZES[kind_of(dtype)]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), np.uint8)
    for offset in HALVES[dtype]:
        scales = rng.uniform(-largest, largest, blocks.shape[:2]).astype("<f2")
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_k_m(name: str, shape: tuple[int, ...]) -> tuple[str, Array]:
    """llama.cpp's mix: more bits for the output matrix, half of the value and down projections."""
    is_wide = "embed" in name or "layers.0.self_attn.v" in name or "layers.0.mlp.down" in name
    kind = "q6_k" if is_wide else "q5_0" if "layers.1.mlp.up" in name else "q4_k"
    return kind.upper(), random_blocks(kind, *shape, largest=1e-2 if kind == "q5_0" else 1e-4)


def e4m3_values() -> Array:
    """Values of the 256 codes; NaN for 0x7f and 0xff."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6
    )
    values[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)
