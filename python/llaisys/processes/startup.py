"""Start-up of a child process: setup, logging, exit with the parent."""

import signal
import sys
from typing import Protocol, TypeVar

import msgspec

from llaisys.common.logs import setup_logging
from llaisys.processes.child import EXIT_ORPHAN, exit_with_parent


class Setup(Protocol):
    log_level: str  # as setup_logging takes it
    log_format: str
    socket_directory: str


S = TypeVar("S", bound=Setup)


def init_child(kind: type[S]) -> S:
    """Read the setup, a line of JSON on standard input, and initialize the process. Exits without a
    message if the parent ended before it wrote the whole line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # log lines are written in the background
    stream = sys.stdin.buffer
    line = stream.readline()
    if not line.endswith(b"\n"):
        sys.exit(EXIT_ORPHAN)
    setup = msgspec.json.decode(line, type=kind)
    setup_logging(setup.log_level, setup.log_format)
    exit_with_parent(stream, setup.socket_directory)
    return setup
