"""Suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return "unknown WHAT NAME", with the nearest known name if there is one."""
    near = get_close_matches(name, list(known), n=1)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
