"""Options on the command line: an ArgumentParser that accepts every name of an option.

Aliases and deprecated names are replaced before argparse sees them, so help shows one name. An
unknown flag is an error that names the nearest known one. `--help` shows the common options,
`--help-all` every option.
"""

import argparse
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from llaisys.common.foreign_names import foreign_option, unknown_command, unknown_option
from llaisys.common.option_names import Row, deprecation, flag_of, spellings
from llaisys.common.options import GROUPS, Choice, Names, Option, Switch, Toggle, options_of
from llaisys.common.validation import unknown_name
from llaisys.common.version import __version__

HELP_COLUMN = 38
MAX_WIDTH = 100


class HelpFormatter(argparse.HelpFormatter):
    """`-s, --long VALUE` in one column, help in the other."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=min(HELP_COLUMN, width // 2), width=width)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # argparse leaves out their indent
            names = [len(name) for name in action.choices]
            self._action_max_length = max(self._action_max_length, max(names) + 4)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if isinstance(action, _SwitchAction):
            flag = action.option_strings[0]
            return "--[no-]" + flag.removeprefix("--") if action.is_on else flag
        flags = ", ".join(action.option_strings)
        if action.nargs == "+":
            return f"{flags} {action.metavar} ..."
        return f"{flags} {self._format_args(action, action.dest.upper())}".rstrip()


class OptionParser(argparse.ArgumentParser):
    """Accepts underscores in flags (`--max_model_len`), aliases and deprecated flags."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs = {"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs}
        super().__init__(add_help=False, **kwargs)
        self._replaced: dict[str, tuple[str, bool]] = {}  # flag -> (replacement, deprecated?)
        # Flag that is on without a value -> the values that may follow it.
        self.toggles: dict[str, tuple[str, ...]] = {}
        # Switch of another program that is accepted with a warning -> the reason.
        self.without_effect: dict[str, str] = {}
        self._named_groups: dict[str, argparse._ArgumentGroup] = {}
        self.uncommon: set[str] = set()  # destinations that --help leaves out
        self._help_group = super().add_argument_group("help")
        text = "Show this help and exit"
        self._help_group.add_argument("-h", "--help", action="help", help=text)
        self._help_group.add_argument(
            "--help-all", action=_HelpAllAction, nargs=0, default=argparse.SUPPRESS,
            help="Show every option and exit",
        )  # fmt: skip
        is_command = " " in self.prog  # help shows it for `llaisys` only
        self._help_group.add_argument(
            "--version", action="version", version=f"llaisys {__version__}",
            help=argparse.SUPPRESS if is_command else "Show the version and exit",
        )  # fmt: skip

    # ---- names ---------------------------------------------------------------------------------

    def accept_alias(self, flag: str, replacement: str, *, is_deprecated: bool = False) -> None:
        """Read `flag` as `replacement`, which may have a value: "--flag" or "--flag=value"."""
        self._replaced.setdefault(flag, (replacement, is_deprecated))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = self._replace_aliases(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(words, namespace)
        for word in rest:
            if word.startswith("-") and len(word) > 2:
                self._refuse(word.partition("=")[0])
        return found, rest

    def _refuse(self, flag: str) -> None:
        self.error(unknown_option(flag, [*self._option_string_actions, *self._replaced]))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest of the choices, such as commands."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            if isinstance(action, argparse._SubParsersAction):
                raise argparse.ArgumentError(None, unknown_command(str(value), known))
            text = unknown_name("value", str(value), known)
            raise argparse.ArgumentError(
                action, text if "did you mean" in text else f"{text}; known: {', '.join(known)}"
            )

    def _replace_aliases(self, given: Sequence[str]) -> list[str]:
        words: list[str] = []
        for index, word in enumerate(given):
            if word == "--":
                return [*words, *given[index:]]
            flag, equals, value = word.partition("=")
            dashed = flag.replace("_", "-")
            if flag.startswith("--") and self._is_known(dashed) and not self._is_known(flag):
                flag = dashed
            if flag in self.without_effect:
                self._warn(f"{flag} has no effect: {self.without_effect[flag]}")
                continue
            if not self._subparsers and not self._is_known(flag) and foreign_option(flag):
                self._refuse(flag)  # before argparse reads its value as something else
            replacement, is_deprecated = self._replaced.get(flag, (flag, False))
            if is_deprecated:
                self._warn(deprecation(flag, replacement.partition("=")[0]))
            if equals and "=" in replacement:
                self.error(f"{flag} takes no value")
            flag = replacement
            following = given[index + 1] if index + 1 < len(given) else ""
            if not equals and following not in self.toggles.get(flag, (following,)):
                flag += "=on"
            words.append(flag + equals + value)
        return words

    def _is_known(self, flag: str) -> bool:
        return any(
            flag in known
            for known in (self._option_string_actions, self._replaced, self.without_effect)
        )

    def _warn(self, text: str) -> None:
        print(f"{self.prog}: warning: {text}", file=sys.stderr)

    # ---- help ----------------------------------------------------------------------------------

    def named_group(self, group: str, title: str | None = None) -> argparse._ArgumentGroup:
        """The group of help for options of `group`, one of GROUPS."""
        if group not in self._named_groups:
            self._named_groups[group] = self.add_argument_group(title or GROUPS[group])
        return self._named_groups[group]

    def format_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), [], [])
        return formatter.format_help()

    def format_help(self, *, show_all: bool = False) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), [], [])
        formatter.add_text(self.description)
        named = [self._named_groups[name] for name in GROUPS if name in self._named_groups]
        own = [group for group in self._action_groups if group not in (*named, self._help_group)]
        for group in (*own, *named, self._help_group):
            shown = [a for a in group._group_actions if show_all or a.dest not in self.uncommon]
            if not self.uncommon:
                shown = [action for action in shown if not isinstance(action, _HelpAllAction)]
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(shown)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _short_usage(self) -> str:
        """The usage without the list of every flag."""
        words = []
        for action in self._get_positional_actions():
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            forms = {"*": f"[{name} ...]", "?": f"[{name}]", "+": f"{name} ..."}
            words.append(forms.get(str(action.nargs), name))
        return " ".join(["%(prog)s", *words, "[options]"])


