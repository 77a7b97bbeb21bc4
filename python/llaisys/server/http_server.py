"""`serve(config)`: run the HTTP server and return its exit status.

0 after a drain, 1 when the engine died or a second signal aborted the drain. Heavy modules are
imported after the engine process has started, so that the model loads in the meantime.
"""

import dataclasses
import errno
import gc
import logging
import resource
import socket

from llaisys.common.errors import InvalidInputError
from llaisys.common.interrupts import end_on_interrupt
from llaisys.common.logs import log_event, setup_logging
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.start import EngineProcess

logger = logging.getLogger("llaisys.server")

RESERVED_FILES = 64  # descriptors beside connections: engine sockets, database, libraries
BACKLOG = 2048  # of listen(2)
PORT_IN_USE = "port_in_use"  # code of an error
LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


def serve(config: ServerConfig) -> int:
    """Serve until a signal; return the exit status. Raises InvalidInputError for an unusable
    configuration (a port in use, a session file that cannot be opened)."""
    end_on_interrupt(True)  # until the server handles signals; the engine process ends by itself
    setup_logging(config.log_level, config.log_format)
    if config.host not in LOCAL_HOSTS and not config.api_keys:
        logger.warning("listening on %s without an API key: anyone may use it", config.host)
    check_tls(config)
    config = fit_connections(config)
    listener = bind(config.host, config.port)
    process = None if config.models else EngineProcess(config)
    try:
        import asyncio

        gc.disable()  # imports allocate much and free little; the server collects when it is ready
        from llaisys.server.app import make_app
        from llaisys.server.lifecycle import run_server

        gc.enable()
        url = server_url(config, listener)
        with asyncio.Runner() as runner:
            return runner.run(run_server(make_app, config, process, listener, url))
    finally:
        listener.close()
        if process is not None:
            process.remove()
        end_on_interrupt(False)


def fit_connections(config: ServerConfig) -> ServerConfig:
    """Raise RLIMIT_NOFILE as far as allowed and lower `max_connections` to fit it."""
    wanted = config.limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    if not unlimited and soft < wanted + RESERVED_FILES:
        more = wanted + RESERVED_FILES
        soft = more if hard == resource.RLIM_INFINITY else min(hard, more)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if unlimited else min(wanted, soft - RESERVED_FILES)
    if most < 1:
        raise InvalidInputError(
            f"{soft} files may be open (ulimit -n); at least {RESERVED_FILES + 1} are needed",
            field="max_connections",
            value=soft,
            limit=f"at least {RESERVED_FILES + 1}",
        )
    level = logging.INFO if most == wanted else logging.WARNING
    log_event(logger, level, "connections", max_connections=most, wanted=wanted, open_files=soft)
    limits = dataclasses.replace(config.limits, max_connections=most)
    return dataclasses.replace(config, limits=limits)


def bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Return the listening socket. Connections wait in the backlog until the server runs.
    `reuse_port`: other processes may listen there too. Raises InvalidInputError when the port is in
    use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        is_used, other = error.errno == errno.EADDRINUSE, min(port + 1, 65535)
        hint = f" (--port {other} selects another one, --port 0 a free one)" if is_used else ""
        raise InvalidInputError(
            f"cannot listen on {host} port {port}: {error.strerror}{hint}",
            field="port",
            value=port,
            code=PORT_IN_USE if is_used else None,
        ) from error


def server_url(config: ServerConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"


def check_tls(config: ServerConfig) -> None:
    """Check the TLS files. Raises InvalidInputError with their names when they are invalid."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or ""
        )
    except OSError as error:  # includes SSLError
        raise InvalidInputError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {error}",
            field="ssl_certfile",
        ) from error
