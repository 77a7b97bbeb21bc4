"""The options of `llaisys serve`, on the command line and in a file: they fill a ServerConfig."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llaisys.chat.style import REASONING_PARSERS, TOOL_PARSERS
from llaisys.common.flags import OptionParser, add_flags, given_flags
from llaisys.common.logs import FORMATS, LEVELS
from llaisys.common.model_argument import add_model_argument
from llaisys.common.option_names import Row
from llaisys.common.options import options_of
from llaisys.common.sampling import DEFAULTED, SamplingParams
from llaisys.common.validation import invalid_value
from llaisys.engine.config import (
    EngineConfig,
    add_engine_flags,
    engine_rows,
    given_engine_options,
)
from llaisys.server.config import REPLICA_BACKENDS, Health, Limits, ModelLimits, ServerConfig
from llaisys.server.config_file import fill_from_file
from llaisys.server.keys.api_key import ApiKey, read_key_file
from llaisys.server.models.entries import ModelEntry, entries_of, model_tables, read_models_file


def add_arguments(parser: OptionParser) -> None:
    """The options of `llaisys serve`; `config_from_args` reads them."""
    add_model_argument(parser, several=True)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML: options by their names; see the docs"
    )
    group = parser.add_argument_group("several models")
    group.add_argument("--models", type=Path, metavar="FILE", help="TOML: a table for each model")
    add_flags(parser, group, list(options_of(ModelLimits)))
    group = parser.add_argument_group("server")
    group.add_argument("--host", help="127.0.0.1 unless it is given")
    group.add_argument("--port", type=int, help="8000 unless it is given; 0: any free one")
    group.add_argument(
        "--data-parallel-size",
        type=int,
        metavar="N",
        help="engine processes with this model; each takes its share of the requests and cores",
    )
    group.add_argument(
        "--data-parallel-backend",
        choices=REPLICA_BACKENDS,
        help="where those run: on this machine (local) or on a Ray cluster, with --threads CPUs "
        "each (ray)",
    )
    group.add_argument("--served-model-name", nargs="+", metavar="NAME")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="repeatable; also LLAISYS_API_KEY (comma separated)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="a key, or a JSON object with its name and budgets, per line",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_const",
        const=True,
        help="let keys reuse each other's prompts; timing then tells what others have asked",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name the server is reached by, beside localhost and IP addresses",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="a web origin that may call the API (CORS)",
    )
    group.add_argument("--ssl-certfile")
    group.add_argument("--ssl-keyfile")
    group.add_argument("--ssl-keyfile-password")
    group.add_argument("--session-file", type=Path, help="SQLite file that keeps the sessions")
    group.add_argument("--webui", type=Path, metavar="DIR", help="web UI to serve at /")
    group.add_argument(
        "--no-ui",
        "--no-webui",
        action="store_const",
        const=True,
        help="serve the API only, nothing at /",
    )
    group.add_argument(
        "--strict-fields",
        action="store_const",
        const=True,
        help="refuse fields that are ignored otherwise (metadata, store, ...) and other names "
        "for our own (n_predict, ...)",
    )
    group.add_argument("--drain-timeout", "--shutdown-timeout", type=float, help="30 seconds")
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_PARSERS,
        metavar="NAME",
        help=f"how answers call tools, unless the template shows it: {_names(TOOL_PARSERS)}",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        metavar="NAME",
        help=f"what stands around reasoning, likewise: {_names(REASONING_PARSERS)}",
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="where OpenTelemetry traces go (OTLP, HTTP)"
    )
    group.add_argument("--log-level", choices=LEVELS)
    group.add_argument("--log-format", choices=FORMATS)
    group = parser.add_argument_group("limits")
    add_flags(parser, group, [*options_of(Limits), *options_of(Health)])
    add_engine_flags(parser)
    group = parser.add_argument_group("sampling, for requests that do not say")
    add_flags(parser, group, [row for row in options_of(SamplingParams) if row[0] in DEFAULTED])


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


# Fields of ServerConfig whose options have their names; those that are not given are None.
AS_THEY_ARE = (
    *("host", "port", "api_key_file", "share_prefix_cache", "ssl_certfile", "ssl_keyfile"),
    *("ssl_keyfile_password", "session_file", "webui", "strict_fields", "drain_timeout"),
    *("otlp_traces_endpoint", "log_level", "log_format", "tool_call_parser", "reasoning_parser"),
    *("data_parallel_size", "data_parallel_backend"),
)


def described_rows() -> list[Row]:
    """The options that describe themselves."""
    own = [row for owner in (Limits, Health, ModelLimits) for row in options_of(owner)]
    sampling = [row for row in options_of(SamplingParams) if row[0] in DEFAULTED]
    return [*own, *sampling, *[row for row in engine_rows() if row[0] != "model"]]


def config_from_args(args: argparse.Namespace) -> ServerConfig:
    """Raises InvalidInputError with the option's name and value, and the file if it comes from
    one."""
    if args.config is not None:
        parser = OptionParser(add_help=False)
        add_arguments(parser)
        named = args.model, args.models
        fill_from_file(args, args.config, parser, described_rows())
        if named != (None, None):  # one model or several: the command line wins, too
            args.model, args.models = named
    options = given_engine_options(args)
    engine, models = _models(args, options)
    sampling = given_flags(args, SamplingParams)
    given = {name: getattr(args, name) for name in AS_THEY_ARE}
    return ServerConfig(
        **{name: value for name, value in given.items() if value is not None},
        engine=engine,
        models=models,
        model_limits=ModelLimits(**given_flags(args, ModelLimits)),
        served_model_names=tuple(args.served_model_name or ()),
        api_keys=_api_keys(args.api_key or (), args.api_key_file),
        allowed_hosts=tuple(args.allowed_host or ()),
        allowed_origins=tuple(args.allowed_origin or ()),
        serve_webui=not args.no_ui,
        sampling={name: value for name, value in sampling.items() if name in DEFAULTED},
        limits=Limits(**given_flags(args, Limits)),
        health=Health(**given_flags(args, Health)),
    )


def _models(
    args: argparse.Namespace, options: Mapping[str, Any]
) -> tuple[EngineConfig, tuple[ModelEntry, ...]]:
    """(the first model, all of them when there are several)."""
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
    if args.served_model_name:
        raise invalid_value(
            "served_model_name",
            args.served_model_name,
            "left out with several models; see --models",
        )
    return entries[0].engine, entries


def _api_keys(given: Sequence[str], file: Path | None) -> list[str | ApiKey]:
    plain = [*given, *os.environ.get("LLAISYS_API_KEY", "").split(",")]
    keys: list[str | ApiKey] = [key.strip() for key in plain if key.strip()]
    return keys if file is None else [*keys, *read_key_file(file)]
