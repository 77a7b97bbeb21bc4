"""`llaisys bench ops`: every kernel as a fraction of its floor, max(bytes / bandwidth, ops / peak).

Of a quantised weight the bytes are those of its packed layout, and the peak is that of 8-bit
products.

Weights are read from memory, not from a cache: each case cycles over copies that are larger than
the last cache together. Times are the best of several passes; the cost of a call from Python is
measured and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.bench.machine import Machine
from llaisys.libllaisys.handles import (
    LinearWeight,
    Stream,
    Tensor,
    block_of,
    handle_array,
    linear_weight_bytes,
)
from llaisys.libllaisys.library import check, lib
from llaisys.libllaisys.types import QUANTISED_DTYPES
from llaisys.models.native import kv_head_bytes
from llaisys.models.tensors import tensor_from, tensor_from_blocks

# (out, in) of one layer and the head.
LINEAR_SHAPES = {
    "smollm2-135m": [(576, 576), (1536, 576), (576, 1536), (49152, 576)],
    "qwen2.5-0.5b": [(896, 896), (4864, 896), (896, 4864), (151936, 896)],
    "qwen2.5-7b": [(3584, 3584), (18944, 3584), (3584, 18944)],
}
LINEAR_ROWS = (1, 2, 4, 7, 8, 16, 32, 64, 512)
QUICK_ROWS = (1, 4, 8, 64)
MIN_COLD_BYTES = 400 << 20
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
PASSES = 5
MIN_SECONDS = 0.05


def cold_bytes() -> int:
    """So much data in turn comes from memory every time: twice what the last cache holds."""
    try:
        last_cache = int(LAST_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):  # no third cache, or nobody tells
        last_cache = 0
    return max(MIN_COLD_BYTES, 2 * last_cache)


@dataclass(frozen=True, slots=True)
class Result:
    op: str
    dtype: str
    shape: str
    rows: int
    value: float
    unit: str  # of value and limit
    limit: float
    fraction: float  # of the floor


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of one kernel, and what it had to do."""

    op: str
    dtype: str
    shape: str
    rows: int
    seconds: float
    n_bytes: float
    operations: float

    def against(self, machine: Machine) -> Result:
        is_integer = self.dtype in QUANTISED_DTYPES and machine.i8 > 0
        peak = machine.i8 if is_integer else machine.f32
        is_memory_bound = self.n_bytes / machine.read_bandwidth >= self.operations / peak
        work, limit = (
            (self.n_bytes, machine.read_bandwidth) if is_memory_bound else (self.operations, peak)
        )
        return Result(
            op=self.op,
            dtype=self.dtype,
            shape=self.shape,
            rows=self.rows,
            value=round(work / self.seconds / 1e9, 3),
            unit="GB/s" if is_memory_bound else "GOP/s" if is_integer else "GFLOP/s",
            limit=round(limit / 1e9, 3),
            fraction=round(work / limit / self.seconds, 4),
        )


def time_ops(stream: Stream, models: list[str], dtypes: list[str], quick: bool) -> Iterator[Timing]:
    overhead = _call_overhead(stream)
    rows = QUICK_ROWS if quick else LINEAR_ROWS
    for model in models:
        for shape in LINEAR_SHAPES[model]:
            for dtype in dtypes:
                if shape[1] % block_of(dtype)[0] == 0:
                    yield from _linear(stream, shape, dtype, rows, overhead)
    for dtype in (*dtypes, "q8"):
        if dtype in QUANTISED_DTYPES:
            continue
        yield _attention(stream, dtype, 4096, 1, overhead)
        yield _attention(stream, dtype, 4096, 8, overhead)
        yield _prefill(stream, dtype, 512 if quick else 2048, overhead)
    yield from _row_ops(stream, overhead)


def _call_overhead(stream: Stream) -> float:
    """Seconds that a call from Python costs by itself."""
    function, handle = lib().llaisysStreamSynchronize, stream.handle
    return _best_seconds(lambda: function(handle), 1, 0.0) or 0.0


def _best_seconds(call: Callable[[], Any], calls_per_pass: int, overhead: float) -> float:
    """Seconds of one call: the best pass, where a pass lasts at least MIN_SECONDS."""
    call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    repeats = max(1, int(MIN_SECONDS / max(once, 1e-7)))
    best = float("inf")
    for _ in range(PASSES):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return max(best / calls_per_pass - overhead, 1e-9)


