"""Options on the command line: an ArgumentParser that accepts every name of an option.

Aliases and deprecated names are replaced before argparse sees them, so help shows one name. An
unknown flag is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from llaisys.common.nearest import unknown_name
from llaisys.common.option_names import Row, deprecation, flag_of, spellings
from llaisys.common.options import Strings, Switch, Toggle, options_of


class OptionParser(argparse.ArgumentParser):
    """Accepts underscores in flags (`--max_model_len`), aliases and deprecated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._replaced: dict[str, tuple[str, bool]] = {}  # flag -> (replacement, deprecated?)
        self._toggles: dict[str, tuple[str, ...]] = {}  # flag that needs no value -> its choices

    def accept_alias(self, flag: str, replacement: str, *, is_deprecated: bool = False) -> None:
        """Read `flag` as `replacement`, which may have a value: "--flag" or "--flag=value"."""
        self._replaced.setdefault(flag, (replacement, is_deprecated))

    def accept_without_value(self, flag: str, choices: tuple[str, ...]) -> None:
        """Read `flag` as `flag=on` unless one of `choices` follows it."""
        self._toggles[flag] = choices

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = self._replace_aliases(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(words, namespace)
        for word in rest:
            if word.startswith("--") and len(word) > 2:
                known = [*self._option_string_actions, *self._replaced]
                self.error(unknown_name("option", word.partition("=")[0], known))
        return found, rest

    def _replace_aliases(self, given: Sequence[str]) -> list[str]:
        words: list[str] = []
        for index, word in enumerate(given):
            if word == "--":
                return [*words, *given[index:]]
            flag, equals, value = word.partition("=")
            if flag.startswith("--") and flag not in self._option_string_actions:
                dashed = flag.replace("_", "-")
                if dashed in self._option_string_actions or dashed in self._replaced:
                    flag = dashed
            replacement, is_deprecated = self._replaced.get(flag, (flag, False))
            if is_deprecated:
                new = replacement.partition("=")[0]
                print(f"{self.prog}: warning: {deprecation(flag, new)}", file=sys.stderr)
            if equals and "=" in replacement:
                self.error(f"{flag} takes no value")
            flag = replacement
            following = given[index + 1] if index + 1 < len(given) else ""
            if not equals and following not in self._toggles.get(flag, (following,)):
                flag += "=on"
            words.append(flag + equals + value)
        return words


class _SwitchAction(argparse.Action):
    """--flag is True, --no-flag is False."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def negated(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def add_flags(parser: OptionParser, group: Any, rows: Iterable[Row]) -> None:
    """A flag for each option that has one, in `group` of `parser`. An option that is not given is
    None in the namespace."""
    for name, about, default in rows:
        if about.flag is None:
            continue
        flag = flag_of(name, about)
        shown = "" if default is None else f" (default: {default})"
        text = f"{about.help}{shown}".replace("%", "%%")
        if isinstance(about.kind, Switch):
            group.add_argument(
                flag, negated(flag), dest=name, action=_SwitchAction, nargs=0, help=text
            )
        else:
            extra: dict[str, Any] = {"type": about.kind.parse, "metavar": name.upper()}
            if isinstance(about.kind, Strings):
                extra["action"] = "append"
            group.add_argument(flag, dest=name, help=text, **extra)
        _accept_names(parser, flag, (name, about, default))


def _accept_names(parser: OptionParser, flag: str, row: Row) -> None:
    about = row[1]
    off = flag + "=off" if isinstance(about.kind, Toggle) else negated(flag)
    if isinstance(about.kind, Toggle):
        parser.accept_without_value(flag, about.kind.choices)
    for name, spelling in spellings([row]).items():
        other = "--" + name.replace("_", "-")
        if other not in parser._option_string_actions:
            new = off if spelling.is_negated else flag
            parser.accept_alias(other, new, is_deprecated=spelling.is_deprecated)
    for other in (*about.aliases, *about.deprecated):
        if other.startswith("-"):
            parser.accept_alias(other, flag, is_deprecated=other in about.deprecated)


def given_flags(options: Any, owner: Any) -> dict[str, Any]:
    """The values of `owner`'s fields that were given on the command line."""
    values = {name: getattr(options, name, None) for name, _, _ in options_of(owner)}
    return {name: value for name, value in values.items() if value is not None}
