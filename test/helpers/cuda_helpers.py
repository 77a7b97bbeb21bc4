"""Tensors of a device, quantised weights and engines, for comparisons of GPU and CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from gguf_blocks import e4m3_values, kind_of, random_blocks
from model_files import tiny_config
from native_helpers import REALS, Array, from_bits, op, to_bits

from llaisys import LLM, SamplingParams
from llaisys.libllaisys.handles import LinearWeight, Stream, Tensor
from llaisys.models.loading.grouped_weight import GroupedWeight

IS_SMALL = "LLAISYS_SMALL_SHAPES" in os.environ  # for compute-sanitizer: scripts/check_gpu.sh
NUMPY = {"i64": np.int64, "i32": np.int32, "u8": np.uint8}


class Side:
    """Tensors of one device, freed at the end of a `with` block."""

    def __init__(self, device: str, stream: Stream) -> None:
        self.device, self.stream = device, stream
        self._open = ExitStack()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def keep(self, item: Any) -> Any:
        return self._open.enter_context(item)

    def tensor(self, values: Array, dtype: str) -> Tensor:
        stored = (
            to_bits(values, dtype)
            if dtype in REALS
            else np.ascontiguousarray(values, dtype=NUMPY[dtype])
        )
        made: Tensor = self.keep(Tensor.create(np.shape(values), dtype, self.device))
        made.load(stored.ctypes.data, stored.nbytes)
        return made

    def strided(self, values: Array, dtype: str, gap: int) -> Tensor:
        """The values with `gap` columns of NaN between the rows."""
        wide = np.full((*values.shape[:-1], values.shape[-1] + gap), np.nan, np.float32)
        wide[..., : values.shape[-1]] = values
        view: Tensor = self.keep(
            self.tensor(wide, dtype).slice(values.ndim - 1, 0, values.shape[-1])
        )
        return view

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        fill = np.full(shape, np.nan if dtype in REALS else 77)
        return self.tensor(fill, dtype)

    def weight(self, values: Array, dtype: str) -> LinearWeight:
        made: LinearWeight = self.keep(LinearWeight(self.tensor(values, dtype), self.stream))
        return made

    def run(self, name: str, *arguments: Any) -> None:
        op(name, *arguments, stream=self.stream)
        self.stream.synchronize()

    def array(self, source: Tensor) -> Array:
        dtype = source.dtype
        with source.contiguous() as dense:
            bits = np.empty(
                dense.shape,
                {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, **NUMPY}[dtype],
            )
            dense.store(bits.ctypes.data, bits.nbytes)
        return from_bits(bits, dtype) if dtype in REALS else bits


PROMPTS = [[5, 9, 2, 77, 31], list(range(3, 90)), [11] * 33, [8], list(range(200, 17, -1))]


def shape(dtype: str) -> dict[str, Any]:
    """Shape that takes the fast kernels in 16 bits: head_dim 64, K a multiple of 8."""
    return tiny_config(
        hidden_size=256, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        intermediate_size=360, vocab_size=1000, num_hidden_layers=3, torch_dtype=dtype,
        max_position_embeddings=1024,
    )  # fmt: skip


def tokens(model: Path, device: str, dtype: str, **changes: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "num_kv_blocks": 200} | changes
    with LLM(str(model), **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


def matching(ours: list[list[int]], reference: list[list[int]]) -> float:
    """Share of the tokens before the first difference of each answer."""
    first = [int(np.argmin([a == b for a, b in zip(x, y, strict=True)] + [False]))
             for x, y in zip(ours, reference, strict=True)]  # fmt: skip
    return sum(first) / sum(len(x) for x in reference)


GROUPED = {"i4_g32": (4, 32), "i4_g128": (4, 128), "i8_g32": (8, 32), "i8_g128": (8, 128)}
F8 = ("f8 by row", "f8 by block")


def f8_blocks(rows: int, columns: int, by_row: bool) -> tuple[Array, Array]:
    """(blocks of f8_g128, values)."""
    rng = np.random.default_rng([rows, columns])
    codes = rng.integers(0, 256, (rows, columns // 128, 128), np.uint8)
    codes[(codes & 127) == 127] = 0
    scales = rng.uniform(0.001, 0.01, (rows, 1 if by_row else columns // 128)).astype("<f4")
    scales = np.broadcast_to(scales, codes.shape[:2]).copy()
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes], axis=2)
    values = e4m3_values()[codes] * scales[..., None]
    return blocks.reshape(rows, -1), values.reshape(rows, columns)


def random_weight(kind: str, rows: int, columns: int) -> tuple[str, Array, Array]:
    """(dtype, rows of blocks, values)."""
    if kind in F8:
        return "f8_g128", *f8_blocks(rows, columns, kind == F8[0])
    if kind in GROUPED:
        bits, group = GROUPED[kind]
        rng = np.random.default_rng([rows, columns])
        weight = GroupedWeight(
            rng.integers(0, 256, (rows, columns * bits // 8), np.uint8),
            rng.uniform(0.001, 0.01, (rows, columns // group)).astype(np.float32),
            rng.integers(0, 16, (rows, columns // group)).astype(np.int16),
            bits,
            group,
        )
        return kind, weight.blocks("w").rows, weight.values()
    blocks = random_blocks(kind, rows, columns, largest=0.02)
    return kind, blocks, np.asarray(dequantize(blocks, kind_of(kind)), np.float32)


ATTENTION = [
    # sequence lengths, query tokens of each, heads, KV heads, head_dim, block size, window
    ((1,), 1, 1, 1, 64, 1, 0),
    ((5, 130, 17), 1, 6, 2, 128, 16, 0),
    ((1100, 1, 64), 1, 12, 2, 128, 16, 0),
    ((2000,), 1, 7, 1, 128, 16, 0),
    ((65, 300), 1, 14, 1, 64, 1, 100),
    ((130, 63, 200), 33, 6, 2, 128, 16, 0),
    ((700,), 130, 4, 4, 64, 32, 200),
    ((512, 90), 64, 28, 4, 128, 1, 0),
    ((40, 7), 3, 5, 5, 10, 4, 0),
    ((33,), 2, 40, 2, 64, 16, 0),
    ((127, 128, 129), 129, 12, 2, 128, 16, 0),
    ((1031,), 500, 7, 1, 128, 16, 0),
    ((900,), 300, 16, 1, 64, 16, 333),
    ((5, 130, 1), 1, 6, 2, 80, 16, 0),
    ((1100, 700), 1, 10, 1, 80, 16, 0),
    ((300, 77), 40, 6, 3, 80, 16, 100),
    ((5, 700), 1, 4, 4, 96, 16, 0),
    ((2000,), 1, 11, 1, 96, 1, 0),
    ((260, 31), 70, 12, 4, 96, 16, 0),
    ((640, 9), 1, 7, 1, 112, 16, 0),
    ((200,), 130, 8, 2, 112, 32, 60),
    ((3, 1500), 1, 5, 1, 192, 16, 0),
    ((210, 64), 66, 6, 2, 192, 16, 0),
    ((17, 1030), 1, 8, 2, 256, 16, 0),
    ((900,), 1, 16, 1, 256, 16, 0),
    ((300, 65), 90, 4, 1, 256, 16, 128),
    # latent attention: (key, value) size, the value is part of the key
    ((5, 130, 1), 1, 16, 1, (576, 512), 16, 0),
    ((1100, 700, 31), 1, 16, 1, (576, 512), 16, 0),
    ((3000,), 1, 128, 1, (576, 512), 16, 0),
    ((65, 300), 1, 7, 1, (576, 512), 1, 100),
    ((300, 77), 40, 16, 1, (576, 512), 16, 100),
    ((260, 31), 70, 20, 1, (576, 512), 16, 0),
    ((90,), 9, 80, 1, (576, 512), 16, 0),
    ((40, 7), 3, 5, 1, (40, 32), 4, 0),
]
if IS_SMALL:
    ATTENTION = [case for case in ATTENTION if sum(case[0]) * case[1] * case[2] < 3000]


VARIANTS = [
    *((case, "") for case in ATTENTION),
    *((case, "sinks") for case in ATTENTION),
    *((case, "cap") for case in ATTENTION[::3]),
    *((case, "sinks and cap") for case in ATTENTION[1::3]),
]
