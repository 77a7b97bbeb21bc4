"""The engine options as keywords of `LLM` and as flags of the commands."""

import inspect
from argparse import SUPPRESS
from typing import Any

from llaisys.common.flags import OptionParser, add_flags, given_flags
from llaisys.common.validation import invalid_value
from llaisys.engine.config import OBJECTS, SECTIONS, EngineConfig, engine_options, engine_rows

# Flags of vLLM for fields of speculative_config.
SPECULATIVE_FLAGS: dict[str, tuple[str, type]] = {
    "--spec-method": ("method", str),
    "--spec-model": ("model", str),
    "--spec-tokens": ("num_speculative_tokens", int),
}


def engine_parameters() -> list[inspect.Parameter]:
    """Every option but the model as a keyword parameter, for the signature of `LLM`."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for _, name, _, default in engine_options()
        if name != "model"
    ] + [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in OBJECTS]


def add_engine_flags(
    parser: OptionParser, *, without: tuple[str, ...] = (), shown: tuple[str, ...] | None = None
) -> None:
    """A flag for every engine option but `without`; `shown`: those in help, None: all."""
    rows = [row for row in engine_rows() if row[0] not in without]
    add_flags(parser, rows, shown=shown)
    add_speculative_flags(parser)


def add_speculative_flags(parser: OptionParser) -> None:
    for flag, (name, kind) in SPECULATIVE_FLAGS.items():
        parser.add_argument(flag, type=kind, dest=f"speculative_{name}", help=SUPPRESS)


def given_engine_options(
    options: Any, *, only: tuple[str, ...] = (), because: str = ""
) -> dict[str, Any]:
    """What was given on the command line, for `EngineConfig.of` or `LLM`; the model is apart.
    `only`: any other is refused by its name, `because` saying why."""
    owners = (EngineConfig, *SECTIONS.values())
    given = {name: v for owner in owners for name, v in given_flags(options, owner).items()}
    given.pop("model", None)
    names = [name for name, _ in SPECULATIVE_FLAGS.values()]
    parts = {name: getattr(options, f"speculative_{name}", None) for name in names}
    parts = {name: value for name, value in parts.items() if value is not None}
    if parts:
        if "speculative_config" in given:
            raise invalid_value("speculative_config", "given", "left out with --spec-* flags")
        given["speculative_config"] = parts
    for name, value in given.items():
        if only and name not in only:
            raise invalid_value(name, value, f"left out: {because}")
    return given
