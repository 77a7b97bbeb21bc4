"""Reads ranges of model files without mmap.

Access to a mapped file that was truncated kills the process (SIGBUS), even long after the load.
Reading directly into the destination costs no more than mapping, and a file that is truncated or
written during the load raises an error.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llaisys.common.errors import ModelLoadError

MAX_READ = 1 << 30  # Linux reads at most 2 GiB per call

TRUNCATED = "; the file is truncated or damaged"  # suffix of errors about reads past the end


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identity of a file when its header was read; a later difference means it changed."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_range(path: Path, offset: int, target: memoryview, expected: FileIdentity) -> None:
    """Fill `target` with the bytes from `offset` on. `ModelLoadError` if the file differs from
    `expected` before or after the read."""
    read_rows(path, offset, len(target), 0, target, expected)


def read_rows(
    path: Path, offset: int, width: int, stride: int, target: memoryview, expected: FileIdentity
) -> None:
    """Like `read_range` for rows of `width` bytes at `offset`, `offset + stride`, ..."""
    if stride == width:  # adjacent rows: one read, not one per row
        width = len(target)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            unchanged = FileIdentity.of(descriptor) == expected
            for row in range(len(target) // width if width else 0):
                rest = target[row * width : (row + 1) * width]
                position = offset + row * stride
                while len(rest) and unchanged:
                    count = os.preadv(descriptor, [rest[:MAX_READ]], position)
                    unchanged = count > 0
                    rest, position = rest[count:], position + count
            if not unchanged or FileIdentity.of(descriptor) != expected:
                raise ModelLoadError(f"{path}: the file changed while it was being loaded")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