class _HelpAllAction(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(parser.format_help(show_all=True), sys.stdout)
        parser.exit()


class _SwitchAction(argparse.Action):
    """--flag is True, --no-flag is False."""

    def __init__(self, *, is_on: bool, **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)
        self.is_on = is_on  # the default

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


class _RepeatAction(argparse.Action):
    """Collect the values of a flag that may be repeated."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest) or []
        items = values if isinstance(values, list) else [values]
        found = [i for item in items for i in (item if isinstance(item, list) else [item])]
        setattr(namespace, self.dest, [*before, *found])


def negated(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def help_of(about: Option, default: Any) -> str:
    """The help line: text, choices that the metavar does not show, default."""
    text = about.help
    if isinstance(about.kind, Choice) and (about.metavar or about.kind.metavar == "NAME"):
        text += ": " + ", ".join(about.kind.choices)
    if not about.default_text and (default is None or default is False or default == ()):
        return text
    return f"{text} (default: {about.shown_default(default)})"


def add_flags(
    parser: OptionParser,
    rows: Iterable[Row],
    *,
    titles: Mapping[str, str] | None = None,
    shown: Collection[str] | None = None,
) -> None:
    """Add a flag for each option that has one; an option that is not given is None in the
    namespace. `titles`: of groups, where they differ from GROUPS. `shown`: the options in help;
    None: all. The other flags are accepted and their values left to the caller."""
    for name, about, default in rows:
        if about.flag is None:
            continue
        group = parser.named_group(about.group, (titles or {}).get(about.group))
        flag, kind = flag_of(name, about), about.kind
        is_shown = shown is None or name in shown
        text = help_of(about, default).replace("%", "%%") if is_shown else argparse.SUPPRESS
        if isinstance(kind, Switch):
            group.add_argument(
                flag, negated(flag), dest=name, action=_SwitchAction, is_on=default, help=text
            )
        else:
            extra: dict[str, Any] = {"action": _RepeatAction} if kind.repeats else {}
            if isinstance(kind, Names) and kind.several_words:
                extra["nargs"] = "+"
            metavar = about.metavar or kind.metavar
            group.add_argument(
                flag, dest=name, type=kind.parse, metavar=metavar, help=text, **extra
            )
        if is_shown and not about.common:
            parser.uncommon.add(name)
        _accept_names(parser, flag, (name, about, default))


def _accept_names(parser: OptionParser, flag: str, row: Row) -> None:
    kind, about = row[1].kind, row[1]
    off = flag + "=off" if isinstance(kind, Toggle) else negated(flag)
    if isinstance(kind, Toggle):
        parser.toggles[flag] = kind.choices
    for name, spelling in spellings([row]).items():
        other = "--" + name.replace("_", "-")
        if other not in parser._option_string_actions:
            new = off if spelling.is_negated else flag
            parser.accept_alias(other, new, is_deprecated=spelling.is_deprecated)
    for other in (*about.aliases, *about.deprecated):
        if other.startswith("-"):
            new = off if other.startswith("--no-") else flag
            parser.accept_alias(other, new, is_deprecated=other in about.deprecated)


def given_flags(options: Any, owner: Any) -> dict[str, Any]:
    """The values of `owner`'s fields that were given on the command line."""
    values = {name: getattr(options, name, None) for name, _, _ in options_of(owner)}
    return {name: value for name, value in values.items() if value is not None}


MODEL_HELP = "Directory, GGUF file, hub id or short name (default: SmolLM2)"


def add_model_argument(
    parser: OptionParser,
    help: str = MODEL_HELP,
    position: bool = True,
    several: bool = False,
) -> None:
    """`options.model`: the value or None; with `several`, a list of positional arguments or None.
    A model given both ways is a usage error."""
    group = parser.named_group("model")
    if position:
        nargs = "*" if several else "?"
        group.add_argument("model", nargs=nargs, metavar="MODEL", action=_Once, help=help)
        help = argparse.SUPPRESS  # one line of help for both forms
    group.add_argument("-m", "--model", dest="model", metavar="MODEL", action=_Once, help=help)
    for flag in ("-hf", "-hfr", "--hf-repo"):  # of llama.cpp, which names the hub's models apart
        parser.accept_alias(flag, "--model")


class _Once(argparse.Action):
    """Store the value. argparse reports a positional argument that is left out as None."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values is None or values == []:
            return
        if isinstance(values, list) and len(values) == 1:
            values = values[0]
        before = getattr(namespace, self.dest, None)
        if before is not None:
            parser.error(f"MODEL is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)
