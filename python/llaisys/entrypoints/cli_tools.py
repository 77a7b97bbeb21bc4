"""`llaisys pull`, `models`, `rm` and `env`: the models of this machine, and the machine itself."""

from __future__ import annotations

import argparse
import json
from typing import Any

from llaisys.common.model_argument import add_model_argument


def add_commands(commands: Any) -> None:
    pull = commands.add_parser("pull", help="Download a model and print its path")
    add_model_argument(pull)
    pull.set_defaults(run=_pull)

    models = commands.add_parser(
        "models",
        help="List the models on this machine",
        description="List the models on this machine, with those of the hub's cache, Ollama and "
        "LM Studio, and the short names of models to download.",
    )
    models.add_argument("--json", action="store_true", help="Print JSON")
    models.set_defaults(run=_models)

    rm = commands.add_parser("rm", help="Delete a downloaded model")
    rm.add_argument("model", metavar="MODEL", help="As `llaisys models` lists it")
    rm.set_defaults(run=_rm)

    env = commands.add_parser("env", help="Print versions and hardware, for bug reports")
    env.set_defaults(run=_env)


def _pull(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import fetch_model

    print(fetch_model(options.model))
    return 0


def _models(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import list_models

    found, known = list_models()
    if options.json:
        print(json.dumps({"models": found, "known": known}, indent=1))
        return 0
    for model in found:
        print(f"{model['name']:44s} {model['bytes'] / 1e9:8.2f} GB  {model['cache']}")
    if not found:
        print("no model on this machine; `llaisys pull MODEL` downloads one")
    print(f"\nTo download: {', '.join(known)}, or any hub id.")
    return 0


def _rm(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import delete_model

    print(f"deleted {delete_model(options.model)}")
    return 0


def _env(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import describe_environment

    for name, value in describe_environment().items():
        print(f"{name:12s} {value}")
    return 0
