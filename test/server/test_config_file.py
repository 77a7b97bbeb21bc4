"""`llaisys serve --config FILE.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input
from server_helpers import ServerProcess

from llaisys.common.errors import InvalidInputError
from llaisys.common.flags import OptionParser
from llaisys.common.option_names import spellings
from llaisys.engine.engine_flags import SPECULATIVE_FLAGS
from llaisys.server.config import ServerConfig
from llaisys.server.options import MODEL, add_arguments, config_from_args, serve_rows


def parser() -> OptionParser:
    made = OptionParser()
    add_arguments(made)
    return made


def config(tmp_path: Path, text: str, *words: str) -> ServerConfig:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return config_from_args(parser().parse_args(["--config", str(file), *words]))


def test_reads_options_of_every_kind(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        """
        model = "mock"
        host = "0.0.0.0"
        port = 9000
        api_key = ["one", "two"]
        share_prefix_cache = true
        allowed-host = "llm.example.org"
        session_file = "/tmp/s.sqlite3"
        drain_timeout = 5
        log_level = "debug"
        max_queued = 7
        max_model_len = 128
        threads = 3
        enable_prefix_caching = false
        speculative_config = {method = "ngram", num_speculative_tokens = 4}
        temperature = 0.5
        memory_budget = "2GiB"
        dead_after = 30.0
        """,
    )
    assert (found.engine.model, found.host, found.port) == ("mock", "0.0.0.0", 9000)
    assert [key.key for key in found.keys] == ["one", "two"]
    assert found.share_prefix_cache and found.allowed_hosts == ("llm.example.org",)
    assert found.session_file == Path("/tmp/s.sqlite3") and found.drain_timeout == 5.0
    assert found.limits.max_queued == 7 and found.engine.max_model_len == 128
    assert found.engine.n_threads == 3 and not found.engine.cache.enable_prefix_caching
    assert found.engine.speculative is not None
    assert found.engine.speculative.num_speculative_tokens == 4
    assert found.sampling["temperature"] == 0.5
    assert found.model_limits.memory_budget == 2 << 30
    assert found.health.dead_after == 30.0


def test_command_line_overrides_file(tmp_path: Path) -> None:
    text = 'model = "other"\nport = 1\nmax_queued = 1\nallowed_host = ["a"]\nlog_level = "error"'
    words = ("mock", "--port", "2", "--max-queued", "2", "--allowed-host", "b")
    found = config(tmp_path, text, *words)
    assert found.engine.model == "mock" and found.port == 2 and found.limits.max_queued == 2
    assert found.allowed_hosts == ("b",) and found.log_level == "error"


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert config(tmp_path, "") == config_from_args(parser().parse_args([]))


def test_models_from_file_or_command_line(tmp_path: Path) -> None:
    tables = "max_num_seqs = 4\n[models.one]\nmodel = 'mock'\n[models.two]\nmodel = 'mock'\n"
    found = config(tmp_path, tables)
    assert [entry.names for entry in found.models] == [("one",), ("two",)]
    assert found.models[1].engine.scheduler.max_num_seqs == 4
    assert config(tmp_path, tables, "mock").models == ()
    several = config(tmp_path, 'model = ["mock", "org/two"]')
    assert [entry.names for entry in several.models] == [("mock",), ("org/two",)]


def test_every_flag_has_a_name_in_the_file(tmp_path: Path) -> None:
    """Each is known: what is rejected is the value, never the name."""
    names = spellings([MODEL, *serve_rows()])
    assert {"model", "models", "host", "threads", "n_threads", "top_k", "keep_alive"} <= set(names)
    flags_only = {f"speculative_{name}" for name, _ in SPECULATIVE_FLAGS.values()}
    for action in parser()._actions:
        if action.dest not in {"help", "help_all", "version", "config", *flags_only}:
            for name in {action.dest, *[flag.lstrip("-") for flag in action.option_strings]}:
                if name == "m":
                    continue
                with pytest.raises(InvalidInputError) as caught:
                    config(tmp_path, f"{name} = 1979-05-27")  # no option is a date
                assert "unknown option" not in str(caught.value), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_model_le = 3", "unknown option 'max_model_le'; did you mean 'max_model_len'?"),
        ("nonsense_of_mine = 3", "unknown option 'nonsense_of_mine'"),
        ('port = "80"', "port is '80'; it must be"),
        ("max_queued = -1", "max_queued is -1; it must be"),
        ('log_level = "loud"', "log_level is 'loud'; it must be"),
        ("share_prefix_cache = 1", "share_prefix_cache is 1; it must be"),
        ("allowed_host = [1]", "allowed_host[0] is 1; it must be a string"),
        ("allowed_host = 1", "allowed_host is 1; it must be a string or a list of strings"),
        ('memory_budget = "much"', "memory_budget is 'much'; it must be"),
        ("config = 'x'", "unknown option 'config'"),
        ("port = ", "Invalid value"),
        ("[models.a]\nmax_modl_len = 3", "[models.a]: unknown option 'max_modl_len'; did you mean"),
    ],
)
def test_error_names_file_key_and_nearest_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        config(tmp_path, text)
    assert message in str(caught.value)
    assert str(tmp_path / "serve.toml") in str(caught.value)


def test_missing_file() -> None:
    with invalid_input("config"):
        config_from_args(parser().parse_args(["--config", "/nowhere/serve.toml"]))


def test_server_runs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    values: dict[str, Any] = {"api_key": "k", "max_model_len": 64, "served_model_name": ["m"]}
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()))
    with ServerProcess("--config", str(file)) as server:
        server.wait_ready()
        with server.client("k") as client:
            (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "m"
