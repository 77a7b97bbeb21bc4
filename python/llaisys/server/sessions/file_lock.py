"""A lock file for one process at a time; the kernel releases it when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class FileLock:
    """`flock` on a separate file with the pid of the holder: closing another descriptor of the
    database file would release SQLite's own locks. The file is not removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Acquire without waiting. Returns None on success, else a description of the holder.
        Raises OSError if the file cannot be created or the filesystem has no locks."""
        # O_CLOEXEC: a child that outlives this process must not keep the lock.
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
        with contextlib.suppress(OSError):  # full disk: the lock is held without a pid
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
