"""Help of every command: complete, short, and the same table as the options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from llaisys.common.flags import OptionParser, help_of
from llaisys.common.options import GROUPS, Record, Switch, options_of
from llaisys.common.sampling import SamplingParams
from llaisys.engine.config import SpeculativeConfig, engine_rows
from llaisys.entrypoints.cli import build_parser
from llaisys.server.config import Health, Limits, ModelLimits, ServerConfig
from llaisys.server.options import CONFIG, MODEL, MODELS, serve_rows

MAX_LINES = 60
ROWS = [
    *(CONFIG, MODEL, MODELS, *engine_rows(), *options_of(SpeculativeConfig)),
    *(row for owner in (ServerConfig, Limits, Health, ModelLimits) for row in options_of(owner)),
    *options_of(SamplingParams),
]


def commands(parser: argparse.ArgumentParser | None = None) -> Iterator[OptionParser]:
    parser = parser or build_parser()
    assert isinstance(parser, OptionParser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from commands(child)


PARSERS = {parser.prog: parser for parser in commands()}


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_serve_help_fits_two_screens() -> None:
    text = PARSERS["llaisys serve"].format_help()
    assert len(text.splitlines()) <= MAX_LINES
    assert "--max-model-len" in text and "--max-header-bytes" not in text
    assert "--max-header-bytes" in PARSERS["llaisys serve"].format_help(show_all=True)


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_one_line_for_each_common_option(name: str) -> None:
    text = PARSERS[name].format_help()
    assert all(len(line) <= 100 for line in text.splitlines())
    sections = text.partition(":\n")[2]
    for line in sections.splitlines():
        assert not re.match(r" {5,}\S", line), line


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_has_help_that_starts_with_a_capital(name: str) -> None:
    for action in PARSERS[name]._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help, action.option_strings
        if action.help != argparse.SUPPRESS:
            assert re.match(r"[A-Z/]|UTF-8", action.help), action.help
            assert not action.help.endswith("."), action.help


@pytest.mark.parametrize(("name", "about", "default"), ROWS, ids=[row[0] for row in ROWS])
def test_every_option_is_described(name: str, about: object, default: object) -> None:
    from llaisys.common.options import Option

    assert isinstance(about, Option)
    assert about.help[0].isupper() and not about.help.endswith(".") and len(about.help) <= 75
    assert about.shown_default(default)
    assert about.kind.limits() and (about.metavar or about.kind.metavar)
    assert not about.more or about.more.endswith(".")
    if name not in {row[0] for row in options_of(SpeculativeConfig)} or about.group:
        assert about.group in GROUPS


def test_help_all_of_serve_shows_every_option_that_has_a_flag() -> None:
    text = PARSERS["llaisys serve"].format_help(show_all=True)
    for name, about, default in serve_rows():
        flag = about.flag or "--" + name.replace("_", "-")
        if isinstance(about.kind, Switch) and default:
            flag = "--[no-]" + flag.removeprefix("--")
        assert re.search(rf"^  {re.escape(flag)}\b", text, re.MULTILINE), flag
        if default is not None and default != () and not isinstance(about.kind, (Switch, Record)):
            assert help_of(about, default).endswith(f"(default: {about.shown_default(default)})")


def test_help_all_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["serve", "--help-all"])
    assert caught.value.code == 0
    assert "--max-header-bytes" in capsys.readouterr().out
