"""A child process that runs a module of this package: both sides.

Its setup is one line of JSON on standard input, which stays open: at end of file the parent has
exited, and the child removes the socket directory and exits. The directory has mode 0700.

Few imports, so that the child starts before its parent has imported its other modules.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llaisys.common.interpreter import child_environment, module_command

EXIT_FAILED = 1  # the log has the reason
EXIT_ORPHAN = 2
MAX_BASE_CHARS = 64  # socket names have at most 107 characters


class ChildProcess:
    """A process and its socket directory. The owner must call `remove`."""

    popen: subprocess.Popen[bytes]

    def __init__(self, module: str, setup: Mapping[str, Any], pass_fds: Sequence[int] = ()) -> None:
        """Start a child with `setup` plus socket addresses and directory; it inherits `pass_fds`.
        After a failure nothing is left."""
        base = tempfile.gettempdir()
        if len(base) > MAX_BASE_CHARS:
            base = "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="llaisys-", dir=base))  # 0700
        self.input_address = f"ipc://{self.directory}/in"
        self.output_address = f"ipc://{self.directory}/out"
        sockets = {
            "input_address": self.input_address,
            "output_address": self.output_address,
            "socket_directory": str(self.directory),
        }
        try:
            self.popen = subprocess.Popen(
                module_command(module),
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                # A group of its own: Ctrl-C reaches the parent only. In the parent's session: the
                # kernel sends a stopped child SIGHUP and SIGCONT when the parent ends.
                process_group=0,
                pass_fds=pass_fds,
            )
            assert self.popen.stdin is not None
            self.popen.stdin.write(json.dumps({**setup, **sockets}).encode() + b"\n")
            self.popen.stdin.flush()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Kill the process and remove its sockets; idempotent."""
        popen = getattr(self, "popen", None)
        if popen is not None and popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)  # also ends a stopped process
            popen.wait()
        if popen is not None and popen.stdin is not None:
            with contextlib.suppress(OSError):  # unread data
                popen.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# ---- in the child --------------------------------------------------------------------------------


def exit_when_orphaned(seconds: float = 0.5) -> None:
    """Exit when the parent process has ended, checked every `seconds` in a thread. For processes
    whose standard input is not a pipe from the parent."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_parent(stream: BinaryIO, directory: str) -> None:
    """Exit when standard input, read in a thread, is closed."""

    def watch() -> None:
        while stream.read(4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, daemon=True).start()
