"""Results of a benchmark as tables, saved files and comparisons.

The name of a value ends in its unit: `decode_tok_s`, `ttft_ms`, `weights_mb`, `hit_rate`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.version import __version__

# (ending of a name, factor to the base unit, base unit); the first match applies.
_UNITS = (
    ("tok_s", 1.0, "tok/s"),
    ("_ms_per_step", 1e-3, "s"),
    ("_ms_per_token", 1e-3, "s"),
    ("microseconds", 1e-6, "s"),
    ("_ms", 1e-3, "s"),
    ("_mb", 1e6, "B"),
    ("_percent", 0.01, "%"),
    ("_fraction", 1.0, "%"),
    ("fraction", 1.0, "%"),
    ("hit_rate", 1.0, "%"),
    ("acceptance", 1.0, "%"),
    ("_s", 1.0, "s"),
)
_LABELS = {"tok_s": "rate", "microseconds": "time", "fraction": "of the limit"}
# Words of names of which less is better, and more.
_LOWER = ("_ms", "_s", "_mb", "microseconds", "perplexity", "overhead", "errors")
_HIGHER = ("tok_s", "speedup", "hit_rate", "fraction", "acceptance", "accepted", "right")
_SETTINGS = ("concurrency", "prompt_tokens", "new_tokens", "threads", "requests", "rows")
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((1e9, "GB"), (1e6, "MB")),
}
KIND, VERSION = "llaisys-bench", 1


def _unit(name: str) -> tuple[float, str]:
    found = ((factor, unit) for ending, factor, unit in _UNITS if name.endswith(ending))
    return next(found, (1.0, ""))


def label(name: str) -> str:
    """The name without its unit."""
    if name in _LABELS:
        return _LABELS[name]
    for ending in ("_tok_s", "_ms", "_mb", "_s", "_percent", "_fraction"):
        name = name.removesuffix(ending)
    return name.replace("_ms_per_", "_per_").replace("_", " ")


def quantity(name: str, value: Any) -> str:
    """A value with its unit, three or four digits of it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    factor, unit = _unit(name)
    if unit == "" and isinstance(value, int):
        return f"{value:,}"
    value = value * factor
    if unit == "%":
        return f"{100 * value:.1f} %"
    scales = _SCALES.get(unit, ((1.0, unit),))
    size, scaled = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    value /= size
    places = next((p for p, least in enumerate((1000, 100, 1)) if abs(value) >= least), 3)
    return f"{value:,.{places}f} {scaled}".strip()


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys; the first row of the text has their labels."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [[label(name) for name in names]]
    lines += [[quantity(name, row.get(name)) for name in names] for row in rows]
    return _aligned(lines, [isinstance(rows[0][name], str) for name in names])


def format_fields(fields: Mapping[str, Any]) -> str:
    """One line per value."""
    lines = [[label(name), quantity(name, value)] for name, value in fields.items()]
    return _aligned(lines, [True, True])


def _aligned(lines: Sequence[Sequence[str]], are_left: Sequence[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if is_left else text.rjust(width)
            for text, width, is_left in zip(line, widths, are_left, strict=True)
        ).rstrip()
        for line in lines
    )


def save_result(path: Path, kind: str, document: Any) -> None:
    """Write a result for `compare_results`. Raises InvalidInputError."""
    content = {
        "format": KIND,
        "version": VERSION,
        "kind": kind,
        "llaisys": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "result": document,
    }
    write_text(path, json.dumps(content, indent=1) + "\n", "save")


def write_text(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{option}: {path}: {error.strerror}", field=option) from None


def load_result(path: Path, kind: str) -> dict[str, Any]:
    """A file of `save_result`, of the same benchmark."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"compare: {path}: {error.strerror}", field="compare") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != KIND:
        raise InvalidInputError(f"compare: {path} was not written by --save", field="compare")
    if content.get("version") != VERSION or content.get("kind") != kind:
        raise InvalidInputError(
            f"compare: {path} has a result of `bench {content.get('kind')}`, not of `bench {kind}`",
            field="compare",
        )
    return content


def format_comparison(before: Any, now: Any) -> str:
    """A table of every number that both documents have, with its change. "better" and "worse" are
    changes of more than 2 %."""
    old = dict(_numbers(before))
    lines = [["", "before", "now", "change", ""]]
    for path, value in _numbers(now):
        if path not in old or path[-1] in _SETTINGS:
            continue
        was, name = old[path], path[-1]
        metric = name if _unit(name)[1] else next((p for p in path[::-1] if _unit(p)[1]), name)
        change = value / was - 1 if was else 0.0
        lines.append(
            [
                " ".join([*(label(part) for part in path[:-1]), label(name)]),
                quantity(metric, was),
                quantity(metric, value),
                f"{100 * change:+.1f} %" if was else "",
                _judgement(metric, change),
            ]
        )
    return _aligned(lines, [True, False, False, False, True])


def _judgement(name: str, change: float) -> str:
    if abs(change) < 0.02:
        return ""
    if any(word in name for word in _HIGHER):
        return "better" if change > 0 else "worse"
    if any(name.endswith(word) or word in name for word in _LOWER):
        return "better" if change < 0 else "worse"
    return ""


def _numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) of all numbers. A row of a list is named by its texts and its concurrency."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, (*path, name))
    elif isinstance(value, list):
        for row in value:
            if isinstance(row, Mapping):
                keys = [str(v) for v in row.values() if isinstance(v, str)]
                keys += [f"{k} {row[k]}" for k in ("concurrency", "rows") if k in row]
                yield from _numbers(row, (*path, " ".join(keys)))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)
