"""Starts the engine process. Imports next to nothing: the model begins to load before the rest of
the server is even read.

The sockets lie in a directory of mode 0700 that is removed by whichever process lives longer.
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
from pathlib import Path
from typing import Any

from llaisys.common.interpreter import child_environment, module_command
from llaisys.server.config import ServerConfig

EXIT_FAILED = 1  # of the engine process, which has then logged why
MAX_BASE_CHARS = 64  # the name of a socket has at most 107


class EngineProcess:
    """The process and the directory of its sockets. Made before the event loop runs."""

    def __init__(self, config: ServerConfig) -> None:
        base = tempfile.gettempdir()
        if len(base) > MAX_BASE_CHARS:
            base = "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="llaisys-", dir=base))  # 0700
        self.input_address = f"ipc://{self.directory}/in"
        self.output_address = f"ipc://{self.directory}/out"
        try:
            self.popen = subprocess.Popen(
                module_command(config.engine_module),
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C reaches the API process only
            )
            assert self.popen.stdin is not None
            self.popen.stdin.write(json.dumps(self._setup(config)).encode() + b"\n")
            self.popen.stdin.flush()
        except BaseException:
            self.remove()
            raise

    def _setup(self, config: ServerConfig) -> dict[str, Any]:
        """The fields of `messages.EngineSetup`, which checks them where they arrive."""
        return {
            "input_address": self.input_address,
            "output_address": self.output_address,
            "socket_directory": str(self.directory),
            "heartbeat_interval": config.health.heartbeat_interval,
            "max_failed_steps": config.health.max_failed_steps,
            "log_level": config.log_level,
            "log_format": config.log_format,
            "engine": config.engine.to_wire(),
        }

    def remove(self) -> None:
        """Kill the process if it lives and remove its sockets; more than once does nothing."""
        popen = getattr(self, "popen", None)
        if popen is not None and popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)  # a stopped process dies of this too
            popen.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
