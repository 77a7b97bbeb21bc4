"""Tensors: owned and mapped storage, views and invalid arguments."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from error_helpers import invalid_input, naming
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import NUMPY, Natives, array, op, tensor

from llaisys.common.errors import ClosedError, InvalidInputError, LlaisysError, NativeError
from llaisys.libllaisys import types
from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.libllaisys.library import lib

ALL = list(NUMPY)


@pytest.mark.parametrize("dtype", ALL)
def test_create_is_zeroed_and_load_store_is_a_round_trip(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape in [(), (1,), (7,), (3, 5), (2, 1, 3, 1, 2, 2), (0,), (3, 0, 2), (1 << 20,)]:
        raw = rng.integers(0, 256, np.prod(shape, dtype=int) * types.DTYPE_BYTES[dtype], np.uint8)
        with Tensor.create(shape, dtype) as made:
            assert (made.shape, made.dtype) == (shape, dtype)
            assert made.is_contiguous and not made.is_mapped
            assert (made.data == 0) == (raw.size == 0) and made.data % 64 == 0
            read = np.full(raw.size, 9, np.uint8)
            made.store(read.ctypes.data, read.nbytes)
            assert not read.any()
            made.load(raw.ctypes.data, raw.nbytes)
            made.store(read.ctypes.data, read.nbytes)
            assert read.tobytes() == raw.tobytes()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((-1,), "negative"),
        ((3, -5), "negative"),
        ((0, -1), "negative"),
        ((1 << 62, 1 << 62), "too many"),
        ((1 << 62, 2, 0), "too many"),
        ((1 << 62,), "overflows"),
        ((1 << 61, 1), "overflows|allocated"),
        ((1,) * 7, "ndim"),
    ],
)
def test_invalid_shapes_are_rejected(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(LlaisysError, match=words):
        Tensor.create(shape, "f32").close()


def test_failed_allocation_is_an_error() -> None:
    with pytest.raises(NativeError) as caught:
        Tensor.create((1 << 50,), "u8").close()
    assert caught.value.code == types.ERROR_MEMORY


def test_arguments_of_create() -> None:
    result = ctypes.c_void_p(1)
    sizes = (ctypes.c_int64 * 2)(2, 3)
    create = lib().llaisysTensorCreate
    assert create(None, 2, 1, 0, 0, ctypes.byref(result)) == types.ERROR_INVALID
    assert not result.value
    assert create(None, 0, 1, 0, 0, ctypes.byref(result)) == 0
    lib().llaisysTensorDestroy(result)
    for ndim in (-1, 7, 2147483647, -2147483648):
        assert create(sizes, ndim, 1, 0, 0, ctypes.byref(result)) == types.ERROR_INVALID
    for dtype in (0, 99, 2147483647):
        assert create(sizes, 2, dtype, 0, 0, ctypes.byref(result)) == types.ERROR_INVALID
        assert b"dtype" in lib().llaisysLastError()
    assert create(sizes, 2, 1, types.DEVICE_NVIDIA, 0, ctypes.byref(result)) == (
        types.ERROR_UNSUPPORTED
    )
    assert b"nvidia" in lib().llaisysLastError()
    assert create(sizes, 2, 1, 3, 0, ctypes.byref(result)) == types.ERROR_INVALID
    for device_id in (-1, 1):
        assert create(sizes, 2, 1, 0, device_id, ctypes.byref(result)) == types.ERROR_INVALID
        assert b"device_id" in lib().llaisysLastError()
    assert create(sizes, 2, 1, 0, 0, None) == types.ERROR_INVALID
    assert not result.value


def test_null_handles_return_errors() -> None:
    native = lib()
    assert native.llaisysTensorData(None) is None
    assert native.llaisysTensorNdim(None) == -1
    assert native.llaisysTensorIsContiguous(None) == -1
    assert native.llaisysTensorIsMapped(None) == -1
    assert native.llaisysTensorDataType(None) == 0
    for call in (native.llaisysTensorShape, native.llaisysTensorStrides):
        assert call(None, None) == types.ERROR_INVALID
    result = ctypes.c_void_p(1)
    assert native.llaisysTensorContiguous(None, ctypes.byref(result)) == types.ERROR_INVALID
    assert native.llaisysTensorSlice(None, 0, 0, 0, ctypes.byref(result)) == types.ERROR_INVALID
    assert native.llaisysTensorLoad(None, None, 0) == types.ERROR_INVALID
    assert b"tensor is NULL" in native.llaisysLastError()
    native.llaisysTensorDestroy(None)


def test_python_side_checks() -> None:
    with invalid_input("dtype"):
        Tensor.create((1,), "q4")
    with invalid_input("shape"):
        Tensor.create((1.5,), "f32")  # type: ignore[arg-type]
    with invalid_input("device"):
        Stream("abacus")
    with Tensor.create((2, 3), "f32") as made, invalid_input("order"):
        made.permute((0,))


def test_use_after_close() -> None:
    made = Tensor.create((2,), "f32")
    made.close()
    made.close()
    for use in (
        lambda: made.shape, lambda: made.data, lambda: made.view((2,)), lambda: made.load(0, 0),
    ):  # fmt: skip
        with naming(ClosedError, "Tensor"):
            use()
    given = Tensor.create((2,), "f32")
    handle = given.handle
    given.release_ownership()
    given.close()  # ownership released: must not free it
    assert lib().llaisysTensorNdim(handle) == 1
    lib().llaisysTensorDestroy(handle)
    with pytest.raises(ClosedError):
        _ = given.handle


# -- Views ----------------------------------------------------------------------------------------


def test_view_outlives_its_tensor() -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    whole = tensor(values, "i32")
    view = whole.slice(0, 1, 3)
    whole.close()
    np.testing.assert_array_equal(array(view), values[1:])
    view.close()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chains_of_views_match_numpy(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4), "shape")
    dtype = data.draw(st.sampled_from(ALL), "dtype")
    expected = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(np.float32)
    with Natives() as native:
        made = native(expected, dtype)
        for _ in range(data.draw(st.integers(1, 4), "depth")):
            kind = data.draw(st.sampled_from(["slice", "permute", "view", "contiguous"]), "kind")
            if kind == "slice":
                dim = data.draw(st.integers(0, expected.ndim - 1), "dim")
                start = data.draw(st.integers(0, expected.shape[dim]), "start")
                end = data.draw(st.integers(start, expected.shape[dim]), "end")
                made = native.keep(made.slice(dim, start, end))
                expected = expected.take(range(start, end), dim)
            elif kind == "permute":
                order = data.draw(st.permutations(range(expected.ndim)), "order")
                made = native.keep(made.permute(order))
                expected = expected.transpose(order)
            elif kind == "contiguous":
                dense = native.keep(made.contiguous())
                assert dense.is_contiguous and (dense.data == made.data) == (
                    made.is_contiguous or expected.size == 0
                )
                made = dense
            else:
                new = data.draw(st.sampled_from(divisions(expected.shape)), "new")
                if made.is_contiguous:
                    made = native.keep(made.view(new))
                else:
                    try:
                        made = native.keep(made.view(new))
                    except InvalidInputError as error:
                        assert "without a copy" in str(error)
                        continue
                expected = expected.reshape(new)
            assert made.shape == expected.shape
            np.testing.assert_array_equal(array(made), expected)


def divisions(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return other shapes with the same number of elements."""
    total = int(np.prod(shape, dtype=int))
    merged = [(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]) for i in range(len(shape) - 1)]
    split = [
        (*shape[:i], 2, size // 2, *shape[i + 1 :])
        for i, size in enumerate(shape)
        if size and size % 2 == 0 and len(shape) < 6
    ]
    return [shape, (total,), (1, total), *merged, *split]


def test_view_of_a_strided_tensor() -> None:
    with Natives() as native:
        whole = native(np.arange(24).reshape(4, 6), "i32")
        columns = native.keep(whole.slice(1, 2, 6))
        split = native.keep(columns.view((4, 2, 2)))
        assert split.strides == (6, 2, 1) and split.data == columns.data
        with naming(InvalidInputError, "view", "[16]"):
            columns.view((16,))
        with naming(InvalidInputError, "16 elements"):
            columns.view((5, 3))


@pytest.mark.parametrize(
    ("dim", "start", "end"),
    [(-1, 0, 1), (2, 0, 1), (0, -1, 2), (0, 2, 1), (0, 0, 5), (0, -(1 << 63), (1 << 63) - 1)],
)
def test_invalid_slices_are_rejected(dim: int, start: int, end: int) -> None:
    with Tensor.create((4, 3), "f32") as made, naming(InvalidInputError, "slice"):
        made.slice(dim, start, end)


@pytest.mark.parametrize("order", [(0, 0), (0, 2), (-1, 0), (2147483647, 0)])
def test_invalid_permutations_are_rejected(order: tuple[int, ...]) -> None:
    with Tensor.create((4, 3), "f32") as made, naming(InvalidInputError, "permute"):
        made.permute(order)


def test_load_and_store_check_size_and_layout() -> None:
    buffer = np.zeros(64, np.uint8)
    with Natives() as native:
        made = native.empty((4, 3), "f32")
        for size in (0, 47, 49, (1 << 64) - 1):
            with naming(InvalidInputError, "48 bytes"):
                made.load(buffer.ctypes.data, size)
            with naming(InvalidInputError, "48 bytes"):
                made.store(buffer.ctypes.data, size)
        with naming(InvalidInputError, "data"):
            made.load(0, 48)
        column = native.keep(made.slice(1, 0, 1))
        with pytest.raises(InvalidInputError):
            column.load(buffer.ctypes.data, 16)


# -- Files ----------------------------------------------------------------------------------------


@pytest.fixture
def values_file(tmp_path: Path) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(1).integers(0, 1 << 31, 5000).astype(np.int32)
    path = tmp_path / "values.bin"
    path.write_bytes(values.tobytes())
    return path, values


def test_mapped_tensor_has_the_bytes_of_the_file(values_file: tuple[Path, np.ndarray]) -> None:
    path, values = values_file
    with Tensor.map(str(path), 400, (7, 3), "i32") as mapped:
        assert mapped.is_mapped and mapped.is_contiguous
        np.testing.assert_array_equal(array(mapped), values[100:121].reshape(7, 3))
        with pytest.raises(InvalidInputError):
            mapped.load(values.ctypes.data, 84)
        with Natives() as native:
            row = native.keep(mapped.slice(0, 2, 3))
            np.testing.assert_array_equal(array(row), values[106:109].reshape(1, 3))
            with naming(InvalidInputError, "rearrange: out"):
                op("Rearrange", row, native.empty((1, 3), "i32"))
            assert row.is_mapped
    assert path.read_bytes() == values.tobytes()


def test_tensors_of_one_file_share_one_mapping(values_file: tuple[Path, np.ndarray]) -> None:
    path, values = values_file

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    assert mappings() == 0
    first = Tensor.map(str(path), 0, (10,), "i32")
    second = Tensor.map(str(path), 4000, (10,), "f32")
    assert mappings() == 1 and second.data - first.data == 4000
    first.close()
    assert mappings() == 1
    view = second.slice(0, 1, 4)
    second.close()
    assert array(view).view(np.int32).tobytes() == values[1001:1004].tobytes()
    view.close()
    assert mappings() == 0


@pytest.mark.parametrize("dtype", ALL)
def test_misaligned_offset_copies(dtype: str, values_file: tuple[Path, np.ndarray]) -> None:
    path, values = values_file
    size = types.DTYPE_BYTES[dtype]
    raw = values.tobytes()
    for offset in range(9):
        with Tensor.map(str(path), offset, (33,), dtype) as made:
            assert made.is_mapped == (offset % size == 0) and made.data % size == 0
            read = np.empty(33 * size, np.uint8)
            made.store(read.ctypes.data, read.nbytes)
            assert read.tobytes() == raw[offset : offset + 33 * size]


def test_short_file_is_rejected(values_file: tuple[Path, np.ndarray]) -> None:
    path, _ = values_file
    Tensor.map(str(path), 20000 - 4, (1,), "i32").close()
    for offset, shape in (
        (20000 - 3, (1,)), (0, (5001,)), (20000, (1,)), (20001, (0,)), ((1 << 64) - 4, (1,)),
        (0, (1 << 60,)),
    ):  # fmt: skip
        with pytest.raises(NativeError) as caught:
            Tensor.map(str(path), offset, shape, "i32")
        assert caught.value.code == types.ERROR_IO
        assert str(path) in str(caught.value)


def test_missing_and_irregular_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    cases = [(tmp_path / "missing", "No such file"), (tmp_path, "not a regular file"),
             (tmp_path / "empty", "too short"), (tmp_path / "gone" / "file", "No such file"),
             (tmp_path / "pipe", "not a regular file"),  # without waiting for a writer
             (Path("/dev/zero"), "not a regular file")]  # fmt: skip
    for path, words in cases:
        with pytest.raises(NativeError, match=words) as caught:
            Tensor.map(str(path), 0, (1,), "f32")
        assert caught.value.code == types.ERROR_IO
    with Tensor.map(str(tmp_path / "empty"), 0, (0, 4), "f32") as nothing:
        assert nothing.shape == (0, 4)
    result = ctypes.c_void_p()
    sizes = (ctypes.c_int64 * 1)(1)
    assert lib().llaisysTensorMap(None, 0, sizes, 1, 1, ctypes.byref(result)) == -1
    assert lib().llaisysTensorMap(b"/x", 0, None, 1, 1, ctypes.byref(result)) == -1
    assert lib().llaisysTensorMap(b"/x", 0, sizes, 1, 0, ctypes.byref(result)) == -1
    assert lib().llaisysTensorMap(b"/x", 0, sizes, 1, 1, None) == -1


def test_replaced_file_gets_its_own_mapping(values_file: tuple[Path, np.ndarray]) -> None:
    path, values = values_file
    old = Tensor.map(str(path), 0, (4,), "i32")
    other = path.with_suffix(".new")
    other.write_bytes((values + 1).tobytes())
    other.replace(path)
    new = Tensor.map(str(path), 0, (4,), "i32")
    np.testing.assert_array_equal(array(old), values[:4])  # the bytes it was opened with
    np.testing.assert_array_equal(array(new), values[:4] + 1)
    old.close()
    np.testing.assert_array_equal(array(new), values[:4] + 1)
    new.close()
    path.unlink()
    with pytest.raises(NativeError):
        Tensor.map(str(path), 0, (4,), "i32")


def test_operators_read_mapped_files_in_place(values_file: tuple[Path, np.ndarray]) -> None:
    path, _ = values_file
    floats = np.random.default_rng(2).standard_normal((20, 5), np.float32)
    path.write_bytes(b"head" + floats.tobytes())
    with Natives() as native:
        table = native.keep(Tensor.map(str(path), 4, (20, 5), "f32"))
        assert table.is_mapped
        out = native.empty((2, 5), "f32")
        op("Embedding", out, native(np.array([19, 3]), "i64"), table)
        np.testing.assert_array_equal(array(out), floats[[19, 3]])