def _random(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> Tensor:
    """Random values, the same ones again and again when there are very many."""
    size = int(np.prod(shape))
    if dtype in QUANTISED_DTYPES:  # small bytes: scales are finite wherever they stand
        elements, nbytes = block_of(dtype)
        bytes_of_row = shape[1] // elements * nbytes
        rows = np.random.default_rng(seed).integers(1, 48, 1 << 20, np.uint8)
        return tensor_from_blocks(np.resize(rows, (shape[0], bytes_of_row)), shape, dtype)
    some = np.random.default_rng(seed).standard_normal(min(size, 1 << 20), np.float32)
    values = np.resize(some, shape)
    if dtype == "bf16":
        return tensor_from((values.view(np.uint32) >> 16).astype(np.uint16), "bf16")
    return tensor_from(values.astype(np.float16 if dtype == "f16" else np.float32), dtype)


def _linear(
    stream: Stream,
    shape: tuple[int, int],
    dtype: str,
    row_counts: tuple[int, ...],
    overhead: float,
) -> Iterator[Timing]:
    out_features, in_features = shape
    weight_bytes = linear_weight_bytes(dtype, out_features, in_features)
    copies = -(-cold_bytes() // weight_bytes)
    with ExitStack() as stack:
        source = stack.enter_context(_random(shape, dtype))
        weights = [stack.enter_context(LinearWeight(source, stream)) for _ in range(copies)]
        function, on = lib().llaisysLinear, stream.handle
        for rows in row_counts:
            used = weights if rows < 64 else weights[: -(-copies // 8)]
            with (
                _random((rows, in_features)) as x,
                Tensor.create((rows, out_features), "f32") as out,
            ):
                arrays = [(handle_array(w), handle_array(out)) for w in used]
                source_handle = x.handle

                def one_pass(
                    arrays: list[Any] = arrays, source_handle: int = source_handle
                ) -> None:
                    for weight, target in arrays:
                        function(on, source_handle, None, 1, weight, None, target)

                check(function(on, source_handle, None, 1, arrays[0][0], None, arrays[0][1]))
                seconds = _best_seconds(one_pass, len(arrays), overhead)
            moved = weight_bytes + 4 * rows * (in_features + out_features)
            operations = 2.0 * rows * out_features * in_features
            name = f"{out_features}x{in_features}"
            yield Timing("linear", dtype, name, rows, seconds, moved, operations)


ATTENTION_HEADS, ATTENTION_KV_HEADS, ATTENTION_DIM, ATTENTION_BLOCK = 14, 2, 64, 16


def _attention(stream: Stream, dtype: str, context: int, sequences: int, overhead: float) -> Timing:
    """Decoding: one query token of each of `sequences` over `context` entries of its own."""
    seconds = _attention_seconds(
        stream, dtype, sequences, context, np.full(sequences, context), overhead
    )
    size = ATTENTION_KV_HEADS * context * sequences
    operations = 4.0 * ATTENTION_HEADS * ATTENTION_DIM * context * sequences
    return Timing(
        "attention decode",
        dtype,
        f"{context} entries, {ATTENTION_HEADS}/{ATTENTION_KV_HEADS} heads of {ATTENTION_DIM}",
        sequences,
        seconds,
        2 * size * _kv_bytes(dtype),
        operations,
    )


def _prefill(stream: Stream, dtype: str, tokens: int, overhead: float) -> Timing:
    """One prompt: token i sees the i + 1 first entries of one list."""
    seconds = _attention_seconds(stream, dtype, 1, tokens, np.arange(1, tokens + 1), overhead)
    visible = tokens * (tokens + 1) / 2
    return Timing(
        "attention prefill",
        dtype,
        f"{tokens} tokens, {ATTENTION_HEADS}/{ATTENTION_KV_HEADS} heads of {ATTENTION_DIM}",
        tokens,
        seconds,
        2 * ATTENTION_KV_HEADS * tokens * _kv_bytes(dtype),
        4.0 * ATTENTION_HEADS * ATTENTION_DIM * visible,
    )


def _kv_bytes(dtype: str) -> int:
    return kv_head_bytes(dtype, ATTENTION_DIM)


def _random_kv(slots: int, dtype: str, seed: int) -> Tensor:
    """Keys or values of as many slots; in 8 bits random bytes with a scale of 2 / 127."""
    if dtype != "q8":
        return _random((slots, ATTENTION_KV_HEADS, ATTENTION_DIM), dtype, seed)
    rows = slots * ATTENTION_KV_HEADS
    some = np.random.default_rng(seed).integers(-127, 128, 1 << 20, np.int8)
    values = np.resize(some, (rows, ATTENTION_DIM))
    scales = np.full((rows, 1), 2 / 127, np.float32).view(np.int8)
    cache = np.concatenate([values, scales], axis=1)
    return tensor_from(cache.reshape(slots, ATTENTION_KV_HEADS, -1), "i8")


def _attention_seconds(
    stream: Stream, dtype: str, sequences: int, context: int, ends: Any, overhead: float
) -> float:
    """One call, over copies of the cache that are larger than the last cache when decoding."""
    blocks = -(-context // ATTENTION_BLOCK)
    slots = sequences * blocks * ATTENTION_BLOCK
    n = len(ends)
    cache_bytes = 2 * slots * ATTENTION_KV_HEADS * _kv_bytes(dtype)
    copies = -(-cold_bytes() // cache_bytes) if n == sequences else 1
    rows = np.arange(n) % sequences if n == sequences else np.zeros(n)
    tables = np.random.default_rng(1).permutation(sequences * blocks).reshape(sequences, blocks)
    with ExitStack() as stack:
        keep = stack.enter_context
        caches = [
            (keep(_random_kv(slots, dtype, 2 * i)), keep(_random_kv(slots, dtype, 2 * i + 1)))
            for i in range(copies)
        ]
        q = keep(_random((n, ATTENTION_HEADS, ATTENTION_DIM)))
        out = keep(Tensor.create((n, ATTENTION_HEADS, ATTENTION_DIM), "f32"))
        lists = [
            keep(tensor_from(np.asarray(values, np.int32), "i32"))
            for values in (rows, np.zeros(n), ends, tables)
        ]
        tail = [tensor.handle for tensor in lists]
        head = (stream.handle, out.handle, q.handle)
        handles = [(k.handle, v.handle) for k, v in caches]
        scale = ATTENTION_DIM**-0.5
        function = lib().llaisysAttention

        def one_pass() -> None:
            for k, v in handles:
                check(function(*head, k, v, *tail, ATTENTION_BLOCK, scale))

        return _best_seconds(one_pass, len(handles), overhead)


# Operators that touch each value once: name, columns, bytes a value.
ROW_OPS = (
    ("rms_norm", 4096, 8),
    ("add_rms_norm", 4096, 16),
    ("swiglu", 4096, 12),
    ("rope", 4096, 8),
    ("softmax", 151936, 8),
    ("topk 50", 151936, 4),
    ("argmax", 151936, 4),
)


def _row_ops(stream: Stream, overhead: float) -> Iterator[Timing]:
    for name, columns, bytes_per_value in ROW_OPS:
        rows = -(-cold_bytes() // (bytes_per_value * columns))
        with ExitStack() as stack:
            call = _row_op(stack.enter_context, stream.handle, name, rows, columns)
            check(call())
            seconds = _best_seconds(call, 1, overhead)
        moved = bytes_per_value * rows * columns
        yield Timing(name, "f32", str(columns), rows, seconds, moved, 0)


def _row_op(
    keep: Callable[[Tensor], Tensor], on: int, name: str, rows: int, columns: int
) -> Callable[[], int]:
    """The call of one operator on fresh tensors of this size."""
    native = lib()
    x, y = keep(_random((rows, columns))), keep(Tensor.create((rows, columns), "f32"))
    if name == "rms_norm":
        weight = keep(_random((columns,)))
        return lambda: int(native.llaisysRmsNorm(on, y.handle, x.handle, weight.handle, 1e-6))
    if name == "add_rms_norm":
        weight, residual = keep(_random((columns,))), keep(_random((rows, columns)))
        return lambda: int(
            native.llaisysAddRmsNorm(on, y.handle, residual.handle, x.handle, weight.handle, 1e-6)
        )
    if name == "swiglu":
        up = keep(_random((rows, columns)))
        return lambda: int(native.llaisysSwiGLU(on, y.handle, x.handle, up.handle))
    if name == "rope":
        shape = (rows, columns // ATTENTION_DIM, ATTENTION_DIM)
        heads, rotated = keep(x.view(shape)), keep(y.view(shape))
        positions = keep(tensor_from(np.arange(rows, dtype=np.int64), "i64"))
        frequencies = keep(_random((ATTENTION_DIM // 2,)))
        return lambda: int(
            native.llaisysRope(
                on, rotated.handle, heads.handle, positions.handle, frequencies.handle
            )
        )
    if name == "softmax":
        return lambda: int(native.llaisysSoftmax(on, y.handle, x.handle))
    if name == "argmax":
        index, value = keep(Tensor.create((rows,), "i64")), keep(Tensor.create((rows,), "f32"))
        return lambda: int(native.llaisysArgmax(on, index.handle, value.handle, x.handle))
    index, value = keep(Tensor.create((rows, 50), "i32")), keep(Tensor.create((rows, 50), "f32"))
    return lambda: int(native.llaisysTopK(on, index.handle, value.handle, x.handle))
