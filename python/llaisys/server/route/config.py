"""The configuration of `llaisys route`."""

from dataclasses import dataclass, field

from llaisys.common.logs import FORMATS, LEVELS
from llaisys.common.options import Choice, Integer, Number, Switch, Text, check_options, option
from llaisys.common.validation import check_url, invalid_value
from llaisys.server.config import Limits

MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class RouteConfig:
    replicas: tuple[str, ...] = ()  # URLs
    host: str = option(
        "127.0.0.1", Text(), "Bind address", group="server", common=True, metavar="ADDRESS"
    )
    port: int = option(
        8000, Integer(0, 65535), "TCP port", group="server", common=True, metavar="PORT",
        more="0: a free port.",
    )  # fmt: skip
    reuse_port: bool = option(
        False, Switch(), "Share the address with other routers of this user", group="server",
        common=True, more="Linux distributes new connections over them (SO_REUSEPORT).",
    )  # fmt: skip
    cached_tokens: int = option(
        262_144, Integer(64), "Assumed prefix cache of a replica, in tokens", group="server",
        common=True,
    )  # fmt: skip
    probe_interval: float = option(
        1.0, Number(0.05), "Time between probes of a replica", group="health", common=True,
        metavar="SECONDS", more="Also the time limit of a probe, but at least 2 s.",
    )  # fmt: skip
    drain_timeout: float = option(
        30.0, Number(0), "Time for open requests after SIGTERM", group="server", common=True,
        metavar="SECONDS",
    )  # fmt: skip
    log_level: str = option(
        "info", Choice(LEVELS), "Log level", group="observability", common=True, metavar="LEVEL"
    )
    log_format: str = option(
        "text", Choice(FORMATS), "Log format", group="observability", common=True
    )
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= len(self.replicas) <= MAX_REPLICAS:
            raise invalid_value("replicas", len(self.replicas), f"1 to {MAX_REPLICAS} URLs")
        if len(set(self.replicas)) != len(self.replicas):
            raise invalid_value("replicas", self.replicas, "URLs that differ")
        for url in self.replicas:
            if check_url("replicas", url)[3].strip("/"):
                raise invalid_value("replicas", url, "http(s)://HOST[:PORT]")
