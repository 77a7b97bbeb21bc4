"""Runs the scenarios of a client: `python CLIENT.py URL SCENARIO...`, silent when all is well.

    python runner.py URL FOLDER '{"CLIENT": ["SCENARIO", ...], ...}'

runs several, each in a fork of a process that has imported what most of them import, at most two at
a time, and prints a JSON object with their exit statuses. The output of a client is in
FOLDER/CLIENT.txt.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

# 2 s of CPU time in nine clients.
COMMON = ("openai.resources.chat", "openai.resources.responses", "openai.types.responses")


def run(scenarios: dict[str, Callable[[str], None]]) -> None:
    """Each scenario is given the server's address. The exit status is the number that failed."""
    url, *names = sys.argv[1:]
    failed = 0
    for name in names:
        try:
            scenarios[name](url)
        except Exception:
            failed += 1
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc()
    sys.exit(failed)


def start(name: str, url: str, folder: Path, scenarios: list[str]) -> int:
    """The process of a client. It has a HOME of its own: no user settings."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["HOME"] = str(folder / name)
        Path(os.environ["HOME"]).mkdir()
        sys.argv[1:] = [url, *scenarios]
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    url, folder, clients = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for module in COMMON:
        importlib.import_module(module)
    running: dict[int, str] = {}
    statuses: dict[str, int] = {}
    while clients or running:
        while clients and len(running) < 2:
            name = next(iter(clients))
            running[start(name, url, folder, clients.pop(name))] = name
        pid, status = os.wait()
        statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
