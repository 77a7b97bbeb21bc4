"""A trie-shaped regular expression that matches any of many words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby, takewhile

_MAX_DEPTH = 40  # of groups; deeper words are listed as plain alternatives


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
