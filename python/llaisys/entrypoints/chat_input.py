"""Input of `llaisys chat`: line editing, a history file, completion, several lines."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
MAX_HISTORY = 1000  # lines


def edit_lines(history: Path, commands: Sequence[str]) -> None:
    """Edit the lines of a terminal with readline: arrows, Ctrl-R, tab for `commands`. Lines of
    earlier chats are read from `history`; this one's are appended to it."""
    if not sys.stdin.isatty():
        return
    try:
        import atexit
        import readline
    except ImportError:
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(MAX_HISTORY)
    before = readline.get_current_history_length()

    def save() -> None:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.append_history_file(readline.get_current_history_length() - before, history)

    atexit.register(save)
    readline.set_completer_delims(" ")
    readline.set_completer(
        lambda text, number: (
            ([*(name for name in commands if name.startswith(text)), None])[number]
            if text.startswith("/")
            else None
        )
    )
    readline.parse_and_bind("tab: complete")


def ask() -> str | None:
    """The next question; None at the end. It has several lines between two \"\"\" or where a line
    ends in a backslash. Ctrl-C discards what was typed; on an empty line it is the end."""
    lines: list[str] = []
    is_quoted = False
    try:
        while True:
            line = input(MORE if lines or is_quoted else PROMPT)
            if not is_quoted and not lines and line.lstrip().startswith(QUOTES):
                is_quoted, line = True, line.lstrip().removeprefix(QUOTES)
                if line.rstrip().endswith(QUOTES):
                    return line.rstrip().removesuffix(QUOTES).strip()
                lines += [line] if line.strip() else []
            elif is_quoted and line.rstrip().endswith(QUOTES):
                lines.append(line.rstrip().removesuffix(QUOTES))
                return "\n".join(lines).strip()
            elif is_quoted:
                lines.append(line)
            elif line.endswith("\\"):
                lines.append(line.removesuffix("\\"))
            else:
                return "\n".join([*lines, line]).strip()
    except EOFError:
        print()
        return "\n".join(lines).strip() or None
    except KeyboardInterrupt:
        print()
        return "" if lines or is_quoted else None
