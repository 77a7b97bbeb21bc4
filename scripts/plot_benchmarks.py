#!/usr/bin/env python3
"""Make the bar charts of docs/benchmarks.md from its tables.

    scripts/plot_benchmarks.py            write the SVG files
    scripts/plot_benchmarks.py --check    exit status 1 when a file differs from its table

A table below a comment `<!-- plot: FILE; TITLE; lower|higher -->` has cells "ours / theirs". A
bar is the ratio of speeds: theirs / ours where lower is better, ours / theirs where higher is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
MARK = re.compile(r"<!-- plot: (?P<file>[^;]+); (?P<title>[^;]+); (?P<better>lower|higher) -->")
COLORS = ("#0b6bcb", "#1f9d6b", "#d98f00", "#a33bc2", "#c0392b", "#5b6472")
WIDTH, LEFT, RIGHT, TOP = 760, 190, 48, 62
BAR, GAP, GROUP_GAP = 13, 3, 16


@dataclass(frozen=True)
class Chart:
    file: str
    title: str
    series: tuple[str, ...]  # column headings
    rows: tuple[tuple[str, tuple[float, ...]], ...]  # (label, one ratio per series)


def number(text: str) -> float:
    return float(text.strip().replace(",", ""))


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def charts_of(page: str) -> Iterator[Chart]:
    """The charts that a page describes, in its order."""
    lines = page.splitlines()
    for index, line in enumerate(lines):
        found = MARK.fullmatch(line.strip())
        if found is None:
            continue
        table = []
        for row in lines[index + 1 :]:
            if row.startswith("|"):
                table.append(cells_of(row))
            elif table:
                break
        heading, _, *body = table
        rows = []
        for label, *cells in body:
            pairs = [tuple(number(part) for part in cell.split("/")) for cell in cells]
            is_lower = found["better"] == "lower"
            ratios = tuple(b / a if is_lower else a / b for a, b in pairs)
            rows.append((label, ratios))
        yield Chart(found["file"], found["title"], tuple(heading[1:]), tuple(rows))


def svg_of(chart: Chart) -> str:
    """A chart with horizontal bars and a line at 1.0, readable on light and dark pages."""
    group = len(chart.series) * (BAR + GAP) - GAP
    height = TOP + len(chart.rows) * (group + GROUP_GAP) + 24
    longest = max(max(ratios) for _, ratios in chart.rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(chart.title)}">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="600">{escape(chart.title)}</text>',
    ]
    x = 16.0
    for color, name in zip(COLORS, chart.series, strict=False):
        parts.append(f'<rect x="{x:.0f}" y="38" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="48" fill="#333">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    y = TOP + 6
    for label, ratios in chart.rows:
        middle = y + group / 2 + 4
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>'
        )
        for color, ratio in zip(COLORS, ratios, strict=False):
            width = ratio * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
            )
            parts.append(
                f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 2}" font-size="11" fill="#333">'
                f"{ratio:.2f}x</text>"
            )
            y += BAR + GAP
        y += GROUP_GAP - GAP
    one = LEFT + scale
    parts.append(
        f'<line x1="{one:.1f}" y1="{TOP}" x2="{one:.1f}" y2="{height - 22}" stroke="#000" '
        'stroke-dasharray="4 3" stroke-width="1.2"/>'
    )
    parts.append(f'<text x="{one:.1f}" y="{height - 8}" text-anchor="middle">1.0x</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    is_check = "--check" in arguments
    stale = []
    for chart in charts_of(PAGE.read_text(encoding="utf-8")):
        file, svg = PAGE.parent / chart.file, svg_of(chart)
        if not is_check:
            file.write_text(svg, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != svg:
            stale.append(chart.file)
    if stale:
        print(f"differ from docs/benchmarks.md: {', '.join(stale)}; run scripts/plot_benchmarks.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
