"""The floors and the table of scripts/bench_gpu_sweep.py, which needs a GPU to run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llaisys.models.synthetic import SHAPES, shape_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_gpu_sweep as sweep  # noqa: E402


def test_floors_are_those_of_bytes_or_of_products() -> None:
    options = sweep.parse([])
    floors = sweep.Floors(SHAPES["qwen3-8b"], "auto", options)
    assert floors.decode(1, 200) == pytest.approx(3.45, abs=0.01)
    assert floors.decode(256, 256 * 256) == pytest.approx(5.65, abs=0.01)
    few_tokens = floors.decode(512, 512)  # products
    assert few_tokens == pytest.approx(2 * floors.decode(256, 256))
    assert floors.prefill(4000) == pytest.approx(76.0, abs=0.1)


def test_table_has_ours_floors_and_recorded_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = sweep.parse(["--sequences", "1", "128", "--long", "0"])
    ours = {"shape": "qwen3-8b", "kv": "auto", "decode_ms": {"1": 4.0, "128": 6.0},
            "floor_ms": {"1": 3.0, "128": 4.5}, "prefill_ms": 80.0,
            "prefill_floor_ms": 76.0}  # fmt: skip
    sweep.print_table([ours], sweep.RECORDED, sweep.RECORDED_AS, options)
    printed = capsys.readouterr().out
    assert "vLLM: recorded with vLLM 0.25.1" in printed
    assert "| qwen3-8b | auto | 4 (75%) / 5.23 1.31x | 6 (75%) | 80 (95%) / 100 1.25x |" in printed


def test_shapes_may_be_config_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SHAPES["smollm2-135m"]))
    assert shape_config(str(path)) == SHAPES["smollm2-135m"]
    assert sweep.name_of(str(path)) == "tiny" and sweep.name_of("qwen3-8b") == "qwen3-8b"
