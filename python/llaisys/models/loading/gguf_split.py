"""GGUF models split into several files, `NAME-00001-of-0000N.gguf`.

The first file has the metadata of the model. Every file has its own tensors and `split.no` (from
0), `split.count` and `split.tensors.count` (of all files).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_reader import MAX_TENSORS, GgufHeader, read_gguf_header

MAX_PARTS = 99_999
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def first_part(paths: Sequence[Path]) -> Path | None:
    """The first file when the paths are all parts of one model; None otherwise."""
    matches = [_NAME.fullmatch(path.name) for path in paths]
    names = {(m[1], m[3]) for m in matches if m is not None}
    if None in matches or len(names) != 1 or len(paths) != int(next(iter(names))[1]):
        return None
    return min(paths)


def read_gguf_parts(path: Path) -> GgufHeader:
    """The header of a GGUF file, with the tensors of all parts when it is one of a split model."""
    header = read_gguf_header(path)
    count = _integer(header, path, "split.count", 0, MAX_PARTS, 0)
    if count <= 1:
        return header
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelLoadError(
            f"{path}: one of {count} files of a model; its name must end with "
            f"-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    headers = [header if other == path else read_gguf_header(other) for other in paths]
    first = headers[0]
    tensors = dict(first.tensors)
    for number, (other, part) in enumerate(zip(paths, headers, strict=True)):
        found = _integer(part, other, "split.no", 0, MAX_PARTS, -1)
        of = _integer(part, other, "split.count", 0, MAX_PARTS, -1)
        if (found, of) != (number, count):
            raise ModelLoadError(
                f"{other}: split.no is {found} of {of}; expected {number} of {count}"
            )
        for name in part.tensors.keys() & tensors.keys() if number else ():
            raise ModelLoadError(f"{other}: tensor {name!r} is in two files")
        tensors |= part.tensors
    total = _integer(first, paths[0], "split.tensors.count", 0, MAX_TENSORS, len(tensors))
    if total != len(tensors):
        raise ModelLoadError(f"{path}: the files have {len(tensors)} tensors; expected {total}")
    return GgufHeader(first.metadata, tensors)


def _integer(header: GgufHeader, path: Path, key: str, low: int, high: int, default: int) -> int:
    return Fields(header.metadata, str(path)).integer(key, low, high, default)
