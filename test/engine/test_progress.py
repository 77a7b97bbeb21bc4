"""Progress of loading a model, and the progress line."""

from __future__ import annotations

import io
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from model_files import write_hf_model

from llaisys.common import progress
from llaisys.common.progress import ProgressLine, progress_listener, report, show_progress
from llaisys.entrypoints.llm import LLM


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def every_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)


def test_loading_reports_its_stages_in_order(tmp_path: Path) -> None:
    write_hf_model(tmp_path)
    heard: list[tuple[str, int, int]] = []
    with progress_listener(lambda *news: heard.append(news)):
        LLM(str(tmp_path)).close()
    stages = list(dict.fromkeys(stage for stage, _, _ in heard))
    assert stages == ["opening the model", "loading weights", "warming up"]
    weights = [(done, total) for stage, done, total in heard if stage == "loading weights"]
    assert weights[0][0] == 0 and len(weights) > 10
    assert all(a < b for (a, _), (b, _) in pairwise(weights))
    assert len({total for _, total in weights}) == 1 and weights[-1][0] < weights[-1][1]


def test_reports_outside_the_listener_block_are_ignored() -> None:
    heard: list[str] = []
    with progress_listener(lambda stage, done, total: heard.append(stage)):
        report("inside")
    report("outside")
    assert heard == ["inside"]


def test_progress_line_is_rewritten_and_erased() -> None:
    out = FakeTerminal()
    with show_progress(out):
        report("opening the model")
        report("loading weights", 15, 60)
        report("x", 60, 60)
    sampled = out.getvalue().split("\r")
    assert sampled[0] == "opening the model ..."
    assert sampled[1] == "loading weights [" + "#" * 7 + "." * 23 + "]  25 %"
    assert sampled[2].rstrip() == "x [" + "#" * 30 + "] 100 %"
    width = len(sampled[1])
    assert sampled[3:] == [" " * width, ""] and len(sampled[2]) == width


def test_progress_line_is_refreshed_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 3600.0)
    out = FakeTerminal()
    line = ProgressLine(out)
    for done in range(1000):
        line.show("loading weights", done, 1000)
    line.show("warming up", 0, 0)  # a new stage is shown at once
    assert out.getvalue().count("\r") == 2


def test_nothing_is_written_at_once_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with show_progress(out):
        report("loading weights", 1, 2)
    assert out.getvalue() == ""


class FirstLine(io.StringIO):
    """Signals the first line that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_a_long_stage_is_a_line_every_few_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    out = FirstLine()
    with show_progress(out), show_progress(out):  # of a benchmark and of its model
        report("writing random weights", 1, 4)
        assert out.written.wait(60)
    lines = out.getvalue().splitlines()
    assert set(lines) == {"writing random weights: 0 s  25 %"}
    assert not [thread for thread in threading.enumerate() if thread.name == progress.THREAD_NAME]
