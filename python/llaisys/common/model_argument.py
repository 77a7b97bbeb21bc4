"""MODEL on the command line: a positional argument, or -m/--model."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.common.flags import OptionParser

MODEL_HELP = "Directory, GGUF file, hub id or short name (default: SmolLM2)"


def add_model_argument(
    parser: OptionParser,
    help: str = MODEL_HELP,
    position: bool = True,
    several: bool = False,
) -> None:
    """`options.model`: the value or None; with `several`, a list of positional arguments or None.
    A model given both ways is a usage error."""
    group = parser.named_group("model")
    if position:
        nargs = "*" if several else "?"
        group.add_argument("model", nargs=nargs, metavar="MODEL", action=_Once, help=help)
        help = argparse.SUPPRESS  # one line of help for both forms
    group.add_argument("-m", "--model", dest="model", metavar="MODEL", action=_Once, help=help)


class _Once(argparse.Action):
    """Store the value. argparse reports a positional argument that is left out as None."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values is None or values == []:
            return
        if isinstance(values, list) and len(values) == 1:
            values = values[0]
        before = getattr(namespace, self.dest, None)
        if before is not None:
            parser.error(f"MODEL is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)
