"""`llaisys` in a pseudo terminal, for tests of interactive input and output."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time


class Terminal:
    """A process whose standard streams are a pseudo terminal; `output`: all of its output."""

    def __init__(
        self,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "llaisys"),
        env: dict[str, str] | None = None,
        seconds: float = 120.0,
    ) -> None:
        self.output = ""
        self._read = 0  # characters of `output` returned by `read_until`
        self._deadline = time.monotonic() + seconds  # in case it hangs
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", **(env or {})},  # no escapes from readline
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: str) -> str:
        """Output since the last call, up to and including `text`."""
        while (found := self.output.find(text, self._read)) < 0:
            assert self._receive(), f"ended before {text!r}:\n{self.output}"
        begin, self._read = self._read, found + len(text)
        return self.output[begin : self._read]

    @property
    def screen(self) -> str:
        """`output` as displayed: text after a carriage return overwrites the line."""
        lines = []
        for line in self.output.split("\n"):
            seen = ""
            for layer in line.split("\r"):
                seen = layer + seen[len(layer) :]
            lines.append(seen.rstrip())
        return "\n".join(lines)

    def wait(self) -> int:
        """Read all output and return the exit status."""
        while self._receive():
            pass
        return self.process.wait(max(0.0, self._deadline - time.monotonic()))

    def _receive(self) -> bool:
        """False at the end."""
        left = self._deadline - time.monotonic()
        ready, _, _ = select.select([self._master], [], [], max(0.0, left))
        assert ready, f"nothing more came:\n{self.output}"
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # raised by Linux after the last process has closed it
            return False
        self.output += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
