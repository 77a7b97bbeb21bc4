"""`llaisys bench ops`: kernels against the roofline, max(bytes / bandwidth, operations / peak).

For a quantised weight, bytes are those of its packed layout and the peak is that of 8-bit products;
for 16-bit weights on a GPU, the peak is that of the tensor cores.

Weights are read from memory, not from a cache: each case cycles over copies that together exceed
the last-level cache. Times are the best of several passes (`bench.target`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.bench.machine import Limits, measure, probe_again
from llaisys.bench.target import BenchTarget, open_target
from llaisys.common.machine_limits import available_memory
from llaisys.common.progress import report
from llaisys.common.validation import check_choice
from llaisys.libllaisys.handles import (
    LinearWeight,
    Tensor,
    block_of,
    handle_array,
    linear_weight_bytes,
)
from llaisys.libllaisys.library import check, choose_library, lib
from llaisys.libllaisys.types import DTYPE_BYTES, QUANTISED_DTYPES
from llaisys.models.native import kv_head_bytes

# (out, in) of the linear layers and the output matrix.
LINEAR_SHAPES = {
    "smollm2-135m": [(576, 576), (1536, 576), (576, 1536), (49152, 576)],
    "qwen2.5-0.5b": [(896, 896), (4864, 896), (896, 4864), (151936, 896)],
    "qwen2.5-1.5b": [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960), (151936, 1536)],
    "qwen2.5-7b": [(3584, 3584), (18944, 3584), (3584, 18944)],
}
HEAD_OUTPUTS = 40_000  # more outputs: an output matrix, whose logits are f32 on every device
LINEAR_ROWS = (1, 2, 4, 7, 8, 16, 32, 64, 128, 512)
QUICK_ROWS = (1, 4, 8, 64)
MIN_COLD_BYTES = 400 << 20
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def cold_bytes() -> int:
    """Bytes of which few stay cached: four times the last-level cache, where memory allows."""
    try:
        last_cache = int(LAST_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):  # no L3, or its size is unknown
        last_cache = 0
    return max(MIN_COLD_BYTES, min(4 * last_cache, available_memory() // 4))


@dataclass(frozen=True, slots=True)
class AttentionCases:
    heads: int
    kv_heads: int
    dim: int
    decode: tuple[tuple[int, int], ...]  # (context length, sequences)
    prefill: int  # prompt tokens
    block: int = 16


EIGHT_BITS = {"q8": "i8", "fp8": "f8_e4m3"}  # KV dtypes and those of their tensors


@dataclass(frozen=True, slots=True)
class Workload:
    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]  # in addition to dtypes
    attention: AttentionCases


WORKLOADS = {
    "cpu": Workload(
        ("smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b"),
        ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_k", "i4_g128"),
        ("q8",),
        AttentionCases(14, 2, 64, ((4096, 1), (4096, 8)), 2048),
    ),
    "cuda": Workload(
        ("qwen2.5-1.5b", "qwen2.5-7b"),
        ("bf16",),
        ("q8", "fp8"),
        AttentionCases(
            12, 2, 128, ((1024, 1), (4096, 1), (1024, 8), (1024, 64), (1024, 256)), 4096
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one kernel, and its bytes and operations."""

    op: str
    dtype: str
    shape: str
    rows: int
    seconds: float
    n_bytes: float
    operations: float

    def against(self, machine: Limits) -> dict[str, Any]:
        """The result for reports; `fraction`: of the roofline."""
        peak, unit = machine.peak_of(self.op, self.dtype)
        is_memory_bound = self.n_bytes / machine.read_bandwidth >= self.operations / peak
        work, limit = (
            (self.n_bytes, machine.read_bandwidth) if is_memory_bound else (self.operations, peak)
        )
        return {
            "op": self.op,
            "dtype": self.dtype,
            "shape": self.shape,
            "rows": self.rows,
            "microseconds": round(self.seconds * 1e6, 3),
            "value": round(work / self.seconds / 1e9, 3),
            "unit": "GB/s" if is_memory_bound else unit,  # of value and limit
            "limit": round(limit / 1e9, 3),
            "fraction": round(work / limit / self.seconds, 4),
        }


_PLAIN = ["f32", "bf16", "f16"]
KNOWN_DTYPES = {
    "cpu": [*_PLAIN, *(dtype for dtype in QUANTISED_DTYPES if dtype != "f8_g128")],
    "cuda": [*_PLAIN, *(dtype for dtype in QUANTISED_DTYPES if dtype != "i8_channel")],
}


def run_ops(
    device: str, threads: int, models: list[str] | None, dtypes: list[str] | None, quick: bool
) -> tuple[Limits, list[Timing]]:
    """Time the selected cases, each reported as progress, and probe the machine in between."""
    workload = WORKLOADS[check_choice("device", device, list(WORKLOADS))]
    models, dtypes = models or list(workload.models), dtypes or list(workload.dtypes)
    for model in models:
        check_choice("model", model, list(LINEAR_SHAPES))
    for dtype in dtypes:
        check_choice("dtype", dtype, KNOWN_DTYPES[device])
    choose_library(device)
    with open_target(device, threads) as target:
        machine = measure(target)
        timings: list[Timing] = []
        for timing in time_ops(target, models, dtypes, quick):
            if not timings or timing.shape != timings[-1].shape:
                report(f"timing {timing.op} {timing.dtype} {timing.shape}")
                machine = probe_again(machine, target.stream)
            timings.append(timing)
    return machine, timings


