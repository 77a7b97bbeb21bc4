"""The options of `llaisys serve`, on the command line and in a file: they fill a ServerConfig."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.flags import (
    MODEL_HELP,
    OptionParser,
    add_flags,
    add_model_argument,
    given_flags,
)
from llaisys.common.foreign_names import WITHOUT_EFFECT, unknown_option
from llaisys.common.option_names import Row, spellings, warn_of_file, with_field_names
from llaisys.common.options import FilePath, Kind, Names, Option, options_of
from llaisys.common.sampling import DEFAULTED, SamplingParams
from llaisys.common.validation import invalid_value
from llaisys.engine.config import EngineConfig, engine_rows
from llaisys.engine.engine_flags import add_speculative_flags, given_engine_options
from llaisys.server.api_keys import ApiKey, read_key_file
from llaisys.server.config import Health, Limits, ModelLimits, ServerConfig
from llaisys.server.model_entries import (
    ModelEntry,
    entries_of,
    model_tables,
    read_models_file,
    read_toml,
)

TITLES = {"sampling": "sampling defaults, for requests that set none"}


class ModelTables(Kind):
    """A TOML file with a table for each model, or in a configuration file the tables themselves."""

    metavar = "FILE"
    parse = Path

    def check(self, name: str, value: Any) -> Any:
        return value if isinstance(value, dict) else FilePath().check(name, value)

    def limits(self) -> str:
        return "path, or tables `[models.NAME]`"


MODEL: Row = ("model", Option(Names(), MODEL_HELP, None, "model"), None)
CONFIG: Row = (
    "config",
    Option(FilePath(), "TOML file with options by name", "", "model", common=True),
    None,
)
MODELS: Row = (
    "models",
    Option(ModelTables(), "TOML file with a table for each model", "", "model", common=True),
    None,
)


def serve_rows() -> list[Row]:
    """The options of `llaisys serve` that a configuration file may set, but for the model."""
    limits = [row for owner in (Limits, Health, ModelLimits) for row in options_of(owner)]
    sampling = [row for row in options_of(SamplingParams) if row[0] in DEFAULTED]
    rows = [MODELS, *options_of(ServerConfig), *engine_rows(), *limits, *sampling]
    return [row for row in rows if row[1].flag is not None]


def add_arguments(parser: OptionParser) -> None:
    """Add the options of `llaisys serve`; `config_from_args` reads them."""
    add_model_argument(parser, several=True)
    add_flags(parser, [CONFIG, *serve_rows()], titles=TITLES)
    add_speculative_flags(parser)
    parser.without_effect.update(WITHOUT_EFFECT)


def config_from_args(args: argparse.Namespace) -> ServerConfig:
    """Raises InvalidInputError with the option's name and value, and the file if it comes from
    one."""
    if args.config is not None:
        named = args.model, args.models
        fill_from_file(args, args.config, [MODEL, *serve_rows()])
        if named != (None, None):  # a model on the command line replaces those of the file
            args.model, args.models = named
    engine, models = _models(args, given_engine_options(args))
    sampling = given_flags(args, SamplingParams)
    own = given_flags(args, ServerConfig)
    own["api_keys"] = _api_keys(own.get("api_keys", ()), args.api_key_file)
    return ServerConfig(
        **own,
        engine=engine,
        models=models,
        model_limits=ModelLimits(**given_flags(args, ModelLimits)),
        sampling={name: value for name, value in sampling.items() if name in DEFAULTED},
        limits=Limits(**given_flags(args, Limits)),
        health=Health(**given_flags(args, Health)),
    )


def _models(
    args: argparse.Namespace, options: Mapping[str, Any]
) -> tuple[EngineConfig, tuple[ModelEntry, ...]]:
    """(the first model, all models when there are several)."""
    named = [args.model] if isinstance(args.model, str) else args.model or []
    if args.models is not None and named:
        raise invalid_value("models", "given", "left out when a model is named")
    if isinstance(args.models, dict):
        entries = model_tables(args.models, f"--config {args.config}", options)
    elif args.models is not None:
        entries = read_models_file(args.models, options)
    elif len(named) > 1:
        entries = entries_of(named, options)
    else:
        return EngineConfig.of(model=named[0] if named else None, **options), ()
    if args.served_model_names:
        raise invalid_value(
            "served_model_name",
            args.served_model_names,
            "left out with several models; see --models",
        )
    return entries[0].engine, entries


def _api_keys(given: Any, file: Path | None) -> list[str | ApiKey]:
    plain = [*given, *os.environ.get("LLAISYS_API_KEY", "").split(",")]
    keys = [key.strip() if isinstance(key, str) else key for key in plain]
    keys = [key for key in keys if key]
    return keys if file is None else [*keys, *read_key_file(file)]


def fill_from_file(args: argparse.Namespace, path: Path, rows: Sequence[Row]) -> None:
    """Set what the command line left out. Everything in the file is checked, used or not."""
    data = read_toml(path, "config")
    try:
        values = checked_options(data, rows)
    except InvalidInputError as error:
        raise InvalidInputError(f"--config {path}: {error}", field=error.field) from None
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def checked_options(data: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The options of a file by their fields' names. A file may use the names of the flags
    (`max-model-len` or `max_model_len`) and of the fields (`threads` is `n_threads`). Raises
    InvalidInputError that names the nearest option for an unknown one."""
    kinds = {name: about.kind for name, about, _ in rows}
    known = spellings(rows)
    checked = {}
    for given, value in data.items():
        name = given.replace("-", "_")
        if name not in known:
            raise InvalidInputError(unknown_option(given, known), field=given)
        spelling = known[name]
        checked[name] = value if spelling.is_negated else kinds[spelling.name].check(given, value)
    return with_field_names(checked, rows, warn_of_file)
