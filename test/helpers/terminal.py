"""`llaisys` in a terminal of its own, for tests of what people see and type there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time


class Terminal:
    """A process whose standard streams are a pseudo terminal; `output` is all that it wrote."""

    def __init__(
        self,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "llaisys"),
        env: dict[str, str] | None = None,
        seconds: float = 120.0,
    ) -> None:
        self.output = ""
        self._read = 0  # of `output`, by `read_until`
        self._deadline = time.monotonic() + seconds  # for when it hangs
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
        """What came up to and with `text`, from where the last call ended."""
        while (found := self.output.find(text, self._read)) < 0:
            assert self._receive(), f"ended before {text!r}:\n{self.output}"
        begin, self._read = self._read, found + len(text)
        return self.output[begin : self._read]

    @property
    def screen(self) -> str:
        """`output` as it is seen: what comes after a carriage return lies over what was there."""
        lines = []
        for line in self.output.split("\n"):
            seen = ""
            for layer in line.split("\r"):
                seen = layer + seen[len(layer) :]
            lines.append(seen.rstrip())
        return "\n".join(lines)

    def wait(self) -> int:
        """The exit status, when everything that it wrote has been read."""
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
        except OSError:  # what Linux says when the last process has closed it
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
