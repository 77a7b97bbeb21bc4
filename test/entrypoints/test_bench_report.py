"""Results of `llaisys bench`: units, tables, saved files, comparisons, plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llaisys.bench.ops import Timing
from llaisys.bench.plot import (
    Chart,
    roofline_chart,
    serve_charts,
    svg_page,
    throughput_charts,
)
from llaisys.bench.report import (
    format_comparison,
    format_fields,
    format_table,
    quantity,
    save_result,
)
from llaisys.entrypoints.cli import main

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("decode_tok_s", 1234.5, "1,234 tok/s"),
        ("tok_s", 98.76, "98.76 tok/s"),
        ("ttft_ms", 1532.0, "1.53 s"),
        ("step_ms", 0.0421, "42.10 us"),
        ("itl_ms", 12.3, "12.30 ms"),
        ("microseconds", 0.25, "0.250 us"),
        ("load_s", 0.25, "250.0 ms"),
        ("weights_mb", 1520, "1.52 GB"),
        ("rss_mb", 0.5, "0.500 MB"),
        ("overhead_percent", 3.14, "3.1 %"),
        ("hit_rate", 0.5, "50.0 %"),
        ("bandwidth_fraction", 0.813, "81.3 %"),
        ("threads", 12000, "12,000"),
        ("speedup", 1.5, "1.50"),
        ("same_tokens", True, "yes"),
        ("p99_ms", None, "-"),
        ("model", "m", "m"),
    ],
)
def test_units(name: str, value: object, text: str) -> None:
    assert quantity(name, value) == text


def test_tables_are_aligned() -> None:
    rows = [{"work": "copy", "tok_s": 9.5, "n": 1}, {"work": "a", "tok_s": 1200.0, "n": 20}]
    assert format_table(rows).splitlines() == [
        "work         rate   n",
        "copy   9.50 tok/s   1",
        "a     1,200 tok/s  20",
    ]
    assert format_fields({"load_s": 2, "model": "m"}) == "load   2.00 s\nmodel  m"


def test_comparison_names_rows_and_judges_changes() -> None:
    def result(rate: float, step: float) -> dict[str, Any]:
        run = {"concurrency": 1, "decode_tok_s": rate, "step_ms": step}
        return {"runs": [run], "ttft_ms": {"p50": 5}}

    before, now = result(100.0, 10.0), result(120.0, 12.0)
    lines = [line.split("  ") for line in format_comparison(before, now).splitlines()]
    found = [[part.strip() for part in line if part.strip()] for line in lines]
    assert found == [
        ["before", "now", "change"],
        ["runs concurrency 1 decode", "100.0 tok/s", "120.0 tok/s", "+20.0 %", "better"],
        ["runs concurrency 1 step", "10.00 ms", "12.00 ms", "+20.0 %", "worse"],
        ["ttft p50", "5.00 ms", "5.00 ms", "+0.0 %"],
    ]


def test_save_compare_and_plot(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, plot = tmp_path / "before.json", tmp_path / "plot.svg"
    arguments = ["bench", "throughput", model, "--concurrency", "1,3", "--prompt-tokens", "20"]
    arguments += ["--new-tokens", "4", "--repeats", "1"]
    assert main([*arguments, "--save", str(saved), "--plot", str(plot)]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    names = ("concurrency", "prompt tokens", "new tokens", "decode", "total")
    assert heading.split()[:7] == " ".join(names).split()
    assert len(ElementTree.parse(plot).findall(f".//{SVG}polyline")) == 2
    content = json.loads(saved.read_text())
    assert content["kind"] == "throughput" and len(content["result"]["runs"]) == 2

    assert main([*arguments, "--json", "--compare", str(saved)]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["runs"]) == 2 and "concurrency 3 decode" in printed.err

    other = tmp_path / "other.json"
    save_result(other, "latency", {})
    for file, reason in (
        (other, "`bench latency`, not of `bench throughput`"), (plot, "was not written by --save"),
        (tmp_path / "none", "No such file"),
    ):  # fmt: skip
        assert main([*arguments, "--compare", str(file)]) == 1
        assert reason in capsys.readouterr().err
    assert main([*arguments, "--save", str(tmp_path / "no" / "x")]) == 1
    assert "save: " in capsys.readouterr().err


def circles(chart: Chart) -> int:
    page = ElementTree.fromstring(svg_page([chart]))
    for element in page.iter():
        for name in ("x", "y", "cx", "cy", "x1", "y1"):
            place = element.get(name)
            assert place is None or 0 <= float(place) <= 760
    return len(page.findall(f".//{SVG}circle"))


def test_charts() -> None:
    percentiles = {"p50": 1.0, "p90": 2.0, "p99": None}
    runs = [
        {"concurrency": n, "throughput_tok_s": 10.0 * n, "ttft_ms": percentiles,
         "itl_ms": percentiles, "e2e_ms": percentiles}
        for n in (8, 1)
    ]  # fmt: skip
    assert [circles(chart) for chart in serve_charts(runs)] == [2, 4, 4, 4]
    [chart] = throughput_charts([{"concurrency": 1, "decode_tok_s": 0.0, "total_tok_s": 0.0}])
    assert circles(chart) == 2  # values of 0 do not divide by 0


def test_roofline_has_a_limit_and_dots_per_dtype() -> None:
    limits = SimpleNamespace(read_bandwidth=1e10, peak_of=lambda op, dtype: (1e11, "GFLOP/s"))
    timings = [
        Timing("linear", dtype, "8x8", rows, 1e-3, 1e6, 1e6 * rows)
        for dtype in ("bf16", "q4_0")
        for rows in (1, 64)
    ]
    chart = roofline_chart({"cpu": "<test>"}, timings, limits)
    assert circles(chart) == 4 and set(chart.limits or {}) == {"limit bf16", "limit q4_0"}
    for points in (chart.limits or {}).values():
        assert max(y for _, y in points) == 100.0  # GOP/s
        assert points[0][1] == pytest.approx(points[0][0] * 10)  # bound by 10 GB/s
