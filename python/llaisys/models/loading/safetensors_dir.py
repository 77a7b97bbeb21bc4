"""Hugging Face model directories: config.json and one or more safetensors files.

Only headers are read here; weights are read directly into native memory. The header checks are
those of the safetensors reference implementation: 100 MB limit, no duplicate names, byte count
equal to shape times element size, and data ranges that tile the file exactly.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.common.validation import is_int
from llaisys.models.loading.checkpoint import Checkpoint, TensorRecord
from llaisys.models.loading.convert import Array, convert
from llaisys.models.loading.family import Family
from llaisys.models.loading.file_range import TRUNCATED, FileIdentity
from llaisys.tokenization.json_file import read_json_object, resolve_inside
from llaisys.tokenization.source import TokenizerSource

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
INDEX_NAME = "model.safetensors.index.json"

# Bits per element of every dtype of the format; only those in USABLE can be weights.
_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"BF16": 16, "F16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
INTEGERS = ("I64", "I32", "I16")  # of tables of token ids
USABLE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def read_header(path: Path) -> dict[str, TensorRecord]:
    """The tensors of one safetensors file, by name, in file order.

    The record's dtype is 'f32', 'f16' or 'bf16', or the file's name of an unsupported dtype. Raises
    `ModelLoadError` for any violation of the format, and for a link out of the directory.
    """
    path = resolve_inside(path)
    try:
        with path.open("rb") as stream:
            file = FileIdentity.of(stream.fileno())
            length = int.from_bytes(stream.read(8), "little")
            if file.size < 8:
                raise ModelLoadError(
                    f"{path}: {file.size} bytes is too short for safetensors{TRUNCATED}"
                )
            limit = min(MAX_HEADER_BYTES, file.size - 8)
            if not 2 <= length <= limit:
                short = limit < length <= MAX_HEADER_BYTES
                # The length is not shown: it is the first 8 bytes of a file of any kind.
                raise ModelLoadError(
                    f"{path}: the length of its header is outside 2..{limit}"
                    f"{TRUNCATED if short else '; it is not a safetensors file'}"
                )
            raw = stream.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) != length or raw[:1] != b"{":
        raise ModelLoadError(f"{path}: the header is not a JSON object")
    data_start = 8 + length
    header = _parse_header(raw, path)
    records = [
        _parse_entry(name, entry, path, data_start, file)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return _check_tiling(records, path, data_start, file)


def _parse_header(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise ModelLoadError(f"{path}: the header names {twice!r} twice")
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except ModelLoadError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: the header is not valid JSON: {error}") from error
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelLoadError(f"{path}: __metadata__ must map strings to strings")
    return dict(header)


def _natural(value: object) -> bool:
    return is_int(value, 0, (1 << 63) - 1)


def _parse_entry(
    name: str, entry: object, path: Path, data_start: int, file: FileIdentity
) -> TensorRecord:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where}: expected exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        raise ModelLoadError(f"{where}: unknown dtype {str(kind)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_natural, shape)):
        raise ModelLoadError(f"{where}: shape is not a list of at most {MAX_DIMS} naturals")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise ModelLoadError(f"{where}: data_offsets is not a pair of naturals")
    begin, end = offsets
    if begin > end or data_start + end > file.size:
        raise ModelLoadError(
            f"{where}: bytes {begin}..{end} of the data do not lie in a file of {file.size} bytes"
            f"{'' if begin > end else TRUNCATED}"
        )
    bits = _BITS[kind]
    for size in shape:
        bits *= size
        if bits >= 1 << 66:
            raise ModelLoadError(f"{where}: shape {shape} is too large")
    if bits != 8 * (end - begin):
        raise ModelLoadError(
            f"{where}: {kind} of shape {shape} is {bits // 8} bytes, the header gives {end - begin}"
        )
    dtype = USABLE.get(kind, kind)
    return TensorRecord(name, dtype, tuple(shape), path, data_start + begin, end - begin, file)


def _check_tiling(
    records: list[TensorRecord], path: Path, data_start: int, file: FileIdentity
) -> dict[str, TensorRecord]:
    """Check that the data ranges have no overlap or gap and end with the file."""
    records.sort(key=lambda record: (record.offset, record.nbytes))
    expected = data_start
    for record in records:
        if record.offset != expected:
            what = "overlaps the one before it" if record.offset < expected else "leaves a gap"
            raise ModelLoadError(
                f"{path}: tensor {record.name!r} at byte {record.offset} {what} "
                f"(expected {expected})"
            )
        expected += record.nbytes
    if expected != file.size:
        raise ModelLoadError(f"{path}: the tensors end at byte {expected}, the file at {file.size}")
    return {record.name: record for record in records}


def _read_index(directory: Path) -> dict[str, str]:
    """weight_map of the index: tensor name -> file name inside `directory`."""
    path = directory / INDEX_NAME
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: 'weight_map' is missing or not an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _plain_name(shard):
            raise ModelLoadError(
                f"{path}: tensor {name!r} names the file {str(shard)[:80]!r}, which is not a "
                "plain .safetensors name inside the model directory"
            )
    return weight_map


def _plain_name(name: str) -> bool:
    bad = any(c in name for c in "/\\:\0") or name.startswith(".") or not name.isprintable()
    return not bad and name.endswith(".safetensors")


def find_tensors(directory: Path) -> dict[str, TensorRecord]:
    """Every tensor of a model directory by name, using the index if present."""
    if (directory / INDEX_NAME).is_file():
        weight_map = _read_index(directory)
        shards = {}
        for shard in dict.fromkeys(weight_map.values()):
            if not (directory / shard).is_file():
                raise ModelLoadError(f"{directory}: shard {shard!r} of the index is missing")
            shards[shard] = read_header(directory / shard)
        tensors = {}
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise ModelLoadError(
                    f"{directory}: the index places tensor {name!r} in {shard!r}, which lacks it"
                )
            tensors[name] = shards[shard][name]
        return tensors
    single = directory / "model.safetensors"
    if not single.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            raise ModelLoadError(_no_weights(directory, len(files)))
        single = files[0]
    return read_header(single)


def _no_weights(directory: Path, count: int) -> str:
    if count:
        return f"{directory}: {count} safetensors files but no {INDEX_NAME}"
    pickles = [p.name for p in sorted(directory.glob("*.bin"))]
    hint = f" ({pickles[0]} is a pickle and is never loaded)" if pickles else ""
    return f"{directory}: no model.safetensors, no {INDEX_NAME} and no .gguf file{hint}"


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face directory with unquantised weights. Every tensor has a record."""

    def __init__(self, directory: Path, family: Family, config: Any) -> None:
        """`family` and `config`: the result of `read_config`."""
        self.directory = directory
        self.where = str(directory)
        self.family, self.config = family, config
        self._tensors: Mapping[str, TensorRecord] = find_tensors(directory)
        if self.config.dtype == "auto":
            self.config = replace(self.config, dtype=self._weights_dtype())
        self.tokenizer_source = TokenizerSource.of_directory(directory, self.config.eos_token_ids)

    def _weights_dtype(self) -> str:
        """The most common dtype of the matrices."""
        dtypes = Counter(r.dtype for r in self._tensors.values() if len(r.shape) > 1)
        dtype = dtypes.most_common(1)[0][0] if dtypes else "f32"
        return dtype if dtype in USABLE.values() else "f32"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def record(self, name: str) -> TensorRecord | None:
        return self._usable(name)

    def _usable(self, name: str) -> TensorRecord:
        record: TensorRecord = self._find(name)
        if record.dtype not in USABLE.values():
            raise ModelLoadError(
                f"{record.path}: tensor {name!r} has element type {record.dtype}; "
                f"usable: {', '.join(USABLE)}"
            )
        return record

    def read(self, name: str, dtype: str) -> Array:
        record = self._usable(name)
        return convert(record.read(), record.dtype, dtype)

    def read_integers(self, name: str) -> Array:
        record = self._find(name)
        if record.dtype not in INTEGERS:
            return super().read_integers(name)
        return record.read().astype(np.int64)