def time_ops(
    target: BenchTarget, models: list[str], dtypes: list[str], quick: bool
) -> Iterator[Timing]:
    workload = WORKLOADS[target.device]
    rows = QUICK_ROWS if quick else LINEAR_ROWS
    for model in models:
        for shape in LINEAR_SHAPES[model]:
            for dtype in dtypes:
                if shape[1] % block_of(dtype)[0] == 0:
                    yield from time_linear(target, shape, dtype, rows)
    for dtype in (*dtypes, *workload.kv_dtypes):
        if dtype in QUANTISED_DTYPES:
            continue
        for context, sequences in workload.attention.decode:
            ends = np.full(sequences, context)
            yield _attention(target, workload.attention, dtype, sequences, context, ends)
        # On a GPU runs of tokens over 8 bits need extents that the C API does not pass.
        if target.device == "cpu" or dtype not in EIGHT_BITS:
            tokens = workload.attention.prefill // (4 if quick else 1)
            ends = np.arange(1, tokens + 1)
            yield _attention(target, workload.attention, dtype, 1, tokens, ends)
    yield from _row_ops(target, target.activations(dtypes[0]))


def time_linear(
    target: BenchTarget, shape: tuple[int, int], dtype: str, row_counts: tuple[int, ...]
) -> Iterator[Timing]:
    out_features, in_features = shape
    weight_bytes = linear_weight_bytes(dtype, *shape, target.device)
    copies = -(-cold_bytes() // weight_bytes)
    x_dtype = target.activations(dtype)
    out_dtype = "f32" if out_features > HEAD_OUTPUTS else x_dtype
    with ExitStack() as stack:
        source = stack.enter_context(target.random(shape, dtype))
        weights = [stack.enter_context(LinearWeight(source, target.stream)) for _ in range(copies)]
        function, on = lib().llaisysLinear, target.stream.handle
        for rows in row_counts:
            used = weights if rows < 64 else weights[: -(-copies // 8)]
            with (
                target.random((rows, in_features), x_dtype) as x,
                target.empty((rows, out_features), out_dtype) as out,
            ):
                arrays = [(handle_array(w), handle_array(out)) for w in used]
                source_handle = x.handle

                def one_pass(
                    arrays: list[Any] = arrays, source_handle: int = source_handle
                ) -> None:
                    for weight, result in arrays:
                        function(on, source_handle, None, 1, weight, None, result)

                check(function(on, source_handle, None, 1, arrays[0][0], None, arrays[0][1]))
                seconds = target.seconds(one_pass, len(arrays))
            moved = weight_bytes + rows * (
                in_features * DTYPE_BYTES[x_dtype] + out_features * DTYPE_BYTES[out_dtype]
            )
            operations = 2.0 * rows * out_features * in_features
            name = f"{out_features}x{in_features}"
            yield Timing("linear", dtype, name, rows, seconds, moved, operations)


def _random_kv(
    target: BenchTarget, cases: AttentionCases, slots: int, dtype: str, seed: int
) -> Tensor:
    """Random keys or values of `slots` slots; 8 bits: random bytes with a scale of 2 / 127."""
    if dtype not in EIGHT_BITS:
        return target.random((slots, cases.kv_heads, cases.dim), dtype, seed)
    rows = slots * cases.kv_heads
    limit = 127 if dtype == "q8" else 64  # fp8: the codes of magnitudes below 2
    some = np.random.default_rng(seed).integers(-limit, limit + 1, 1 << 20, np.int8)
    values = np.resize(some, (rows, cases.dim))
    scales = np.full((rows, 1), 2 / 127, np.float32).view(np.int8)
    if target.device == "cpu":  # a scale follows its bytes
        cache = np.concatenate([values, scales], axis=1)
    else:
        cache = np.concatenate([values.ravel(), scales.ravel()])
    return target.tensor(cache.reshape(slots, cases.kv_heads, -1), EIGHT_BITS[dtype])


def _attention(
    target: BenchTarget, cases: AttentionCases, dtype: str, sequences: int, context: int, ends: Any
) -> Timing:
    """Decoding, one query token per sequence, or the prefill of one prompt. Query i sees keys
    [0, ends[i]). Decoding cycles over KV caches that exceed the last-level cache."""
    blocks = -(-context // cases.block)
    slots = sequences * blocks * cases.block
    n = len(ends)
    cache_bytes = 2 * slots * cases.kv_heads * kv_head_bytes(dtype, cases.dim)
    decodes = n == sequences
    copies = -(-cold_bytes() // cache_bytes) if decodes else 1
    rows = np.arange(n) if decodes else np.zeros(n)
    tables = np.random.default_rng(1).permutation(sequences * blocks).reshape(sequences, blocks)
    x_dtype = target.activations("bf16" if dtype in EIGHT_BITS else dtype)
    with ExitStack() as stack:
        keep = stack.enter_context
        caches = [
            tuple(keep(_random_kv(target, cases, slots, dtype, 2 * i + j)) for j in range(2))
            for i in range(copies)
        ]
        q = keep(target.random((n, cases.heads, cases.dim), x_dtype))
        out = keep(target.empty((n, cases.heads, cases.dim), x_dtype))
        lists = [
            keep(target.tensor(np.asarray(values, np.int32), "i32"))
            for values in (rows, np.zeros(n), ends, tables)
        ]
        runs = None if decodes else keep(target.tensor(np.array([[0, n]], np.int32), "i32"))
        tail = [*(tensor.handle for tensor in lists), None, None if runs is None else runs.handle]
        head = (target.stream.handle, out.handle, q.handle)
        handles = [(k.handle, v.handle) for k, v in caches]
        scale = cases.dim**-0.5
        function = lib().llaisysAttention

        def one_pass() -> None:
            for k, v in handles:
                check(function(*head, k, v, *tail, 1 if decodes else n, cases.block, scale, 0.0))

        seconds = target.seconds(one_pass, len(handles))
    op, keys = ("attention decode", "keys") if decodes else ("attention prefill", "tokens")
    shape = f"{context} {keys}, {cases.heads}/{cases.kv_heads} heads of {cases.dim}"
    moved = 2 * cases.kv_heads * sequences * context * kv_head_bytes(dtype, cases.dim)
    operations = 4.0 * cases.heads * cases.dim * float(ends.sum())
    return Timing(op, dtype, shape, n, seconds, moved, operations)


# Element-wise and row operators: name, columns, activations and f32 values moved per element.
ROW_OPS = (
    ("rms_norm", 4096, 1, 1),
    ("add_rms_norm", 4096, 2, 2),
    ("swiglu", 4096, 3, 0),
    ("rope", 4096, 2, 0),
    ("embedding", 4096, 1, 1),
    ("topk 50", 151936, 0, 1),
    ("argmax", 151936, 0, 1),
)
ROPE_DIM = 64


def _row_ops(target: BenchTarget, dtype: str) -> Iterator[Timing]:
    for name, columns, activations, floats in ROW_OPS:
        bytes_per_value = activations * DTYPE_BYTES[dtype] + floats * 4
        rows = -(-cold_bytes() // (bytes_per_value * columns))
        with ExitStack() as stack:
            function, arguments = _row_op(stack.enter_context, target, name, (rows, columns), dtype)
            given = [a.handle if isinstance(a, Tensor) else a for a in arguments]
            call = partial(function, target.stream.handle, *given)
            check(call())
            seconds = target.seconds(lambda call=call: check(call()), 1)  # type: ignore[misc]
        moved = bytes_per_value * rows * columns
        label = dtype if activations else "f32"
        yield Timing(name, label, str(columns), rows, seconds, moved, 0)


def _row_op(
    keep: Callable[[Tensor], Tensor],
    target: BenchTarget,
    name: str,
    size: tuple[int, int],
    dtype: str,
) -> tuple[Callable[..., int], tuple[Tensor | float, ...]]:
    """The function and its arguments, new tensors of this size; activations have `dtype`."""
    native, (rows, columns) = lib(), size

    def random(shape: tuple[int, ...] = size, of: str = "f32") -> Tensor:
        return keep(target.random(shape, of))

    def empty(shape: tuple[int, ...] = size, of: str = "f32") -> Tensor:
        return keep(target.empty(shape, of))

    def integers(values: Any) -> Tensor:
        return keep(target.tensor(np.asarray(values, np.int64), "i64"))

    match name:
        case "rms_norm":
            return native.llaisysRmsNorm, (empty(size, dtype), random(), random((columns,)), 1e-6)
        case "add_rms_norm":
            tensors = random(), random(size, dtype), random((columns,))
            return native.llaisysAddRmsNorm, (empty(size, dtype), *tensors, 1e-6)
        case "swiglu":
            inputs = random(size, dtype), random(size, dtype)
            return native.llaisysSwiGLU, (empty(size, dtype), *inputs)
        case "rope":
            heads = (rows, columns // ROPE_DIM, ROPE_DIM)
            inputs = random(heads, dtype), integers(np.arange(rows))
            return native.llaisysRope, (empty(heads, dtype), *inputs, random((ROPE_DIM // 2,)))
        case "embedding":
            index = integers(np.random.default_rng(0).permutation(rows))
            return native.llaisysEmbedding, (empty(), index, random(size, dtype))
        case "argmax":
            return native.llaisysArgmax, (empty((rows,), "i64"), empty((rows,)), random())
        case _:
            return native.llaisysTopK, (empty((rows, 50), "i32"), empty((rows, 50)), random())
