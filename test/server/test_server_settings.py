"""Server settings: every flag reaches its option; invalid ones are named before the start."""

from __future__ import annotations

import dataclasses
import math
import resource
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input, naming
from wire_helpers import make_certificate

from llaisys.common.errors import InvalidInputError
from llaisys.common.flags import OptionParser
from llaisys.server.config import MIN_SESSION_BYTES, Health, Limits, ServerConfig
from llaisys.server.http_server import check_tls, fit_connections, serve
from llaisys.server.options import add_arguments, config_from_args
from llaisys.server.sessions.store import SessionStore


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"api_keys": ("",)},
        {"api_keys": ("schlüssel",)},
        {"ssl_certfile": "x"},
        {"log_format": "xml"},
        {"drain_timeout": -1},
        {"drain_timeout": math.nan},
    ],
)
def test_invalid_server_settings_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ServerConfig(**fields)
    assert caught.value.field in (*fields, "ssl_keyfile")


def test_every_limit_has_a_flag() -> None:
    parser = OptionParser()
    add_arguments(parser)
    shown = {"dead_after": "--engine-dead-after", "step_limit": "--engine-step-limit"}
    hidden = {"heartbeat_interval", "unresponsive_after", "start_limit", "exit_delay"}
    flags, expected = [], {}
    for owner in (Limits, Health):
        for index, field in enumerate(dataclasses.fields(owner)):
            if field.name not in hidden:
                expected[field.name] = MIN_SESSION_BYTES + index
                flag = shown.get(field.name, "--" + field.name.replace("_", "-"))
                flags += [flag, str(expected[field.name])]
    config = config_from_args(parser.parse_args(flags))
    found = dataclasses.asdict(config.limits) | dataclasses.asdict(config.health)
    assert {name: found[name] for name in expected} == expected
    assert config_from_args(parser.parse_args([])).limits == Limits()


@pytest.mark.parametrize("name", ["dead_after", "step_limit", "start_limit", "max_failed_steps"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_invalid_health_limits_are_named(name: str, value: float) -> None:
    with invalid_input(name):
        Health(**{name: value})


@pytest.mark.parametrize("name", ["max_body_bytes", "max_n", "header_timeout", "max_queued"])
def test_invalid_limits_are_named(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Limits(**{name: -1})
    assert caught.value.field == name


def test_session_file_that_is_not_a_database_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    file.write_bytes(b"this is not SQLite at all, not even close" * 100)
    with invalid_input("session_file"):
        SessionStore(file)


def test_session_file_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "s.db", tmp_path):  # below a file; a directory
        with invalid_input("session_file") as caught:
            SessionStore(path)
        assert str(path) in str(caught.value)


def test_tls_files_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    certificate, key, _ = make_certificate(tmp_path)
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    check_tls(ServerConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
    for files in ((certificate, tmp_path / "none.pem"), (junk, key), (certificate, junk)):
        with invalid_input("ssl_certfile") as caught:
            serve(ServerConfig(ssl_certfile=str(files[0]), ssl_keyfile=str(files[1]), port=0))
        assert all(str(file) in str(caught.value) for file in files)


@pytest.mark.parametrize(
    ("limits", "requested", "most", "raised"),
    [
        ((4096, 8192), 2048, 2048, None),
        ((1024, 8192), 2048, 2048, 2112),
        ((256, 1024), 2048, 960, 1024),
        ((256, resource.RLIM_INFINITY), 2048, 2048, 2112),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 9999, 9999, None),
    ],
)
def test_max_connections_fit_the_open_file_limit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: tuple[int, int],
    requested: int,
    most: int,
    raised: int | None,
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: calls.append(values))
    config = ServerConfig(limits=Limits(max_connections=requested))
    with caplog.at_level("INFO", "llaisys.server"):
        assert fit_connections(config).limits.max_connections == most
    assert calls == ([] if raised is None else [(raised, limits[1])])
    (record,) = caplog.records
    assert record.fields["max_connections"] == most  # type: ignore[attr-defined]
    assert record.levelname == ("INFO" if most == requested else "WARNING")


def test_too_low_open_file_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (32, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: None)
    with naming(InvalidInputError, "32 files"):
        fit_connections(ServerConfig())
