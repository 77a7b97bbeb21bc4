"""Random and invalid tensors for the tensor calls and every operator, as in test_capi_fuzz.py."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from capi_fuzzer import (
    DEVICES,
    DTYPES,
    FLOATS,
    INT32,
    OPERATORS,
    Fuzzer,
)

from llaisys.libllaisys import types
from llaisys.libllaisys.handles import LinearWeight, Stream, Tensor
from llaisys.libllaisys.headers import functions
from llaisys.libllaisys.library import lib

SIZES = (0, 1, 1, 2, 3, 4, 5)


def random_tensor(fuzz: Fuzzer) -> Tensor:
    shape = [fuzz.pick(SIZES) for _ in range(fuzz.random.randrange(0, 4))]
    dtype = fuzz.pick(("f32", "f32", "f32", "f16", "bf16", "i64", "i32", "i32", "u8", "i8"))
    made = Tensor.create(shape, dtype)
    raw = np.zeros(max(1, int(np.prod(shape))) * 8, np.uint8)
    raw[::8] = [fuzz.pick((0, 0, 1, 2, 3, 255)) for _ in range(len(raw) // 8)]
    made.load(raw.ctypes.data, int(np.prod(shape)) * types.DTYPE_BYTES[dtype])
    while len(shape) > 0 and fuzz.one_in(3):
        dim = fuzz.random.randrange(len(shape))
        start = fuzz.random.randrange(0, made.shape[dim] + 1)
        view = made.slice(dim, start, fuzz.random.randrange(start, made.shape[dim] + 1))
        made.close()
        made = view
    return made


def test_operators() -> None:
    """Any tensors as arguments, distinct because outputs must not overlap inputs."""
    fuzz = Fuzzer(6)
    names = [name for name in OPERATORS if "LinearWeight" not in name]
    signatures = {name: arguments for name, _, arguments in functions()}
    with Stream(n_threads=2) as stream:
        for _ in range(4000):
            name = fuzz.pick(names)
            tensors = [random_tensor(fuzz) for _ in range(12)]
            weights = []
            for source in tensors[:2]:
                if source.dtype in ("f32", "bf16") and len(source.shape) == 2:
                    weights.append(LinearWeight(source.contiguous()))
            kinds = signatures[name]
            free = iter(tensors)
            if fuzz.one_in(2):  # equal shapes may fit
                free = iter(alike(fuzz, tensors))
            arguments: list[Any] = [fuzz.pick((None, stream.handle))]
            for kind in kinds[1:]:
                if kind is ctypes.c_void_p:
                    arguments.append(None if fuzz.one_in(20) else next(free).handle)
                elif kind is ctypes.c_float:
                    arguments.append(fuzz.pick(FLOATS))
                elif kind is ctypes.c_int32:
                    arguments.append(fuzz.pick((1, 1, 2, 3, 0, -1, 2**31 - 1)))
                elif kind is ctypes.c_int64:
                    arguments.append(fuzz.pick((1, 1, 2, 3, 0, -1, 2**63 - 1)))
                else:
                    arguments.append(None)
            if name == "llaisysLinear":
                count = fuzz.pick((0, 1, 2, -1, 65))
                arguments[3:] = [count, *linear_lists(fuzz, weights, free)]
            fuzz.call(name, *arguments)
            for made in [*tensors, *weights]:
                made.close()
    assert all(rejected > 20 for _, rejected in fuzz.calls.values())
    assert sum(good > 0 for good, _ in fuzz.calls.values()) >= 5, fuzz.calls


def alike(fuzz: Fuzzer, tensors: list[Tensor]) -> list[Tensor]:
    """Replace the tensors by ones of two shapes and few dtypes."""
    shape = [fuzz.pick((1, 2, 3)) for _ in range(fuzz.pick((2, 2, 3)))]
    dtypes = fuzz.pick((["f32"], ["f32", "f16"], ["f32", "i32"]))
    for i, old in enumerate(tensors):
        old.close()
        cut = shape if not fuzz.one_in(3) else shape[-1:]
        tensors[i] = Tensor.create(cut, fuzz.pick(dtypes))
    return tensors


def linear_lists(fuzz: Fuzzer, weights: list[LinearWeight], free: Any) -> list[Any]:
    """Return weight, bias and out arrays of 65 entries, most of them readable."""
    chosen = [fuzz.pick(weights).handle if weights and not fuzz.one_in(9) else None
              for _ in range(65)]  # fmt: skip
    outs = [next(free).handle for _ in range(3)]
    lists = [chosen, [None] * 65, [outs[i % 3] for i in range(65)]]
    return [None if fuzz.one_in(12) else (ctypes.c_void_p * 65)(*values) for values in lists]


def test_tensor_calls() -> None:
    fuzz = Fuzzer(7)
    hostile = (*SIZES, -1, 2**31, 2**62, 2**63 - 1, -(2**63))
    source = Tensor.create((3, 4, 5), "f32")
    for _ in range(4000):
        result = ctypes.c_void_p()
        ndim = fuzz.pick((0, 1, 2, 3, 6, 7, -1, 2**31 - 1))
        sizes = (ctypes.c_int64 * 7)(*[fuzz.pick(SIZES) for _ in range(7)])
        if fuzz.one_in(3):
            sizes[fuzz.random.randrange(3)] = fuzz.pick([s for s in hostile if s != 2**31])
        shape = None if fuzz.one_in(15) else sizes
        where = None if fuzz.one_in(15) else ctypes.byref(result)
        handle = None if fuzz.one_in(15) else source.handle
        kind = fuzz.random.randrange(7)
        if kind == 0:
            dtype, device = fuzz.pick(DTYPES), fuzz.pick(DEVICES)
            fuzz.call("llaisysTensorCreate", shape, ndim, dtype, device, fuzz.pick((0, 0, 1, -1)),
                      where)  # fmt: skip
        elif kind == 1:
            fuzz.call("llaisysTensorView", handle, shape, ndim, where)
        elif kind == 2:
            fuzz.call("llaisysTensorSlice", handle, fuzz.pick(INT32), fuzz.pick(hostile),
                      fuzz.pick(hostile), where)  # fmt: skip
        elif kind == 3:
            order = (ctypes.c_int32 * 3)(*[fuzz.pick((0, 1, 2, *INT32)) for _ in range(3)])
            fuzz.call("llaisysTensorPermute", handle, None if fuzz.one_in(15) else order, where)
        elif kind == 4:
            path = fuzz.pick((b"", b"/", b"/nonexistent", __file__.encode(), None, b"\xff\xfe"))
            fuzz.call("llaisysTensorMap", path, fuzz.pick((0, 1, 4, 2**40, 2**64 - 1)), shape, ndim,
                      fuzz.pick(DTYPES), where)  # fmt: skip
        elif kind == 5:
            buffer = np.zeros(240, np.uint8)
            size = fuzz.pick((240, 240, 0, 239, 2**63))
            name = fuzz.pick(("llaisysTensorLoad", "llaisysTensorStore"))
            fuzz.call(name, handle, None if fuzz.one_in(9) else buffer.ctypes.data, size)
        else:
            fuzz.call("llaisysTensorContiguous", handle, where)
        lib().llaisysTensorDestroy(result)
    source.close()
    assert all(good > 0 for good, _ in fuzz.calls.values()), fuzz.calls
