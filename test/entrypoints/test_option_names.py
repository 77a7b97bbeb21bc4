"""Every accepted name of an option: flags, keywords and keys of a configuration file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input

from llaisys.common.errors import InvalidInputError
from llaisys.common.flags import OptionParser
from llaisys.common.foreign_names import COMMANDS, OPTIONS, WITHOUT_EFFECT, foreign_option
from llaisys.common.validation import unknown_name
from llaisys.common.version import __version__
from llaisys.engine.config import EngineConfig, engine_rows
from llaisys.engine.engine_flags import given_engine_options
from llaisys.entrypoints.cli import build_parser, main
from llaisys.server import model_entries as entries
from llaisys.server.config import ServerConfig
from llaisys.server.options import config_from_args


def engine_flags(*words: str) -> dict[str, Any]:
    return given_engine_options(build_parser().parse_args(["serve", *words]))


def config_of(tmp_path: Path, text: str) -> ServerConfig:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return config_from_args(build_parser().parse_args(["serve", "--config", str(file)]))


@pytest.fixture
def deprecated_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`async_stepping` as an earlier name of `async_scheduling`."""
    [about] = [about for name, about, _ in engine_rows() if name == "async_scheduling"]
    object.__setattr__(about, "deprecated", ("async_stepping",))
    monkeypatch.setattr(entries, "KNOWN", (*entries.KNOWN, "async_stepping"))
    yield
    object.__setattr__(about, "deprecated", ())


@pytest.mark.usefixtures("deprecated_name")
def test_deprecated_flag_works_and_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_flags("--async-stepping", "off") == {"async_scheduling": "off"}
    message = capsys.readouterr().err
    assert "warning: --async-stepping is deprecated" in message and "--async-scheduling" in message
    assert engine_flags("--async-scheduling", "off") == {"async_scheduling": "off"}
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("deprecated_name")
def test_deprecated_keyword_works_and_warns() -> None:
    with pytest.warns(FutureWarning, match="async_stepping is deprecated.*async_scheduling"):
        config = EngineConfig.of(async_stepping="on")
    assert config.async_scheduling == "on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EngineConfig.of(async_scheduling="on") == config


@pytest.mark.usefixtures("deprecated_name")
def test_deprecated_key_of_a_file_works_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_of(tmp_path, "async-stepping = 'on'").engine.async_scheduling == "on"
    assert "async_stepping is deprecated" in capsys.readouterr().err
    models = "async_scheduling = 'off'\n[models.one]\nmodel = 'mock'\nasync_stepping = 'on'\n"
    found = config_of(tmp_path, models)
    assert found.models[0].engine.async_scheduling == "on"
    assert "async_stepping is deprecated" in capsys.readouterr().err


def test_an_option_under_two_names_is_rejected(tmp_path: Path) -> None:
    with invalid_input("threads"):
        EngineConfig.of(n_threads=1, threads=2)
    with invalid_input("no_warmup"):
        config_of(tmp_path, "warmup = true\nno_warmup = true")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--async-scheduling"], "on"),
        (["--async-scheduling", "mock"], "on"),
        (["--async-scheduling", "auto"], "auto"),
        (["--async-scheduling=off"], "off"),
        (["--no-async-scheduling"], "off"),
    ],
)
def test_async_scheduling_as_a_switch(words: list[str], value: str) -> None:
    assert engine_flags(*words)["async_scheduling"] == value


def test_async_scheduling_takes_booleans(tmp_path: Path) -> None:
    assert EngineConfig.of(async_scheduling=True).async_scheduling == "on"
    assert config_of(tmp_path, "async_scheduling = false").engine.async_scheduling == "off"


def test_switches_have_both_forms(tmp_path: Path) -> None:
    assert engine_flags("--warmup", "--no-exact") == {"warmup": True, "exact": False}
    assert engine_flags("--no-warmup", "--exact") == {"warmup": False, "exact": True}
    names = ("--no-prefix-caching", "--no-enable-prefix-caching", "--no_enable_prefix_caching")
    assert all(engine_flags(name) == {"enable_prefix_caching": False} for name in names)
    assert engine_flags("--enable-prefix-caching") == {"enable_prefix_caching": True}
    assert not config_of(tmp_path, "no_prefix_caching = true").engine.cache.enable_prefix_caching


def test_flags_may_have_underscores() -> None:
    assert engine_flags("--max_model_len", "64") == engine_flags("--max-model-len=64")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "4"], "unknown option '--max-modle-len'; did you mean '--max-model-"),
        (["--hosst=a"], "unknown option '--hosst'; did you mean '--host'?"),
        (["--nonsense-of-mine"], "unknown option '--nonsense-of-mine'\n"),
        (["--no-async-scheduling=on"], "--no-async-scheduling takes no value"),
    ],
)
def test_misspelt_flag_names_the_nearest_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        engine_flags(*words)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_misspelt_keyword_names_the_nearest_one() -> None:
    with pytest.raises(TypeError, match="'max_modle_len'; did you mean 'max_model_len'"):
        EngineConfig.of(max_modle_len=4)


def test_words_after_two_dashes_are_left_alone() -> None:
    options = build_parser().parse_args(["generate", "--", "--async-stepping"])
    assert options.positions == ["--async-stepping"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--kv-cache-memory", "1GiB"], {"kv_cache_memory_bytes": "1GiB"}),
        (["--kv-cache-memory-bytes", "1024"], {"kv_cache_memory_bytes": 1024}),
        (["--num-gpu-blocks-override", "3"], {"num_kv_blocks": 3}),
        (["--batch-invariant"], {"exact": True}),
        (["-tp", "2", "-t", "3"], {"tensor_parallel_size": 2, "n_threads": 3}),
        (["-c", "64", "-q", "int8"], {"max_model_len": 64, "quantization": "int8"}),
        (["-sc", "{}"], {"speculative_config": {}}),
        (
            ["--spec-method", "ngram", "--spec-tokens", "4"],
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        ),
    ],
)
def test_names_of_vllm_and_llama_cpp_are_accepted(words: list[str], value: dict[str, Any]) -> None:
    assert engine_flags(*words) == value


