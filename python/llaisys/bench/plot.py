"""Line charts of benchmark results as SVG files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Self

COLORS = ("#0b6bcb", "#1f9d6b", "#d98f00", "#a33bc2", "#c0392b", "#5b6472")
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 52

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines` have dots; `limits` are dashed lines; `dots` have no line."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    limits: Mapping[str, Points] | None = None
    dots: Mapping[str, Points] | None = None
    is_log: bool = False  # both axes


def svg_page(charts: Sequence[Chart]) -> str:
    """The charts one below the other."""
    height = HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for number, chart in enumerate(charts):
        parts.append(f'<g transform="translate(0 {number * HEIGHT})">')
        parts += _chart(chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float  # pixels
    end: float
    is_log: bool

    @classmethod
    def of(cls, values: Iterable[float], begin: float, end: float, is_log: bool) -> Self:
        found = [value for value in values if not is_log or value > 0] or [1.0]
        low, high = min(found), max(found)
        if is_log:
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        else:
            low, high = min(0.0, low), high * 1.05 or 1.0
        return cls(low, high if high > low else low + max(1.0, low), begin, end, is_log)

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(v, self.low)) for v in (value, low, high))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        size = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step = next(s for s in (1, 2, 5, 10) if (self.high - self.low) / (s * size) <= 6) * size
        return [step * n for n in range(int(self.high / step) + 1)]


def _chart(chart: Chart) -> list[str]:
    groups = [chart.lines, chart.limits or {}, chart.dots or {}]
    points = [point for group in groups for line in group.values() for point in line]
    x = _Axis.of((px for px, _ in points), LEFT, WIDTH - RIGHT, chart.is_log)
    y = _Axis.of((py for _, py in points), HEIGHT - BOTTOM, TOP, chart.is_log)
    parts = [f'<text x="16" y="24" font-size="15" font-weight="600">{escape(chart.title)}</text>']
    for tick in x.ticks():
        parts.append(_tick(x.at(tick), HEIGHT - BOTTOM, x.at(tick), TOP))
        parts.append(_text(x.at(tick), HEIGHT - BOTTOM + 16, _short(tick), "middle"))
    for tick in y.ticks():
        parts.append(_tick(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick)))
        parts.append(_text(LEFT - 8, y.at(tick) + 4, _short(tick), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, chart.x_label, "middle"))
    parts.append(_text(LEFT - 60, TOP - 8, chart.y_label, "start"))
    legend = 16.0
    for number, (name, line) in enumerate(
        item for group in groups for item in group.items()
    ):  # fmt: skip
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x.at(px):.1f},{y.at(py):.1f}" for px, py in line)
        is_limit = name in (chart.limits or {})
        if name not in (chart.dots or {}):
            dash = ' stroke-dasharray="5 4"' if is_limit else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
            )
        if not is_limit:
            parts += [
                f'<circle cx="{x.at(px):.1f}" cy="{y.at(py):.1f}" r="3.5" fill="{color}">'
                f"<title>{escape(name)}: {px:g}, {py:g}</title></circle>"
                for px, py in line
            ]
        parts.append(f'<rect x="{legend:.0f}" y="36" width="11" height="11" fill="{color}"/>')
        parts.append(_text(legend + 16, 46, name, "start"))
        legend += 34 + 7 * len(name)
    return parts


def _tick(x1: float, y1: float, x2: float, y2: float) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="#ddd" stroke-width="1"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333">{escape(text)}</text>'


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"


def throughput_charts(runs: Sequence[Mapping[str, Any]]) -> list[Chart]:
    ordered = sorted(runs, key=lambda run: run["concurrency"])

    def line(name: str) -> Points:
        return [(run["concurrency"], run[name]) for run in ordered]

    lines = {"decode": line("decode_tok_s"), "with prompts": line("total_tok_s")}
    return [Chart("Throughput", "concurrent requests", "tok/s", lines)]


def serve_charts(runs: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Throughput and latency percentiles against concurrency."""
    ordered = sorted(runs, key=lambda run: run["concurrency"])
    rate = [(run["concurrency"], run["throughput_tok_s"]) for run in ordered]
    charts = [Chart("Throughput", "open requests", "tok/s", {"output tokens": rate})]
    titles = {"ttft_ms": "Time to first token", "itl_ms": "Inter-token latency"}
    for name, title in {**titles, "e2e_ms": "End-to-end latency"}.items():
        lines = {
            percentile: [
                (run["concurrency"], run[name][percentile])
                for run in ordered
                if run[name][percentile] is not None
            ]
            for percentile in ("p50", "p90", "p99")
        }
        charts.append(Chart(title, "open requests", "ms", lines))
    return charts


def roofline_chart(machine: Mapping[str, Any], timings: Sequence[Any], limits: Any) -> Chart:
    """Operations per second against operations per byte; `timings`: of `bench.ops.Timing`."""
    dots: dict[str, list[tuple[float, float]]] = {}
    for timing in timings:
        if timing.operations > 0 and timing.n_bytes > 0:
            point = (timing.operations / timing.n_bytes, timing.operations / timing.seconds / 1e9)
            dots.setdefault(timing.dtype, []).append(point)
    intensities = [x for points in dots.values() for x, _ in points] or [1.0]
    bandwidth = limits.read_bandwidth
    rooflines = {}
    for dtype in dots:
        peak = limits.peak_of("linear", dtype)[0]
        low, high = min(intensities), max(*intensities, 2 * peak / bandwidth)
        corner = peak / bandwidth
        rooflines[f"limit {dtype}"] = [
            (x, min(x * bandwidth, peak) / 1e9) for x in sorted({low, corner, high})
        ]
    title = f"Roofline, {machine.get('cpu') or machine.get('gpu')}"
    return Chart(title, "operations per byte", "GOP/s", {}, rooflines, dots, is_log=True)
