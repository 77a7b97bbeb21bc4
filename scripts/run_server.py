"""Start the server of `make run`: `llaisys serve`, then what to type next.

scripts/run_server.py [ARGUMENT...]          arguments of `llaisys serve`
scripts/run_server.py --fetch [ARGUMENT...]  download the default model if it would be served
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while modules are imported

from step import seconds  # noqa: E402

from llaisys.diagnostics import fetch_model  # noqa: E402
from llaisys.entrypoints.cli import build_parser  # noqa: E402


def names_a_model(options: argparse.Namespace) -> bool:
    return bool(options.model or options.models or options.config)


def next_commands(url: str, elapsed: float | None) -> str:
    """What to type next, as it must be typed in this directory."""
    llaisys = Path(sys.executable).with_name("llaisys")
    if llaisys.is_relative_to(Path.cwd()):
        llaisys = llaisys.relative_to(Path.cwd())
    command = shlex.quote(str(llaisys))
    took = f"Ready after {seconds(elapsed)}. " if elapsed is not None else ""
    return (
        f"\n{took}Open {url} in a browser, or type in a second terminal:\n"
        f"  {command} chat\n"
        f'  {command} generate "Why is the sky blue?"\n'
        f"  {command} bench serve --url {url}\n"
        "Ctrl-C stops the server."
    )


def serve(command: list[str]) -> int:
    """Run the server; print what to type next once it is ready. The server's exit status."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGHUP, forward)
    # A terminal sends Ctrl-C to the server as well; a second signal would abort its requests.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    started = os.environ.get("LLAISYS_STARTED")
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("llaisys: serving "):
            elapsed = time.time() - float(started) if started else None
            print(next_commands(line.split()[-1], elapsed), flush=True)
    status = process.wait()
    return 128 - status if status < 0 else status


def main(given: list[str]) -> int:
    if given[:1] == ["--fetch"]:
        if not names_a_model(build_parser().parse_args(["serve", *given[1:]])):
            fetch_model(None)
        return 0
    return serve([sys.executable, "-m", "llaisys", "serve", *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
