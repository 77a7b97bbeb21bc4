"""`serve(config)`: the HTTP server as one call, and its command-line options.

It returns the exit status: 0 after a drain, 1 when the engine died or a second signal cut the drain
short. Everything heavy is imported after the engine process has been started, which loads its model
meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import log_event, setup_logging
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.options import add_arguments, config_from_args

if TYPE_CHECKING:
    import asyncio

__all__ = ["ServerConfig", "add_arguments", "config_from_args", "serve"]

logger = logging.getLogger("llaisys.server")

OWN_FILES = 64  # beside connections: the engine's sockets, the database, what libraries open
BACKLOG = 2048  # connections that the server has not taken yet
LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


def serve(config: ServerConfig) -> int:
    """Serve until told to stop; the exit status. Raises InvalidInputError for what is wrong with
    the configuration (a port that is taken, a session file that cannot be opened)."""
    setup_logging(config.log_level, config.log_format)
    if config.host not in LOCAL_HOSTS and not config.api_keys:
        logger.warning("listening on %s without an API key: anyone may use it", config.host)
    check_tls(config)
    config = fit_connections(config)
    listener = bind(config.host, config.port)
    process = None if config.models else EngineProcess(config)
    try:
        import asyncio

        from llaisys.server.lifecycle import run_server

        url = server_url(config, listener)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            return runner.run(run_server(config, process, listener, url))
    finally:
        listener.close()
        if process is not None:
            process.remove()


def fit_connections(config: ServerConfig) -> ServerConfig:
    """With no more connections than there may be open files, which are raised as far as they may
    be: a server without one can neither take a connection nor open its database."""
    wanted = config.limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    if not unlimited and soft < wanted + OWN_FILES:
        more = wanted + OWN_FILES
        soft = more if hard == resource.RLIM_INFINITY else min(hard, more)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if unlimited else min(wanted, soft - OWN_FILES)
    if most < 1:
        raise InvalidInputError(
            f"{soft} files may be open (ulimit -n); at least {OWN_FILES + 1} are needed",
            field="max_connections",
            value=soft,
            limit=f"at least {OWN_FILES + 1}",
        )
    level = logging.INFO if most == wanted else logging.WARNING
    log_event(logger, level, "connections", max_connections=most, wanted=wanted, open_files=soft)
    limits = dataclasses.replace(config.limits, max_connections=most)
    return dataclasses.replace(config, limits=limits)


def bind(host: str, port: int) -> socket.socket:
    """The one socket that listens, from here on: who connects before the server runs waits, and a
    port that another server has bound meanwhile is refused here."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {host} port {port}: {error.strerror}", field="port", value=port
        ) from error


def server_url(config: ServerConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if sys.platform == "win32":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def check_tls(config: ServerConfig) -> None:
    """Raises InvalidInputError with the files' names when they cannot be used."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or ""
        )
    except OSError as error:  # of which SSLError is one
        raise InvalidInputError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {error}",
            field="ssl_certfile",
        ) from error
