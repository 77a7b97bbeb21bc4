"""`llaisys serve`: the HTTP server."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.server.options import add_arguments, config_from_args

HELP = "Serve models over HTTP, with a web UI"
DESCRIPTION = "Serve models with the OpenAI, Anthropic, Ollama and llama.cpp APIs, and a web UI."


def add_command(commands: Any) -> None:
    serve = commands.add_parser("serve", help=HELP, description=DESCRIPTION)
    add_arguments(serve)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    config = config_from_args(options)
    from llaisys.server.http_server import serve

    return serve(config)
