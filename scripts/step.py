#!/usr/bin/env python3
"""Run one step of a set-up: show how far it is, keep its output, explain a failure.

    scripts/step.py [--hint TEXT] TITLE LOG -- COMMAND...

A terminal shows one line that is refreshed. Elsewhere a line is printed at least every 5 seconds.
LOG receives all output; its end is printed if the command fails, with LOG's name and the hint.
With VERBOSE=1 in the environment the output itself is printed. The exit status is the command's.

Progress is read from the output: `[12/127] ...` of ninja, the package names of pip.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

LINE_SECONDS = 4.0  # between two lines where there is no terminal
REFRESH_SECONDS = 0.2
TAIL_LINES = 30

NINJA = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
PIP = re.compile(r"^\s*(Collecting|Downloading|Building wheel for|Installing collected) (\S+)")


def seconds(duration: float) -> str:
    """`8 s`, `2 min 05 s`."""
    whole = round(duration)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def progress_of(line: str) -> str | None:
    """What a line of output says about how far the command is, or None."""
    if match := NINJA.match(line):
        done, total, what = match.groups()
        file = what.split()[-1].removesuffix(".o")
        return f"{done} of {total}  {'/'.join(file.split('/')[-2:])}"
    if match := PIP.match(line):
        verb, name = match.groups()
        if verb == "Installing collected":
            return "unpacking"
        return f"{verb.split()[0].lower()} {name.rsplit('/', 1)[-1]}"
    return None


class Display:
    """The state of one step on stdout."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.terminal = sys.stdout.isatty()
        self.begin = time.monotonic()
        self.progress = ""
        self._shown = self.begin
        if not self.terminal:
            print(f"{title} ...", flush=True)

    def refresh(self) -> None:
        """Show the state if that is due."""
        now = time.monotonic()
        if now - self._shown < (REFRESH_SECONDS if self.terminal else LINE_SECONDS):
            return
        self._shown = now
        text = f"{self.title}: {seconds(now - self.begin)}  {self.progress}"
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)
        else:
            print(f"  {text}", flush=True)

    def finish(self, status: int) -> None:
        """Replace the state by the result."""
        result = "done" if status == 0 else f"failed with status {status}"
        took = seconds(time.monotonic() - self.begin)
        print(f"{chr(13) + chr(27) + '[K' if self.terminal else ''}{self.title}: {result}, {took}")


def run(command: list[str], log: Path, display: Display) -> int:
    """Run the command, its output into `log` and its progress onto the display."""
    verbose = os.environ.get("VERBOSE", "") not in ("", "0")
    lines: queue.Queue[str | None] = queue.Queue()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )

        before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                display.refresh()
                continue
            if line is None:
                signal.signal(signal.SIGTERM, before)
                return process.wait()
            out.write(line)
            if verbose:
                print(line, end="", flush=True)
            display.progress = progress_of(line) or display.progress
            display.refresh()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hint", default="", help="what to do about a failure")
    parser.add_argument("title")
    parser.add_argument("log", type=Path)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    command = arguments[cut + 1 :]
    if not command:
        parser.error("no command after --")

    options.log.parent.mkdir(parents=True, exist_ok=True)
    display = Display(options.title)
    try:
        status = run(command, options.log, display)
    except KeyboardInterrupt:
        print(f"\n{options.title}: interrupted")
        return 130
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 127
    display.finish(status)
    if status != 0:
        tail = options.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print(*[f"  | {line}" for line in tail], sep="\n", file=sys.stderr)
        hint = f" {options.hint}" if options.hint else ""
        print(
            f"error: {options.title} failed; all output is in {options.log}.{hint}", file=sys.stderr
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
