"""`llaisys serve`: the HTTP server. Its options are the server's own."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.server.options import add_arguments, config_from_args


def add_command(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a model over HTTP, with a web chat")
    add_arguments(serve)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    config = config_from_args(options)
    from llaisys.server.http_server import serve

    return serve(config)
