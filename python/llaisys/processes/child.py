"""A child process that runs a module of ours, seen from both sides.

Its setup is one line of JSON on standard input, which stays open: when it ends, the parent is gone,
and the child removes the socket directory and exits at once, so it never outlives the parent. The
directory has mode 0700 and is removed by whichever of the two lives longer.

Imports next to nothing, so that a child starts before the rest of its parent is even read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llaisys.common.interpreter import child_environment, module_command

EXIT_FAILED = 1  # of a child that has said why in the log
EXIT_ORPHAN = 2
MAX_BASE_CHARS = 64  # the name of a socket has at most 107


class ChildProcess:
    """The process and the directory of its sockets. `remove` must be called in the end."""

    popen: subprocess.Popen[bytes]

    def __init__(self, module: str, setup: Mapping[str, Any], pass_fds: Sequence[int] = ()) -> None:
        """The child reads `setup`, with the two addresses and the directory of the sockets added,
        and inherits `pass_fds` under their numbers. A child that cannot be started leaves nothing
        behind."""
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
                start_new_session=True,  # Ctrl-C reaches the parent only
                pass_fds=pass_fds,
            )
            assert self.popen.stdin is not None
            self.popen.stdin.write(json.dumps({**setup, **sockets}).encode() + b"\n")
            self.popen.stdin.flush()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Kill the process if it lives and remove its sockets; more than once does nothing."""
        popen = getattr(self, "popen", None)
        if popen is not None and popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)  # a stopped process dies of this too
            popen.wait()
        if popen is not None and popen.stdin is not None:
            with contextlib.suppress(OSError):  # what was never read
                popen.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# ---- in the child --------------------------------------------------------------------------------


def exit_with_parent(stream: BinaryIO, directory: str) -> None:
    """Watch standard input in a thread: nothing follows the setup, so the next thing is its end."""

    def watch() -> None:
        while stream.read(4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, daemon=True).start()
