"""`llaisys pull`, `models`, `rm`, `check-model` and `env`: the models of this machine, their
comparison with transformers, and the machine itself."""

import argparse
import json
from dataclasses import replace
from typing import Any

from llaisys.common.flags import add_flags, add_model_argument
from llaisys.engine.config import engine_rows


def add_commands(commands: Any) -> None:
    pull = commands.add_parser("pull", help="Download a model and print its path")
    add_model_argument(pull)
    [(name, about, default)] = [row for row in engine_rows() if row[0] == "revision"]
    add_flags(pull, [(name, replace(about, common=True), default)])
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

    check = commands.add_parser(
        "check-model",
        help="Load a model and compare its layers with transformers",
        description="Run a prompt of random tokens and compare the input of every layer and the "
        "logits with transformers, if it is installed. The exit status is 1 when they differ.",
    )
    add_model_argument(check)
    check.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="Device to run on")
    check.add_argument(
        "--dtype", default="f32", choices=("auto", "f32", "f16", "bf16"), help="Compute dtype"
    )
    check.add_argument("--tokens", type=int, default=48, metavar="N", help="Tokens of the prompt")
    check.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="Largest accepted difference, relative to the largest value",
    )
    check.set_defaults(run=_check)

    env = commands.add_parser("env", help="Print versions and hardware, for bug reports")
    env.set_defaults(run=_env)


def _pull(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import fetch_model

    print(fetch_model(options.model, options.revision))
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


def _check(options: argparse.Namespace) -> int:
    from llaisys.common.validation import invalid_value
    from llaisys.diagnostics.check_model import check_model

    if options.model is None:
        raise invalid_value("model", None, "a directory, a GGUF file or a model id")
    if not 1 <= options.tokens <= 1 << 16:
        raise invalid_value("tokens", options.tokens, "in 1..65536")
    given = (options.device, options.dtype, options.tokens, options.tolerance)
    return 0 if check_model(options.model, print, *given) else 1


def _env(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import describe_environment

    for name, value in describe_environment().items():
        print(f"{name:12s} {value}")
    return 0