def test_names_of_server_options_in_vllm_and_llama_cpp_are_accepted() -> None:
    words = ["--no-webui", "--shutdown-timeout", "5", "--max-num-queued-reqs", "7", "-dp", "2",
             "--data-parallel-backend", "mp", "--allowed-origins", '["https://a", "https://b"]',
             "--allowed-origin", "https://c", "--served-model-name", "a", "b"]  # fmt: skip
    config = config_from_args(build_parser().parse_args(["serve", *words]))
    assert not config.serve_webui and config.drain_timeout == 5 and config.limits.max_queued == 7
    assert (config.data_parallel_size, config.data_parallel_backend) == (2, "local")
    assert config.allowed_origins == ("https://a", "https://b", "https://c")
    assert config.served_model_names == ("a", "b")


def test_speculative_config_excludes_its_parts() -> None:
    with invalid_input("speculative_config"):
        engine_flags("-sc", "{}", "--spec-method", "ngram")


def test_switch_of_another_server_without_effect_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_flags("--enable-auto-tool-choice", "--enable-chunked-prefill") == {}
    message = capsys.readouterr().err
    assert "--enable-auto-tool-choice has no effect: tool calls are always parsed" in message
    assert engine_flags(*WITHOUT_EFFECT) == {}


def test_benchmarks_accept_the_names_of_vllm() -> None:
    words = ["--base-url", "u", "--num-prompts", "3", "--request-rate", "2"]
    options = build_parser().parse_args(["bench", "serve", *words])
    assert (options.url, options.requests, options.rate) == ("u", 3, 2.0)


@pytest.mark.parametrize(
    "words, hint",
    [
        (["serv"], "unknown command 'serv'; did you mean 'serve'?"),
        (["bench", "throughputt"], "unknown command 'throughputt'; did you mean 'throughput'?"),
        (["zzz"], "unknown command 'zzz'; known: serve, route, generate, chat"),
        (["bench", "serve", "--endpoint", "chats"], "unknown value 'chats'; did you mean 'chat'?"),
    ],
)
def test_unknown_commands_and_values_name_the_nearest(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert hint in capsys.readouterr().err


def parsers_of(parser: OptionParser) -> dict[str, OptionParser]:
    """Every command, also `bench latency`."""
    found = {}
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        for name, command in dict(action.choices or {}).items():
            assert isinstance(command, OptionParser)
            found[name] = command
            found.update({f"{name} {kind}": own for kind, own in parsers_of(command).items()})
    return found


def test_every_foreign_name_leads_to_one_of_ours() -> None:
    commands = parsers_of(build_parser())
    known = {flag for parser in commands.values() for flag in parser._option_string_actions}
    for ours, _ in OPTIONS.values():
        assert ours is None or ours in known
    for name in [*OPTIONS, *WITHOUT_EFFECT]:
        assert foreign_option(name) is not None
        assert name in WITHOUT_EFFECT or not commands["serve"]._is_known(name)
    for ours, _ in COMMANDS.values():
        assert ours is None or ours in commands


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["serve", "m", "-ngl", "99"], "'--device'"),
        (["chat", "-ngl", "99"], "'--device'"),
        (["chat", "--n-gpu-layers=99", "m"], "'--device'"),
        (["generate", "m", "hi", "--n_gpu_layers", "99"], "'--device'"),
        (["bench", "throughput", "-b", "512"], "'--max-num-batched-tokens'"),
        (["chat", "--trust-remote-code"], WITHOUT_EFFECT["--trust-remote-code"]),
        (["serve", "--mmproj", "f.gguf"], OPTIONS["--mmproj"][1]),
        (["list"], "'models'"),
        (["run", "qwen3"], "'chat'"),
        (["ps"], COMMANDS["ps"][1]),
        (["show", "qwen3"], COMMANDS["show"][1]),
        (["bench", "list"], "known: ops, "),
    ],
)
def test_a_name_of_another_program_is_refused_with_ours(
    words: list[str], ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and ours in capsys.readouterr().err


def test_a_foreign_name_in_a_file_or_keyword_is_refused_with_ours(tmp_path: Path) -> None:
    for name in ("num_ctx", "context-length"):
        with pytest.raises(InvalidInputError, match="'--max-model-len'"):
            config_of(tmp_path, f"{name} = 5")
    with pytest.raises(TypeError, match="'--gpu-memory-utilization'"):
        EngineConfig.of(mem_fraction_static=0.5)


def test_names_of_llama_cpp_for_the_model_are_accepted() -> None:
    words = ["-hf", "org/name:Q8_0", "--alias", "a"]
    config = config_from_args(build_parser().parse_args(["serve", *words]))
    assert config.engine.model == "org/name:Q8_0" and config.served_model_names == ("a",)
    assert build_parser().parse_args(["chat", "-hf", "org/name"]).model == "org/name"


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("--alias", ["--max-loras"], None),
        ("--lora-scaled", ["--max-loras", "--load-timeout"], None),
        ("--max-modle-len", ["--max-model-len", "--max-loras"], "--max-model-len"),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, known: list[str], near: str | None) -> None:
    text = unknown_name("option", name, known)
    assert ("did you mean" in text) == (near is not None) and (near or name) in text


@pytest.mark.parametrize("words", [[], ["serve"], ["bench", "ops"]])
def test_every_command_has_the_version(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--version"])
    assert caught.value.code == 0 and __version__ in capsys.readouterr().out
