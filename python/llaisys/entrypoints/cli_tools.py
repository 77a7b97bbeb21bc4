"""`llaisys pull` and `llaisys env`: download a model, describe this machine."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.common.model_argument import add_model_argument


def add_commands(commands: Any) -> None:
    pull = commands.add_parser("pull", help="Download a model and print its path")
    add_model_argument(pull)
    pull.set_defaults(run=_pull)

    env = commands.add_parser("env", help="Print versions and hardware, for bug reports")
    env.set_defaults(run=_env)


def _pull(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import fetch_model

    print(fetch_model(options.model))
    return 0


def _env(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import describe_environment

    for name, value in describe_environment().items():
        print(f"{name:12s} {value}")
    return 0
