"""`route(config)`: run a router and return its exit status."""

import asyncio
import logging
import math
import signal
import socket

from starlette.types import ASGIApp

from llaisys.common.logs import log_event, setup_logging
from llaisys.server.http.middleware import BodyBudget, BodyGuard, RequestContext
from llaisys.server.http_server import bind
from llaisys.server.lifecycle import Server
from llaisys.server.route.app import RouterApp
from llaisys.server.route.config import RouteConfig

logger = logging.getLogger("llaisys.server.route")


def route(config: RouteConfig) -> int:
    """Route until a signal. Raises InvalidInputError when the port is in use."""
    setup_logging(config.log_level, config.log_format)
    listener = bind(config.host, config.port, config.reuse_port)
    with asyncio.Runner() as runner, listener:
        return runner.run(_run(config, listener))


async def _run(config: RouteConfig, listener: socket.socket) -> int:
    app = RouterApp(config)
    limits = config.limits
    guarded: ASGIApp = BodyGuard(
        app,
        limits.max_body_bytes,
        limits.body_timeout,
        BodyBudget(limits.max_total_body_bytes),
        lambda scope: False,
    )
    server = Server.of(
        RequestContext(guarded, lambda *_: None),
        limits,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout),
    )

    def drain(number: int) -> None:
        """Close the listening socket and wait for open requests; at the second signal abort."""
        name = signal.Signals(number).name
        log_event(logger, logging.INFO, "draining", signal=name)
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, drain, number)
    app.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    count = len(config.replicas)
    print(f"llaisys: routing to {count} replicas at http://{shown}:{port}", flush=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        await app.close()
    return 0
