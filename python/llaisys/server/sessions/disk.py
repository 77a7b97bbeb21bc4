"""Disk space of the session file: a reserve with which sessions can be deleted on a full disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVED_BYTES = 1 << 20
CHUNK_BYTES = 16 << 10  # per write
MIN_FREE_BYTES = 1 << 20  # on the disk, for new contents


class DiskReserve:
    """A file of up to RESERVED_BYTES. SQLite needs space to delete rows and to open a file (its log
    and index); on a full disk the file is removed to make it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> None:
        """Write the file, or what is missing of it; on a full disk it stays shorter."""
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:
            while (missing := RESERVED_BYTES - file.tell()) > 0:
                file.write(bytes(min(missing, CHUNK_BYTES)))
            os.fsync(file.fileno())  # allocates the blocks

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def free_bytes(path: Path) -> int:
    """Return the bytes that can be written to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
