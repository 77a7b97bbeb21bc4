"""A lock that one process at a time can hold, and that ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """`flock` on a file of its own. SQLite has locks of its own on the database, which closing any
    other descriptor of the same file would drop. The file stays; it holds the holder's pid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """None: held from now on. Otherwise who holds it, in words. Never waits; OSError where the
        file cannot be made or its filesystem has no locks."""
        # Not inherited: the lock ends with this process even if a child outlives it.
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            return f"process {pid}" if pid.isdigit() else "another process"
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Harmless when it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
