"""Bytes of a model file, read and never mapped.

A mapped file that somebody truncates kills the process that touches it (SIGBUS), also long after
the load. Reading straight into the memory where the bytes are wanted costs no more than mapping
does, and a file that is cut short or written to meanwhile is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llaisys.common.errors import ModelLoadError

_PIECE = 1 << 30  # the system reads at most 2 GiB at once

TRUNCATED = "; the file is truncated or damaged"  # behind what was looked for past its end


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What a file was when its header was read."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_range(path: Path, offset: int, target: memoryview, expected: FileIdentity) -> None:
    """Fill `target` with the bytes from `offset` on; `ModelLoadError` unless the file is still
    the expected one, before and after."""
    read_rows(path, offset, len(target), 0, target, expected)


def read_rows(
    path: Path, offset: int, width: int, stride: int, target: memoryview, expected: FileIdentity
) -> None:
    """The same for rows of `width` bytes that lie `stride` bytes apart from `offset` on."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = FileIdentity.of(descriptor) == expected
            for row in range(len(target) // width if width else 0):
                rest = target[row * width : (row + 1) * width]
                at = offset + row * stride
                while len(rest) and whole:
                    count = os.preadv(descriptor, [rest[:_PIECE]], at)
                    whole = count > 0
                    rest, at = rest[count:], at + count
            if not whole or FileIdentity.of(descriptor) != expected:
                raise ModelLoadError(f"{path}: the file changed while it was being loaded")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
