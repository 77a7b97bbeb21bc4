"""Native objects for the core tests, and references in NumPy.

Everything computes in float64 from values that were rounded to the dtype first, so that a kernel
may differ from its reference only by its own rounding.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.libllaisys.arrays import attach_structs
from llaisys.libllaisys.handles import LinearWeight, Stream, Tensor, dtype_code
from llaisys.libllaisys.headers import CONSTANTS
from llaisys.libllaisys.library import check, last_error, lib
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import (
    MODEL_TYPES,
    LlaisysDecoderMeta,
    LlaisysKvStats,
    LlaisysModelCreateParams,
    LlaisysSamplingMetadata,
    LlaisysSamplingNumber,
    LlaisysStepInput,
)

ROOT = Path(__file__).resolve().parents[2]
REALS = ("f32", "f16", "bf16")
NUMPY = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,  # the bits
    "i64": np.int64,
    "i32": np.int32,
    "i8": np.int8,
    "u8": np.uint8,
}
# Half a unit in the last place of a value near 1, generously doubled.
EPSILON = {"f32": 2.0**-22, "f16": 2.0**-10, "bf16": 2.0**-7}

Array = NDArray[Any]


# -- Values ---------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def to_bits(values: Array, dtype: str) -> Array:
    """The stored form of real values: round to nearest, ties to even; bf16 as uint16 bits."""
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, dtype=NUMPY[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bits(stored: Array, dtype: str) -> NDArray[np.float32]:
    if dtype != "bf16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array, dtype: str) -> NDArray[np.float32]:
    """The values that are left after a trip through the dtype."""
    return from_bits(to_bits(values, dtype), dtype).reshape(np.shape(values))


def tensor(values: Array, dtype: str) -> Tensor:
    """A native copy; reals are rounded to the dtype, integers must fit."""
    stored = (
        to_bits(values, dtype) if dtype in REALS else np.ascontiguousarray(values, NUMPY[dtype])
    )
    made = Tensor.create(np.shape(values), dtype)  # NumPy makes dense arrays of 0 dimensions 1-d
    made.load(stored.ctypes.data, stored.nbytes)
    return made


def array(source: Tensor) -> Array:
    """A NumPy copy; reals as float32."""
    dtype = source.dtype
    with source.contiguous() as dense:
        stored = np.empty(dense.shape, NUMPY[dtype])
        dense.store(stored.ctypes.data, stored.nbytes)
    return from_bits(stored, dtype) if dtype in REALS else stored


def bits(source: Tensor) -> bytes:
    with source.contiguous() as dense:
        stored = np.empty(dense.shape, NUMPY[source.dtype])
        dense.store(stored.ctypes.data, stored.nbytes)
    return stored.tobytes()


def assert_close(got: Array, expected: Array, dtype: str, scale: float = 1.0) -> None:
    """Within `scale` roundings of the dtype, relative to the largest value around."""
    assert got.shape == expected.shape
    epsilon = EPSILON[dtype] * scale
    np.testing.assert_allclose(
        got,
        expected,
        rtol=epsilon,
        atol=epsilon * max(1e-3, float(np.abs(expected).max(initial=0))),
    )


def address(values: Array | None) -> int | None:
    return None if values is None else values.ctypes.data


def is_sanitized() -> bool:
    """A sanitizer is preloaded: freed memory stays for a while, and enumerations are checked."""
    return "san" in os.environ.get("LD_PRELOAD", "")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# -- Operators ------------------------------------------------------------------------------------


def op(function: str, *arguments: Any, stream: Stream | None = None) -> None:
    """Call an operator; tensors stand for their handles, None for NULL. Raises on a code."""
    plain = [item.handle if isinstance(item, Tensor) else item for item in arguments]
    on = None if stream is None else stream.handle
    check(getattr(lib(), f"llaisys{function}")(on, *plain))


def handle_array(handles: Sequence[Tensor | LinearWeight | None]) -> Any:
    values = [None if item is None else item.handle for item in handles]
    return (ctypes.c_void_p * max(1, len(values)))(*values)


class Natives:
    """Tensors for the length of a `with` block."""

    def __init__(self) -> None:
        self._open: list[Tensor | LinearWeight] = []

    def __enter__(self) -> Natives:
        return self

    def __exit__(self, *_: object) -> None:
        for item in reversed(self._open):
            item.close()

    def keep(self, item: Any) -> Any:
        self._open.append(item)
        return item

    def __call__(self, values: Array, dtype: str) -> Tensor:
        made: Tensor = self.keep(tensor(values, dtype))
        return made

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        made: Tensor = self.keep(Tensor.create(shape, dtype))
        return made

    def strided(self, values: Array, dtype: str, before: int = 1, after: int = 2) -> Tensor:
        """The values with gaps of NaN around each row, beginning at an odd element."""
        lead = values.shape[:-1]
        gap = np.nan if dtype in REALS else 77
        wide = np.full((*lead, before + values.shape[-1] + after), gap, np.float64)
        wide[..., before : before + values.shape[-1]] = values
        whole = self(wide, dtype)
        view: Tensor = self.keep(whole.slice(len(lead), before, before + values.shape[-1]))
        self.whole = whole
        return view


# -- The mock model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A mock model: src/models/mock/mock.hpp. KV dtype apart from the table's."""

    voc: int = 37
    nh: int = 4
    nkvh: int = 2
    dh: int = 6
    maxseq: int = 512
    theta: float = 10000.0
    window: int = 0
    dtype: str = "f32"
    seed: int = 1

    @property
    def hs(self) -> int:
        return self.nh * self.dh

    def table(self) -> NDArray[np.float32]:
        return np.random.default_rng(self.seed).standard_normal((self.voc, self.hs), np.float32)

    def meta(self, **changes: Any) -> LlaisysDecoderMeta:
        values: dict[str, Any] = dict(
            dtype=dtype_code(self.dtype), nlayer=1, hs=self.hs, nh=self.nh, nkvh=self.nkvh,
            dh=self.dh, di=1, maxseq=self.maxseq, voc=self.voc, epsilon=1e-6, theta=self.theta,
            end_token=-1, sliding_window=self.window,
        )  # fmt: skip
        return LlaisysDecoderMeta(**(values | changes))

    # The maths, on one token at a time.

    def rope(self, x: Array, position: int) -> Array:
        """x [heads, dh], halves paired."""
        half = self.dh // 2
        exponents = -2.0 * np.arange(half) / self.dh
        angle = position * np.float64(np.float32(self.theta) ** exponents).astype(np.float32)
        cos, sin = np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))
        low, high = x[:, :half].astype(np.float64), x[:, half:].astype(np.float64)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)

    def logits(self, x: Array, position: int, seen: Sequence[tuple[Array, int]]) -> Array:
        """Of a token with embedding x [hs] that sees the cells (embedding, position)."""
        return self.hidden(x, position, seen) @ self.table().astype(np.float64).T

    def hidden(self, x: Array, position: int, seen: Sequence[tuple[Array, int]]) -> Array:
        """The same before the head, [hs]."""
        group = self.nh // self.nkvh
        query = self.rope(x.reshape(self.nh, self.dh), position)
        kv = [row.reshape(self.nh, self.dh)[: self.nkvh] for row, _ in seen]
        keys = np.stack(
            [rounded(self.rope(row, at), self.dtype) for row, (_, at) in zip(kv, seen, strict=True)]
        )
        values = np.stack([rounded(row, self.dtype) for row in kv])
        out = np.empty((self.nh, self.dh))
        for head in range(self.nh):
            scores = keys[:, head // group].astype(np.float64) @ query[head] / np.sqrt(self.dh)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ values[:, head // group] / weights.sum()
        return out.reshape(-1)

    def sequence_logits(self, tokens: Sequence[int]) -> Array:
        """Of every token of one sequence at positions 0, 1, ...; [n, voc]."""
        return self.sequence_hidden(tokens) @ self.table().astype(np.float64).T

    def sequence_hidden(self, tokens: Sequence[int]) -> Array:
        """The same before the head, [n, hs]."""
        table = self.table()
        cells = [(table[token], at) for at, token in enumerate(tokens)]
        first = [0 if not self.window else max(0, i + 1 - self.window) for i in range(len(cells))]
        return np.stack(
            [self.hidden(*cells[i], cells[first[i] : i + 1]) for i in range(len(cells))]
        )


TOLERANCE = {"f32": 2e-4, "f16": 2e-2, "bf16": 1.5e-1}


def create_params(
    meta: LlaisysDecoderMeta | None, model_type: str = "mock", **fields: Any
) -> LlaisysModelCreateParams:
    params = LlaisysModelCreateParams(
        model_type=MODEL_TYPES[model_type],
        meta=None if meta is None else ctypes.addressof(meta),
        struct_size=ctypes.sizeof(LlaisysModelCreateParams),
        n_threads=fields.pop("n_threads", 1),
        **fields,
    )
    params.meta_kept = meta
    return params


class KvStatus(IntEnum):
    OK = CONSTANTS["KV_OK"]
    OOM_SLOT = CONSTANTS["KV_OOM_SLOT"]
    INVALID_SEQ = CONSTANTS["KV_INVALID_SEQ"]
    INVALID_POS = CONSTANTS["KV_INVALID_POS"]
    EMPTY_RANGE = CONSTANTS["KV_EMPTY_RANGE"]
    INTERNAL_ERROR = CONSTANTS["KV_INTERNAL_ERROR"]


class ModelCalls(Model):
    """A model handle with the calls that only tests make."""

    def set_lora(
        self, slot: int, field: str, layer: int, a: Tensor, b: Tensor, scale: float
    ) -> None:
        """Copy A [rank, in] and B [out, rank] of one linear weight into a slot."""
        arguments = (slot, field.encode(), layer, a.handle, b.handle, scale)
        check(lib().llaisysModelSetLora(self.handle, *arguments))

    def clear_lora(self, slot: int) -> None:
        """Empty a slot."""
        check(lib().llaisysModelClearLora(self.handle, slot))

    def sampler_reset(self, seq_id: int, address: int, n: int) -> None:
        check(lib().llaisysModelSamplerReset(self.handle, seq_id, address, n))

    def sampler_accept(self, seq_id: int, address: int, n: int) -> None:
        check(lib().llaisysModelSamplerAccept(self.handle, seq_id, address, n))

    def sampler_forget(self, seq_id: int) -> None:
        check(lib().llaisysModelSamplerForget(self.handle, seq_id))

    def pooled(self, seq_id: int, address: int, n: int) -> None:
        check(lib().llaisysModelPooled(self.handle, seq_id, address, n))

    def pool_forget(self, seq_id: int) -> None:
        check(lib().llaisysModelPoolForget(self.handle, seq_id))

    def kv_seq_cp(self, dst: int, src: int, p0: int, p1: int) -> KvStatus:
        return KvStatus(lib().llaisysModelKvSeqCp(self.handle, dst, src, p0, p1))

    def kv_seq_rm(self, seq: int, p0: int, p1: int) -> KvStatus:
        return KvStatus(lib().llaisysModelKvSeqRm(self.handle, seq, p0, p1))

    def kv_seq_add(self, seq: int, p0: int, p1: int, delta: int) -> KvStatus:
        return KvStatus(lib().llaisysModelKvSeqAdd(self.handle, seq, p0, p1, delta))

    def kv_seq_keep(self, seq: int) -> KvStatus:
        return KvStatus(lib().llaisysModelKvSeqKeep(self.handle, seq))

    def kv_seq_pos_max(self, seq: int) -> int:
        return int(lib().llaisysModelKvSeqPosMax(self.handle, seq))

    def kv_seq_pos_min(self, seq: int) -> int:
        return int(lib().llaisysModelKvSeqPosMin(self.handle, seq))

    def kv_stats(self) -> LlaisysKvStats:
        stats = LlaisysKvStats(struct_size=ctypes.sizeof(LlaisysKvStats))
        check(lib().llaisysModelKvStats(self.handle, ctypes.byref(stats)))
        return stats

    def kv_dump(self) -> str:
        """The cells of the SLOT layout as text."""
        length = ctypes.c_size_t()
        check(lib().llaisysModelKvDump(self.handle, None, 0, ctypes.byref(length)))
        buffer = ctypes.create_string_buffer(length.value + 1)
        check(lib().llaisysModelKvDump(self.handle, buffer, len(buffer), ctypes.byref(length)))
        return buffer.value.decode()

    def kv_copy_slots(self, src_address: int, dst_address: int, n: int) -> None:
        check(lib().llaisysModelKvCopySlots(self.handle, src_address, dst_address, n))

    def kv_shift_slots(self, slots_address: int, delta_address: int, n: int) -> None:
        check(lib().llaisysModelKvShiftSlots(self.handle, slots_address, delta_address, n))

    def kv_reserve_host(self, num_blocks: int, fd: int = -1) -> None:
        check(lib().llaisysModelKvReserveHost(self.handle, num_blocks, fd))

    def kv_to_host(self, blocks_address: int, host_address: int, n: int) -> None:
        check(lib().llaisysModelKvToHost(self.handle, blocks_address, host_address, n))

    def kv_from_host(self, blocks_address: int, host_address: int, n: int) -> None:
        check(lib().llaisysModelKvFromHost(self.handle, blocks_address, host_address, n))


class MockModel(ModelCalls):
    """A model handle with arrays kept alive around its calls; codes come back as numbers."""

    def __init__(self, shape: Shape | None = None, weights: bool = True, **fields: Any) -> None:
        self.shape = shape or Shape()
        super().__init__(create_params(self.shape.meta(), **fields))
        if weights:
            table = tensor(self.shape.table(), "f32")
            self.replace_weight("in_embed", 0, table)

    def try_step(
        self,
        tokens: Sequence[int] | None,
        seqs: Sequence[Sequence[int]] | None = None,
        positions: Sequence[int] | None = None,
        marks: Sequence[int] | None = None,
        embd: Array | None = None,
        **fields: Any,
    ) -> int:
        """llaisysModelStep; its code. seqs: the sequence ids of each token."""
        n = len(embd) if tokens is None and embd is not None else len(tokens or ())
        arrays = {
            "token_ids": None if tokens is None else np.asarray(tokens, np.int64),
            "embd": None if embd is None else np.ascontiguousarray(embd, np.float32),
            "positions": None if positions is None else np.asarray(positions, np.int64),
            "n_seq_id": None if seqs is None else np.array([len(s) for s in seqs], np.int32),
            "seq_ids": None if seqs is None else np.array([i for s in seqs for i in s], np.int64),
            "logits": None if marks is None else np.asarray(marks, np.int8),
        }
        for name in ("slot_mapping", "context_lens", "block_tables", "lora_slots"):
            if name in fields:
                arrays[name] = np.ascontiguousarray(fields.pop(name), np.int32)
        if "pooling" in fields:
            arrays["pooling"] = np.asarray(fields.pop("pooling"), np.uint8)
        if "batch_seq_ids" in fields:
            arrays["batch_seq_ids"] = np.asarray(fields.pop("batch_seq_ids"), np.int64)
        step = LlaisysStepInput(struct_size=ctypes.sizeof(LlaisysStepInput), n_tokens=n)
        for name, values in arrays.items():
            setattr(step, name, address(values))
        step.n_seq_ids = 0 if arrays["seq_ids"] is None else len(arrays["seq_ids"])
        for name, value in fields.items():
            setattr(step, name, value)
        return int(lib().llaisysModelStep(self.handle, ctypes.byref(step)))

    def run(self, tokens: Sequence[int] | None, *args: Any, **kwargs: Any) -> NDArray[np.float32]:
        """A step that must succeed; its logits [n_outputs, voc]."""
        code = self.try_step(tokens, *args, **kwargs)
        assert code == 0, f"step returned {code}: {last_error()}"
        return self.logits()

    def run_blocks(
        self, rows: Sequence[BlockRow], marks: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """A step of the BLOCK layout over the fresh tokens of each row."""
        return self.run(**block_step(rows, self.params.kv_cache_block_size), marks=marks)

    def logits(self) -> NDArray[np.float32]:
        n = self.n_outputs
        if n == 0:
            return np.empty((0, self.shape.voc), np.float32)
        values = (ctypes.c_float * (n * self.shape.voc)).from_address(self.logits_address)
        return np.frombuffer(values, np.float32).reshape(n, -1).copy()

    def output_ids(self) -> list[int]:
        n = self.n_outputs
        return list((ctypes.c_int32 * n).from_address(self.output_ids_address)) if n else []

    def sample_rows(self, n_rows: int, **arrays: Any) -> list[int]:
        """llaisysModelSample with these arrays; raises on a code."""
        sampling = LlaisysSamplingMetadata(n_rows=n_rows)
        kept = {
            name: np.ascontiguousarray(values, SAMPLING_DTYPES.get(name, np.float64))
            for name, values in arrays.items()
        }
        numbers = {name: kept[name].ctypes.data for name in kept if name not in SAMPLING_DTYPES}
        set_numbers(sampling, numbers)
        for name in kept.keys() & SAMPLING_DTYPES.keys():
            setattr(sampling, name, kept[name].ctypes.data)
        sampling.n_masks = len(kept["masks"]) if "masks" in kept else 0
        ids = np.full(max(1, n_rows), -7, np.int32)
        self.sample(sampling, ids.ctypes.data)
        return ids[:n_rows].tolist()


def set_numbers(sampling: LlaisysSamplingMetadata, numbers: dict[str, int | None]) -> None:
    """name -> the address of its values."""
    entries = attach_structs(sampling, "numbers", LlaisysSamplingNumber, len(numbers))
    sampling.n_numbers = len(numbers)
    for entry, (name, address) in zip(entries, numbers.items(), strict=True):
        entry.name, entry.values = name.encode(), address


# The arrays that are fields of LlaisysSamplingMetadata; the numbers are float64.
SAMPLING_DTYPES: dict[str, Any] = {
    "rows": np.int32, "seq_ids": np.int64, "seeds": np.uint64, "positions": np.int64,
    "choices": np.int32, "chain_offsets": np.int32, "chain": np.uint8, "bias_offsets": np.int32,
    "bias_ids": np.int32, "bias_values": np.float32, "mask_rows": np.int32, "masks": np.uint32,
}  # fmt: skip


@dataclass
class BlockRow:
    """One sequence of a BLOCK step: the last len(tokens) of its `length` tokens are fresh."""

    seq: int
    blocks: Sequence[int]
    tokens: Sequence[int]
    length: int


def block_step(rows: Iterable[BlockRow], block_size: int) -> dict[str, Any]:
    """The arguments of try_step for these rows."""
    rows = list(rows)
    width = max(len(row.blocks) for row in rows)
    tables = np.full((len(rows), width), -1, np.int32)
    tokens, positions, seqs, slots = [], [], [], []
    for r, row in enumerate(rows):
        tables[r, : len(row.blocks)] = row.blocks
        for i, token in enumerate(row.tokens):
            position = row.length - len(row.tokens) + i
            tokens.append(token)
            positions.append(position)
            seqs.append([row.seq])
            block = row.blocks[position // block_size]
            slots.append(block * block_size + position % block_size)
    return {
        "tokens": tokens, "positions": positions, "seqs": seqs, "slot_mapping": slots,
        "context_lens": [row.length for row in rows], "batch_seq_ids": [row.seq for row in rows],
        "block_tables": tables, "n_seq": len(rows), "block_table_width": width,
    }  # fmt: skip
