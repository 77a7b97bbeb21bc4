"""c_api.md, from the comments of the C headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from reference_pages.markdown import code, one_line, page, prose, table

INCLUDE = Path(__file__).resolve().parents[2] / "include"
# A comment, a declaration up to its semicolon, or an empty line.
ITEM = re.compile(
    r"/\*(?P<comment>.*?)\*/|^(?P<function>LLAISYS_API[^;]*);"
    r"|^(?P<type>typedef [^;{]*(?:\{.*?\})?[^;]*);|(?P<empty>\n[ \t]*\n)",
    re.DOTALL | re.MULTILINE,
)
SHARED = "(as above)"  # a declaration that shares the comment of the one before it
NAME = re.compile(r"(\w+)\s*\((.*)\)\s*$", re.DOTALL)


def c_api_page() -> str:
    parts = [
        prose(
            "Functions and types of `include/llaisys.h`. The comments of the headers state each "
            "contract in full; conventions and lifetimes: "
            "[internals/c_api.md](../internals/c_api.md)."
        )
    ]
    headers = re.findall(r'#include "(.*?)"', (INCLUDE / "llaisys.h").read_text())
    for header in _in_order(headers):
        text = (INCLUDE / header).read_text()
        rows = list(declarations(text))
        if rows:
            intro = _sentence(_plain(text[2 : text.index("*/")]) if text.startswith("/*") else "")
            rows_of = [(code(name), about) for name, about in rows]
            parts += [f"## {header}", prose(intro), table(["Declaration", "Description"], rows_of)]
    return page("C API", *parts)


def _in_order(headers: list[str]) -> list[str]:
    every = {str(path.relative_to(INCLUDE)) for path in INCLUDE.glob("llaisys/**/*.h")}
    return [*headers, *sorted(every - set(headers))]


def declarations(text: str) -> Iterator[tuple[str, str]]:
    """(declaration, first sentence of its comment). A comment is that of the declarations that
    follow it without an empty line; one on the same line wins."""
    body = text[text.index("#define") :] if "#define" in text else text
    comment, last, rest_of_line = "", "", -1
    pending: list[tuple[str, str]] = []
    for found in ITEM.finditer(body):
        if found["comment"] is not None:
            said = _plain(found["comment"])
            between = body[rest_of_line : found.start()] if rest_of_line >= 0 else "\n"
            if pending and "\n" not in between:
                pending[-1] = (pending[-1][0], _sentence(said))
            elif not said.startswith("--"):
                comment = said
        elif found["empty"] is not None:
            comment = ""
        else:
            shown = _function(found["function"]) if found["function"] else _type(found["type"])
            if shown:
                is_shared = bool(comment) and comment == last
                pending.append((shown, SHARED if is_shared else _sentence(comment)))
                last = comment
            rest_of_line = found.end()
    yield from pending


def _plain(comment: str) -> str:
    lines = [line.strip().removeprefix("*").strip() for line in comment.splitlines()]
    return "\n".join(lines).strip()


def _sentence(comment: str) -> str:
    """The first sentence of a comment, or its first paragraph."""
    text = one_line(comment.partition("\n\n")[0])
    end = re.search(r"(?<!e\.g)(?<!i\.e)[.](?= [A-Z`(]|$)", text)
    return text[: end.end()] if end else text


def _function(text: str) -> str:
    found = NAME.search(one_line(text).removeprefix("LLAISYS_API").strip())
    if found is None:
        return ""
    names = [re.sub(r"\[.*", "", item).split()[-1].lstrip("*") for item in found[2].split(",")]
    return f"{found[1]}({', '.join(name for name in names if name != 'void')})"


def _type(text: str) -> str:
    flat = one_line(re.sub(r"\{.*\}", "", text, flags=re.DOTALL)).removeprefix("typedef ")
    kind = flat.split()[0]
    name = re.sub(r"[*)].*", "", flat.split()[-1].lstrip("*(")) or flat.split()[-1]
    return f"{kind} {name}" if kind in ("struct", "enum") else name
