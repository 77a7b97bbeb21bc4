"""Distinguishes control tokens written by a chat template from those in user text (injection).

The template is rendered a second time with marker characters around the characters of every user
string. In that text a control token is contiguous only where the template wrote it: a token made of
user text, or of user and template text together, contains markers. Removing the markers gives the
ordinary rendering and the spans of the genuine tokens.

Templates may inspect the text (split at '</think>', capitalise). Then the fully marked rendering
differs from the ordinary one, and a lighter marking is tried that marks only the first and last
characters of control tokens. If that differs too, the caller must reject the messages.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from llaisys.common.errors import InvalidInputError

# Unicode noncharacters, which do not occur in text for interchange; two unused ones are taken.
_MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Common roles; any other role is treated like message text.
KNOWN_ROLES = frozenset(
    ("system", "user", "assistant", "tool", "developer", "function", "ipython", "model")
)

_MAX_DEPTH = 40  # of groups; deeper words are listed as plain alternatives

Span = tuple[int, int]  # [start, end) of a control token in the rendered text


@dataclass(frozen=True, slots=True)
class Marking:
    """A way to mark user strings: `apply` marks a string, `read` parses the rendered result."""

    apply: Callable[[str], str]
    read: Callable[[str], tuple[str, list[Span]]]


class ControlTokens:
    """The control tokens of a tokenizer. Immutable."""

    def __init__(self, tokens: Iterable[str], in_template: Iterable[str]) -> None:
        """`tokens`: texts that must not come from users; `in_template`: those that occur in the
        template, which it may search for."""
        self.tokens = frozenset(token for token in tokens if token)
        self._pattern = words_pattern(self.tokens)
        self._finder = re.compile(self._pattern)
        whole = words_pattern(self.tokens.intersection(in_template))
        ends = {token[0] for token in self.tokens} | {token[-1] for token in self.tokens}
        edge = f"[{re.escape(''.join(sorted(ends)))}]" if ends else r"(?!)"
        self._light = re.compile(f"{whole}|{edge}")
        self._alphabet = frozenset("".join(self.tokens))

    def find(self, text: str) -> list[Span]:
        """Spans of all control token texts in `text`, leftmost and longest first."""
        return [match.span() for match in self._finder.finditer(text)]

    def markings(self, data: Any) -> Iterator[Marking]:
        """The full and the light marking, with markers that do not occur in `data`."""
        used: set[str] = set()
        for text in _strings(data):
            if not text.isascii():
                used.update(c for c in _MARKERS if c in text)
        free = [c for c in _MARKERS if c not in used and c not in self._alphabet]
        if len(free) < 2:
            raise InvalidInputError(
                "messages: use too many Unicode noncharacters (U+FDD0..FDEF)", field="messages"
            )
        opening, closing = free[:2]
        table = {ord(c): f"{opening}{c}{closing}" for c in self._alphabet}
        wrap = f"{opening}\\g<0>{closing}"
        reader = re.compile(
            f"((?:{opening}[^{opening}{closing}]+{closing})+)|({self._pattern})"
            f"|[{opening}{closing}]"
        )
        drop = {ord(opening): None, ord(closing): None}

        def read(marked: str) -> tuple[str, list[Span]]:
            return _read_marked(marked, reader, drop)

        yield Marking(lambda text: text.translate(table), read)
        yield Marking(lambda text: self._light.sub(wrap, text), read)


def _read_marked(
    marked: str, reader: re.Pattern[str], drop: dict[int, None]
) -> tuple[str, list[Span]]:
    """The text without markers, and the spans of control tokens outside marked text."""
    parts: list[str] = []
    spans: list[Span] = []
    length, last = 0, 0
    for match in reader.finditer(marked):
        if match.start() > last:
            parts.append(marked[last : match.start()])
            length += match.start() - last
        last = match.end()
        if match[1] is not None:
            text = match[1].translate(drop)
        elif match[2] is not None:
            text = match[2]
            spans.append((length, length + len(text)))
        else:
            continue
        parts.append(text)
        length += len(text)
    parts.append(marked[last:])
    return "".join(parts), spans


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield str(key)
            yield from _strings(value)
    elif isinstance(data, list):
        for item in data:
            yield from _strings(item)


def mark_strings(data: Any, apply: Callable[[str], str], key: str = "") -> Any:
    """A copy of JSON-like `data` with `apply` on every user string.

    Known roles, identifiers under 'type' and keys that are identifiers control templates and stay
    unmarked.
    """
    if isinstance(data, str):
        is_control = (key == "role" and data in KNOWN_ROLES) or (
            key == "type" and data.isidentifier()
        )
        return data if is_control else apply(data)
    if isinstance(data, Mapping):
        return {
            k if k.isidentifier() else apply(k): mark_strings(v, apply, k) for k, v in data.items()
        }
    if isinstance(data, list):
        return [mark_strings(item, apply) for item in data]
    return data


def words_pattern(words: Iterable[str]) -> str:
    """A pattern that matches the longest of `words`; without words it matches nothing."""
    ordered = sorted({word for word in words if word})
    return _alternatives(ordered, 0) if ordered else r"(?!)"


def _alternatives(words: list[str], depth: int) -> str:
    """`words`: sorted and distinct; a leading empty word means that the match may end here."""
    if depth > _MAX_DEPTH:
        flat = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        return f"(?:{flat})"
    optional = words[0] == ""
    parts: list[str] = []
    singles: list[str] = []
    for _, group in groupby(words[1:] if optional else words, key=lambda word: word[0]):
        members = list(group)
        if members == [members[0][0]]:
            singles.append(members[0])
            continue
        shared = takewhile(
            lambda pair: pair[0] == pair[1], zip(members[0], members[-1], strict=False)
        )
        prefix = "".join(a for a, _ in shared)
        rest = [word[len(prefix) :] for word in members]
        tail = _alternatives(rest, depth + 1) if len(rest) > 1 else ""
        parts.append(re.escape(prefix) + tail)
    if singles:
        parts.append(f"[{''.join(map(re.escape, singles))}]")
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)})" + ("?" if optional else "")
