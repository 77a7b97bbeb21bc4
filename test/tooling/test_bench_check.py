"""scripts/bench_check.py judges made-up figures, and its result is the exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_check  # noqa: E402

BASE = {
    "prefill_tok_s": 1000.0,
    "decode_tok_s": 100.0,
    "batch_tok_s": 400.0,
    "ttft_s": 2.0,
    "memcpy_ms_per_token": 0.1,
}


def failed(now: dict[str, float], base: dict[str, float] = BASE) -> list[str]:
    verdicts = bench_check.judge([(base, base | now)] * 3)
    return [verdict.figure for verdict in verdicts if not verdict.is_met]


@pytest.mark.parametrize(
    ("figure", "allowed", "too_slow"),
    [
        ("prefill_tok_s", 981.0, 979.0),
        ("decode_tok_s", 98.1, 97.9),
        ("batch_tok_s", 392.1, 391.9),
        ("ttft_s", 2.09, 2.11),
        ("memcpy_ms_per_token", 0.1049, 0.1051),
    ],
)
def test_a_figure_outside_its_limit_fails(figure: str, allowed: float, too_slow: float) -> None:
    assert failed({figure: allowed}) == []
    assert failed({figure: too_slow}) == [figure]


def test_ratios_are_taken_within_a_round_and_one_outlier_does_not_count() -> None:
    """The machine is half as fast in the second round, and the third has an outlier."""
    halved = BASE | {"decode_tok_s": 50.0}
    rounds = [(BASE, BASE), (halved, halved), (BASE, halved)]
    assert all(verdict.is_met for verdict in bench_check.judge(rounds))
    assert not all(verdict.is_met for verdict in bench_check.judge([*rounds[1:], (BASE, halved)]))


def test_differences_below_the_timer_are_not_judged() -> None:
    assert failed({"memcpy_ms_per_token": 0.002}, BASE | {"memcpy_ms_per_token": 0.001}) == []


@pytest.mark.parametrize(("speed", "status"), [(100.0, 0), (90.0, 1)])
def test_exit_status_and_accepted_baseline(
    speed: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--accept stores the current figures by kind of machine, whatever the result."""
    baselines = tmp_path / "baselines.json"
    baselines.write_text(json.dumps({"other machine": {"revision": "1234"}}))
    figures = {tmp_path: BASE, ROOT: BASE | {"decode_tok_s": speed}}
    order = []

    def measure(tree: Path, shape: str, device: str) -> dict[str, float]:
        order.append(tree)
        return figures[tree]

    monkeypatch.setattr(bench_check, "BASELINES", baselines)
    monkeypatch.setattr(bench_check, "machine_kind", lambda device: "this machine")
    monkeypatch.setattr(bench_check, "measure", measure)
    words = ["--base-tree", str(tmp_path), "--rounds", "2", "--accept"]
    monkeypatch.setattr(sys, "argv", ["bench_check.py", *words])
    assert bench_check.main() == status
    assert order == [tmp_path, ROOT, ROOT, tmp_path]  # in turns
    stored = json.loads(baselines.read_text())
    assert set(stored) == {"other machine", "this machine"}
    assert stored["this machine"]["figures"]["decode_tok_s"] == speed
