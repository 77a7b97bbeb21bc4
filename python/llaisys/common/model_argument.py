"""MODEL on the command line, the same for every command: as a position, or as -m/--model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

MODEL_HELP = "directory, .gguf file, hub id or pypi:NAME; a small model when left out"


def add_model_argument(
    parser: argparse.ArgumentParser,
    help: str = MODEL_HELP,
    position: bool = True,
    several: bool = False,
) -> None:
    """`options.model`: what was given, or None; a list where `several` may be named by position.
    Naming it both ways is a usage error."""
    if position:
        nargs = "*" if several else "?"
        parser.add_argument("model", nargs=nargs, metavar="MODEL", action=_Once, help=help)
        help = "the same, by name"
    parser.add_argument("-m", "--model", dest="model", metavar="MODEL", action=_Once, help=help)


class _Once(argparse.Action):
    """Keeps the value that was given; argparse reports a position that was left out as None."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values is None or values == []:
            return
        if isinstance(values, list) and len(values) == 1:
            values = values[0]
        before = getattr(namespace, self.dest, None)
        if before is not None:
            parser.error(f"MODEL is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)
