"""`llaisys serve`: the HTTP server. `llaisys route`: a router in front of several."""

import argparse
from typing import Any

from llaisys.common.flags import add_flags, given_flags
from llaisys.common.options import options_of
from llaisys.server.config import Limits
from llaisys.server.options import add_arguments, config_from_args
from llaisys.server.route.config import RouteConfig

HELP = "Serve models over HTTP, with a web UI"
DESCRIPTION = "Serve models with the OpenAI, Anthropic, Ollama and llama.cpp APIs, and a web UI."
ROUTE_HELP = "Route requests to several servers"
ROUTE_DESCRIPTION = (
    "Forward each request to the server with the least work for it: cached prefixes, open requests "
    "and conversations count. Several routers may share an address."
)
ROUTE_LIMITS = ("max_body_bytes", "max_total_body_bytes", "max_connections", "send_timeout")


def add_command(commands: Any) -> None:
    serve = commands.add_parser("serve", help=HELP, description=DESCRIPTION)
    add_arguments(serve)
    serve.set_defaults(run=_serve)
    route = commands.add_parser("route", help=ROUTE_HELP, description=ROUTE_DESCRIPTION)
    route.add_argument("replicas", metavar="URL", nargs="+", help="Base URL of a server")
    rows = [row for row in options_of(Limits) if row[0] in ROUTE_LIMITS]
    add_flags(route, [*options_of(RouteConfig), *rows])
    route.set_defaults(run=_route)


def _serve(options: argparse.Namespace) -> int:
    config = config_from_args(options)
    from llaisys.server.http_server import serve

    return serve(config)


def _route(options: argparse.Namespace) -> int:
    from llaisys.server.route.main import route

    limits = {
        name: value for name, value in given_flags(options, Limits).items() if name in ROUTE_LIMITS
    }
    config = RouteConfig(
        replicas=tuple(options.replicas),
        limits=Limits(**limits),
        **given_flags(options, RouteConfig),
    )
    return route(config)
