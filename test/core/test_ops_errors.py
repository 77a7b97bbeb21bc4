"""Every operator rejects every invalid argument, naming operator, argument and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import Natives, handle_array, op

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import LinearWeight, Tensor

# Operator -> (its name in errors, arguments in the order of the call: name -> (shape, dtype) or a
# plain value, names whose layout may have gaps between rows).
GOOD: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Add": ("add", {"out": ((3, 4), "f32"), "a": ((3, 4), "f32"), "b": ((3, 4), "f32")}, set()),
    "Argmax": (
        "argmax",
        {"max_index": ((3,), "i64"), "max_value": ((3,), "f32"), "values": ((3, 4), "f32")},
        set(),
    ),
    "Embedding": (
        "embedding",
        {"out": ((2, 4), "f32"), "index": ((2,), "i64"), "table": ((5, 4), "f16")},
        set(),
    ),
    "RmsNorm": (
        "rms_norm",
        {"out": ((3, 4), "f32"), "in": ((3, 4), "bf16"), "weight": ((4,), "f32"), "epsilon": 1e-6},
        {"out", "in"},
    ),
    "AddRmsNorm": (
        "add_rms_norm",
        {"out": ((3, 4), "f32"), "residual": ((3, 4), "f32"), "in": ((3, 4), "f32"),
         "weight": ((4,), "f32"), "epsilon": 1e-6},
        {"out", "residual", "in"},
    ),
    "Rope": (
        "rope",
        {"out": ((3, 2, 4), "f32"), "in": ((3, 2, 4), "f32"), "positions": ((3,), "i64"),
         "inv_freq": ((2,), "f32")},
        {"out", "in"},
    ),
    "KvStore": (
        "kv_store",
        {"cache": ((5, 2, 4), "f16"), "values": ((2, 2, 4), "f32"), "slots": ((2,), "i32")},
        {"values"},
    ),
    "Attention": (
        "attention",
        {"out": ((2, 4, 6), "f32"), "q": ((2, 4, 6), "f32"), "k_cache": ((8, 2, 6), "f32"),
         "v_cache": ((8, 2, 6), "f32"), "q_rows": ((2,), "i32"), "begin": ((2,), "i32"),
         "end": ((2,), "i32"), "tables": ((1, 3), "i32"), "sinks": None, "runs": None, "longest": 0,
         "block_size": 2, "scale": 1.0, "soft_cap": 0.0},
        {"out", "q"},
    ),
    "SelfAttentionMasked": (
        "self_attention_masked",
        {"out": ((2, 4, 6), "f32"), "q": ((2, 4, 6), "f32"), "k": ((3, 2, 6), "f32"),
         "v": ((3, 2, 6), "f32"), "mask": ((2, 3), "u8"), "scale": 1.0},
        {"out", "q"},
    ),
    "Rearrange": ("rearrange", {"out": ((3, 4), "i32"), "in": ((3, 4), "i32")}, {"out", "in"}),
    "SwiGLU": (
        "swiglu",
        {"out": ((3, 4), "f32"), "gate": ((3, 4), "f32"), "up": ((3, 4), "f16")},
        {"out", "gate", "up"},
    ),
    "TopK": (
        "topk",
        {"index": ((3, 2), "i32"), "value": ((3, 2), "f32"), "values": ((3, 4), "f32")},
        set(),
    ),
}  # fmt: skip
TENSORS = [
    (name, argument)
    for name, (_, arguments, _) in GOOD.items()
    for argument, given in arguments.items()
    if isinstance(given, tuple)
]
Change = Callable[[Natives, tuple[int, ...], str], Tensor | None]


def build(native: Natives, function: str) -> dict[str, Any]:
    return {
        name: native.empty(*given) if isinstance(given, tuple) else given
        for name, given in GOOD[function][1].items()
    }


def error_of(function: str, argument: str, change: Change) -> str:
    """Return the error text of the call with one argument changed; it names the operator."""
    title, arguments, _ = GOOD[function]
    with Natives() as native:
        given = build(native, function)
        given[argument] = change(native, *arguments[argument])
        with pytest.raises(InvalidInputError) as caught:
            op(function, *given.values())
    text = str(caught.value)
    assert text.startswith(f"{title}: "), text
    return text


@pytest.mark.parametrize("function", GOOD)
def test_valid_call_succeeds(function: str) -> None:
    with Natives() as native:
        op(function, *build(native, function).values())


# NULL: the keys contain the values.
@pytest.mark.parametrize(
    ("function", "argument"), [case for case in TENSORS if case != ("Attention", "v_cache")]
)
def test_null(function: str, argument: str) -> None:
    text = error_of(function, argument, lambda native, shape, dtype: None)
    assert f": {argument} is NULL" in text


@pytest.mark.parametrize(("function", "argument"), TENSORS)
def test_dtype(function: str, argument: str) -> None:
    for wrong in ("i8", "u8", "i64", "i32"):
        if wrong == GOOD[function][1][argument][1]:
            continue

        def other(native: Natives, shape: tuple[int, ...], dtype: str, to: str = wrong) -> Tensor:
            return native.empty(shape, to)

        text = error_of(function, argument, other)
        assert "dtype" in text and wrong in text, text


@pytest.mark.parametrize(("function", "argument"), TENSORS)
def test_number_of_dimensions(function: str, argument: str) -> None:
    text = error_of(function, argument, lambda n, shape, dtype: n.empty((*shape, 1), dtype))
    assert "shape" in text or "dimensions" in text, text
    text = error_of(function, argument, lambda n, shape, dtype: n.empty((), dtype))
    assert "shape" in text or "dimensions" in text, text


@pytest.mark.parametrize(("function", "argument"), TENSORS)
def test_one_more_in_each_dimension(function: str, argument: str) -> None:
    """Either it is rejected, or only this argument determines the dimension."""
    free = {
        ("Embedding", "table", 0), ("KvStore", "cache", 0), ("Attention", "tables", 0),
        ("Attention", "tables", 1), ("Argmax", "values", 1), ("TopK", "values", 1),
    }  # fmt: skip
    shape = GOOD[function][1][argument][0]
    for dim in range(len(shape)):
        if (function, argument, dim) in free:
            continue

        def longer(native: Natives, shape: tuple[int, ...], dtype: str, dim: int = dim) -> Tensor:
            return native.empty([size + (i == dim) for i, size in enumerate(shape)], dtype)

        text = error_of(function, argument, longer)
        assert "got" in text and "expected" in text, text


@pytest.mark.parametrize(("function", "argument"), TENSORS)
def test_strided_tensors_are_rejected_where_not_allowed(function: str, argument: str) -> None:
    shape, dtype = GOOD[function][1][argument]
    if argument in GOOD[function][2]:
        with Natives() as native:
            given = build(native, function)
            given[argument] = native.strided(np.zeros(shape), dtype)
            op(function, *given.values())
        if function == "Rearrange":
            return

    def every_other(native: Natives, shape: tuple[int, ...], dtype: str) -> Tensor:
        wide = native.keep(native.empty((*shape, 2), dtype).slice(len(shape), 0, 1))
        return native.keep(wide.view(shape))

    text = error_of(function, argument, every_other)
    assert f"{argument}: got strides" in text, text


@pytest.mark.parametrize(
    ("function", "argument", "values", "words"),
    [
        ("Embedding", "index", [0, 5], "5"),
        ("Embedding", "index", [-1, 0], "-1"),
        ("Embedding", "index", [0, 1 << 62], "at 1"),
        ("KvStore", "slots", [0, 5], "5"),
        ("KvStore", "slots", [-3, 0], "-3"),
        ("Attention", "q_rows", [0, 1], "1"),
        ("Attention", "q_rows", [-1, 0], "-1"),
        ("Attention", "begin", [0, -1], "-1"),
        ("Attention", "end", [0, 7], "7"),
        ("Attention", "end", [2147483647, 0], "2147483647"),
    ],
)
def test_indices_out_of_range(function: str, argument: str, values: list[int], words: str) -> None:
    text = error_of(function, argument, lambda n, shape, dtype: n(np.array(values), dtype))
    assert f" {argument}: got " in text and words in text, text


@pytest.mark.parametrize("block", [-1, 4, 2147483647, -2147483648])
def test_out_of_range_blocks_are_rejected_only_where_read(block: int) -> None:
    with Natives() as native:
        given = build(native, "Attention")
        given["end"] = native(np.array([4, 2]), "i32")
        given["tables"] = native(np.array([[0, 3, block]]), "i32")
        op("Attention", *given.values())
        given["tables"] = native(np.array([[0, block, 3]]), "i32")
        with naming(InvalidInputError, "attention: tables", str(block)):
            op("Attention", *given.values())


@pytest.mark.parametrize("block_size", [0, -1, -2147483648])
def test_block_size(block_size: int) -> None:
    with Natives() as native:
        given = build(native, "Attention") | {"block_size": block_size}
        with naming(InvalidInputError, "attention: block_size"):
            op("Attention", *given.values())


def test_heads_and_odd_sizes() -> None:
    with Natives() as native:
        given = build(native, "Attention")
        for name in ("q", "out"):
            given[name] = native.empty((2, 3, 6), "f32")
        with naming(InvalidInputError, "attention: q"):
            op("Attention", *given.values())
        given = build(native, "Rope")
        for name in ("in", "out"):
            given[name] = native.empty((3, 2, 5), "f32")
        with naming(InvalidInputError, "rope: in"):
            op("Rope", *given.values())
        with naming(InvalidInputError, "topk"):
            op("TopK", native.empty((3, 5), "i32"), native.empty((3, 5), "f32"),
               native.empty((3, 4), "f32"))  # fmt: skip
        with naming(InvalidInputError, "argmax: values"):
            op("Argmax", native.empty((3,), "i64"), native.empty((3,), "f32"),
               native.empty((3, 0), "f32"))  # fmt: skip


def test_linear() -> None:
    with Natives() as native:
        weight = native.keep(LinearWeight(native.empty((5, 3), "f32")))
        x, out, bias = (native.empty(s, "f32") for s in ((4, 3), (4, 5), (5,)))
        weights, outs, biases = (handle_array([t]) for t in (weight, out, bias))
        op("Linear", x, None, 1, weights, biases, outs)

        def rejected(words: str, *arguments: Any) -> None:
            with pytest.raises(InvalidInputError, match=f"linear: .*{words}"):
                op("Linear", *arguments)

        rejected("in is NULL", None, None, 1, weights, None, outs)
        rejected("weight is NULL", x, None, 1, None, None, outs)
        rejected("weight is NULL", x, None, 1, handle_array([None]), None, outs)
        rejected("out is NULL", x, None, 1, weights, None, None)
        rejected("out is NULL", x, None, 1, weights, None, handle_array([None]))
        for n in (0, -1, 65, 2147483647):
            rejected(f"got {n}", x, None, n, weights, None, outs)
        rejected("in", native.empty((4, 2), "f32"), None, 1, weights, None, outs)
        rejected("dtype i32", native.empty((4, 3), "i32"), None, 1, weights, None, outs)
        rejected("out", x, None, 1, weights, None, handle_array([native.empty((4, 6), "f32")]))
        rejected("out", x, None, 1, weights, None, handle_array([native.empty((4, 5), "i64")]))
        rejected("bias", x, None, 1, weights, handle_array([native.empty((4,), "f32")]), outs)
        rejected("rows: got dtype i64", x, native.empty((4,), "i64"), 1, weights, None, outs)
        rejected("rows", x, native.empty((2, 2), "i32"), 1, weights, None, outs)
        for row in (-1, 4):
            rows = native(np.array([0, 0, row, 0]), "i32")
            rejected(f"rows: got {row} at 2", x, rows, 1, weights, None, outs)
        with naming(InvalidInputError, "i8"):
            LinearWeight(native.empty((5, 3), "i8"))
        with naming(InvalidInputError, "shape"):
            LinearWeight(native.empty((5,), "f32"))
