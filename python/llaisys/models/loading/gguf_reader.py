"""Bounds-checked reader of GGUF headers: metadata and tensor table, no tensor data.

The file is untrusted. Every length is checked against the rest of the file before any allocation,
every value is read with its declared type, and every error is a `ModelLoadError` that names the key
or tensor.
"""

import struct
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.file_range import TRUNCATED, FileIdentity
from llaisys.tokenization.source import PackedStrings

READ_BYTES = 1 << 20
MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 24
MAX_STRINGS = 1 << 22  # in all arrays of a file
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i"},
    **{6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"},
}

# ggml type number -> (name, elements per block, bytes per block)
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table; `shape` is row-major (the reverse of the file's order)."""

    name: str
    type_id: int  # key of GGML_TYPES
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int
    path: Path
    file: FileIdentity

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type_id][0]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata values are int, float, bool, str, PackedStrings, or numpy arrays of numbers."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Bounds-checked sequential reads through a buffer window over the file.

    `take` returns copies, because the window moves.
    """

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream = stream
        self.path = path
        self.file = FileIdentity.of(stream.fileno())
        self.size = self.file.size
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.window = b""
        self.window_start = 0  # of `window` in the file
        self.at = 0  # in `window`
        self.strings_left = MAX_STRINGS

    @property
    def position(self) -> int:
        """Bytes of the file consumed so far."""
        return self.window_start + self.at

    def fail(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {why}")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if self.at + count > len(self.window):
            self._fill(count, what)
        start, self.at = self.at, self.at + count
        return self.window[start : self.at]

    def _fill(self, count: int, what: str) -> None:
        """Move the window to the current position with at least `count` bytes."""
        position = self.position
        if position + count > self.limit:
            whole = self.limit == self.size
            raise self.fail(
                f"{what}: {count} bytes at byte {position} end past the "
                f"{'file' if whole else 'header limit'} ({self.limit}){TRUNCATED if whole else ''}"
            )
        left = self.window[self.at :]
        more = min(max(count, READ_BYTES), self.limit - position) - len(left)
        self.window, self.window_start, self.at = left + self.stream.read(more), position, 0
        if count > len(self.window):
            raise self.fail(f"{what}: the file ends at byte {position + len(self.window)}")

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, limit: int, what: str) -> str:
        length = self.scalar("<Q", what)
        if length > limit:
            raise self.fail(f"{what}: string of {length} bytes, more than {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: not UTF-8: {error.reason}") from error

    def strings(self, count: int, limit: int, what: str) -> PackedStrings:
        """`count` consecutive strings, faster than repeated `string` calls."""
        data, ends = bytearray(), array("I")
        unpack = struct.Struct("<Q").unpack_from
        while len(ends) < count:
            window, at = self.window, self.at
            last = len(window) - 8
            try:
                while at <= last and len(ends) < count:
                    end = at + 8 + unpack(window, at)[0]
                    if end > len(window):
                        break
                    piece = window[at + 8 : end]
                    str(piece, "utf-8")  # raises
                    data += piece
                    ends.append(len(data))
                    at = end
            except UnicodeDecodeError as error:
                raise self.fail(f"{what}: item {len(ends)}: not UTF-8") from error
            self.at = at
            if len(ends) < count:  # the next string is not entirely in the window
                data += self.string(limit, what).encode()
                ends.append(len(data))
        return PackedStrings(bytes(data), ends.tobytes())

    def count(self, limit: int, item_bytes: int, what: str) -> int:
        """A 64-bit count of items that take at least `item_bytes` each in the file."""
        value = int(self.scalar("<Q", what))
        if value > limit or value * item_bytes > self.limit - self.position:
            raise self.fail(
                f"{what}: {value} does not fit (limit {limit}, file {self.size} bytes)"
                f"{'' if value > limit else TRUNCATED}"
            )
        return value


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        return cursor.string(MAX_STRING_BYTES, what)
    if kind not in _SCALARS:
        raise cursor.fail(f"{what}: unknown value type {kind}")
    value = cursor.scalar(_SCALARS[kind], what)
    if kind == _BOOL:
        if value > 1:
            raise cursor.fail(f"{what}: boolean with value {value}")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, what: str) -> PackedStrings | npt.NDArray[Any]:
    kind = cursor.scalar("<I", what)
    if kind == _STRING:
        count = cursor.count(cursor.strings_left, 8, what)
        cursor.strings_left -= count
        return cursor.strings(count, MAX_STRING_BYTES, what)
    if kind not in _SCALARS:
        name = "nested array" if kind == _ARRAY else f"unknown type {kind}"
        raise cursor.fail(f"{what}: array of {name}")
    dtype = np.dtype(_SCALARS[kind])
    count = cursor.count(MAX_ARRAY_ITEMS, dtype.itemsize, what)
    values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype=dtype)
    if kind == _BOOL and (values > 1).any():
        raise cursor.fail(f"{what}: array of booleans with a value above 1")
    return values.astype(bool) if kind == _BOOL else values


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        key = cursor.string(MAX_KEY_BYTES, f"key {number}")
        what = f"metadata {key[:80]!r}"
        if not key or key in metadata:
            raise cursor.fail(f"{what}: {'given twice' if key else 'empty key'}")
        kind = cursor.scalar("<I", what)
        if kind == _ARRAY:
            metadata[key] = _read_array(cursor, what)
        else:
            metadata[key] = _read_value(cursor, kind, what)
    return metadata


def _read_tensor_info(cursor: _Cursor, number: int, alignment: int) -> GgufTensor:
    """One table row; `offset` is relative to the start of the data section."""
    name = cursor.string(MAX_NAME_BYTES, f"tensor {number}")
    what = f"tensor {name!r}"
    dims = cursor.scalar("<I", what)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{what}: {dims} dimensions, outside 1..{MAX_DIMS}")
    sizes = [cursor.scalar("<Q", what) for _ in range(dims)]
    type_id = cursor.scalar("<I", what)
    offset = cursor.scalar("<Q", what)
    if type_id not in GGML_TYPES:
        raise cursor.fail(f"{what}: unknown tensor type {type_id}")
    type_name, block, block_bytes = GGML_TYPES[type_id]
    elements = 1
    for size in sizes:
        elements *= size
        if not 1 <= size < 1 << 48 or elements >= 1 << 48:
            raise cursor.fail(f"{what}: shape {sizes} is empty or too large")
    if sizes[0] % block:
        raise cursor.fail(f"{what}: rows of {sizes[0]} are not a multiple of {type_name}'s {block}")
    if offset % alignment:
        raise cursor.fail(f"{what}: offset {offset} is not a multiple of {alignment}")
    nbytes = elements // block * block_bytes
    shape = tuple(reversed(sizes))
    return GgufTensor(name, type_id, shape, offset, nbytes, cursor.path, cursor.file)


def _resolve_offsets(
    cursor: _Cursor, infos: list[GgufTensor], alignment: int
) -> dict[str, GgufTensor]:
    """Convert to file offsets; check that each range is inside the file and none overlap."""
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        end = data_start + info.offset + info.nbytes
        if end > cursor.size:
            raise cursor.fail(
                f"tensor {info.name!r}: {info.nbytes} bytes end at byte {end}, past the file's "
                f"{cursor.size}{TRUNCATED}"
            )
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r}: given twice")
        tensors[info.name] = replace(info, offset=data_start + info.offset)
    previous_end, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < previous_end:
            raise cursor.fail(f"tensors {previous!r} and {tensor.name!r} overlap")
        previous_end, previous = tensor.offset + tensor.nbytes, tensor.name
    return tensors


def _read(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4, "magic") != b"GGUF":
        raise cursor.fail("not a GGUF file (wrong magic)")
    version = cursor.scalar("<I", "version")
    if version not in (2, 3):
        swapped = " (big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise cursor.fail(f"GGUF version {version}{swapped} is not supported; known: 2, 3")
    num_tensors = cursor.count(MAX_TENSORS, 24, "tensor count")
    num_keys = cursor.count(MAX_KEYS, 13, "metadata count")
    metadata = _read_metadata(cursor, num_keys)
    fields = Fields(metadata, str(cursor.path))
    alignment = fields.integer("general.alignment", 1, MAX_ALIGNMENT, DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise fields.fail("general.alignment", f"is {alignment}; it must be a power of two")
    infos = [_read_tensor_info(cursor, number, alignment) for number in range(num_tensors)]
    return GgufHeader(metadata, _resolve_offsets(cursor, infos, alignment))


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check the header of the GGUF file at `path`."""
    try:
        with path.open("rb") as stream:
            return _read(_Cursor(stream, path))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
