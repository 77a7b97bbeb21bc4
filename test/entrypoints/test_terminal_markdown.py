"""Markdown in a terminal: styles, text at once, whatever the pieces."""

from __future__ import annotations

import re

import pytest

from llaisys.entrypoints.terminal_markdown import BOLD, CYAN, ITALIC, RESET, MarkdownWriter

SAMPLE = """\
# Title *x*

Some **bold** and *italic*, `code **x**`, 2 * 3 * 4, 5*3*2, snake_case. ***both***
**Start** of a line
- item one **b**
* item two
  - nested
1. first
> quote `c`

```python
def f(*a, **k):
    # comment

    return a ** 2
```
`unclosed
next **unclosed
---
***
end *"""


def shown(text: str, size: int = 1 << 20) -> str:
    written: list[str] = []
    writer = MarkdownWriter(written.append)
    for begin in range(0, len(text), size):
        writer.feed(text[begin : begin + size])
    writer.finish()
    return "".join(written)


def plain(text: str) -> str:
    return re.sub(r"\033\[\d+m", "", text)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_do_not_matter(size: int) -> None:
    assert shown(SAMPLE, size) == shown(SAMPLE)


def test_markers_become_styles_and_other_text_stays() -> None:
    lines = plain(shown(SAMPLE)).split("\n")
    assert lines[2] == "Some bold and italic, code **x**, 2 * 3 * 4, 5*3*2, snake_case. both"
    assert lines[3:8] == ["Start of a line", "• item one b", "• item two", "  • nested", "1. first"]
    assert lines[8] == "│ quote c"
    assert lines[10:16] == SAMPLE.split("\n")[10:16]  # a code block is not changed
    assert lines[18:] == ["---", "***", "end *"]


def test_styles() -> None:
    assert shown("a **b** c") == f"a {RESET}{BOLD}b{RESET} c"
    assert shown("*i*") == f"{RESET}{ITALIC}i{RESET}"
    assert shown("`c`") == f"{RESET}{CYAN}c{RESET}"
    assert shown("# h\nx") == f"{BOLD}# h{RESET}\nx"
    assert shown("```\nx\n```\ny").endswith(f"{RESET}\ny")


def test_styles_end_with_their_line() -> None:
    assert shown("**open\nnext") == f"{RESET}{BOLD}open{RESET}\nnext"


def test_text_is_written_before_the_line_ends() -> None:
    written: list[str] = []
    writer = MarkdownWriter(written.append)
    for word in ("Hello", " wor", "ld, 2 **"):
        writer.feed(word)
    assert "".join(written) == "Hello world, 2 "


def test_control_characters_are_removed() -> None:
    hostile = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\re\tf\n"
    assert shown(hostile) == "a]0;titleb[2Jc31mde\tf\n"
    assert "\x1b" not in shown("```\n\x1b[2J\n```\n").replace(RESET, "").replace(CYAN, "").replace(
        "\033[2m", ""
    )
