"""`llaisys bench`: output of each benchmark."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from model_files import tiny_config

from llaisys.bench import ops, target
from llaisys.bench.machine import cpu_name_of
from llaisys.engine.worker import STAGES
from llaisys.entrypoints.cli import main
from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.types import STAGES as NATIVE_STAGES
from llaisys.models.synthetic import SHAPES

PROBED: dict[str, float] = {}


@pytest.fixture(autouse=True)
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each hardware limit once for all tests."""
    probe = Stream.probe

    def probe_once(stream: Stream, name: str) -> float:
        PROBED[name] = PROBED.get(name) or probe(stream, name)
        return PROBED[name]

    monkeypatch.setattr(Stream, "probe", probe_once)


def test_bench_latency_fields(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "latency", model, "--json", "--prompt-tokens", "20", "--new-tokens", "4"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert {
        "model", "dtype", "kv_cache_dtype", "threads", "load_s", "ttft_s", "prefill_tok_s",
        "decode_tok_s", "bandwidth_fraction", "weights_mb", "kv_cache_mb", "rss_mb", "base_rss_mb",
        "peak_rss_mb",
    } <= set(result)  # fmt: skip
    assert result["decode_tok_s"] > 0 and "stage_ms_per_token" not in result


def test_bench_latency_profile(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "latency", model, "--json", "--prompt-tokens", "20", "--new-tokens", "4"]
    assert main([*arguments, "--profile"]) == 0
    stages = json.loads(capsys.readouterr().out)["stage_ms_per_token"]
    assert set(stages) == set(NATIVE_STAGES) and stages["forward"] > 0


def test_bench_throughput_fields(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", "--model", model, "--json", "--concurrency", "1,3"]
    arguments += ["--prompt-tokens", "20", "--new-tokens", "4", "--repeats", "1"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["concurrency"] for run in result["runs"]] == [1, 3]
    assert {
        "prompt_tokens", "new_tokens", "decode_tok_s", "total_tok_s", "outside_native_ms_per_step",
    } <= set(result["runs"][0])  # fmt: skip
    assert "prefix_cache" in result and "stage_ms_per_step" not in result["runs"][0]


def test_bench_throughput_profile(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", "--model", model, "--json", "--concurrency", "2"]
    arguments += ["--prompt-tokens", "20", "--new-tokens", "4", "--repeats", "1", "--profile"]
    assert main(arguments) == 0
    stages = json.loads(capsys.readouterr().out)["runs"][0]["stage_ms_per_step"]
    assert set(stages) == {*STAGES, *(f"native_{stage}" for stage in NATIVE_STAGES)}
    assert {name for name, value in stages.items() if not value > 0} == {"native_collective"}
    native = sum(stages[f"native_{stage}"] for stage in NATIVE_STAGES)
    assert native < stages["run_model_forward"] + stages["sample"]


def test_bench_speculative_compares_with_plain_decoding(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "speculative", model, "--json", "--concurrency", "1,2"]
    arguments += ["--new-tokens", "12", "--repeats", "1"]
    arguments += ["--speculative-config", '{"prompt_lookup_min": 1}']
    assert main(arguments) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["work"], run["concurrency"]) for run in runs] == [
        (work, count) for work in ("copy", "edit", "chat") for count in (1, 2)
    ]
    assert all(run["same_tokens"] and run["tok_s"] > 0 < run["plain_tok_s"] for run in runs)
    assert sum(run["draft_tokens"] for run in runs) > 0


def test_bench_speculative_simulates_an_acceptance_rate(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "speculative", model, "--json", "--concurrency", "1,2"]
    arguments += ["--new-tokens", "40"]
    assert main([*arguments, "--simulate", "1"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["concurrency"], run["drafts_per_step"]) for run in runs] == [(1, 4), (2, 4)]
    for run in runs:
        assert run["same_tokens"] and run["acceptance"] == 1.0 and run["tokens_per_step"] > 4
    assert main([*arguments, "--simulate", "0"]) == 0
    assert {run["tokens_per_step"] for run in json.loads(capsys.readouterr().out)} == {1.0}
    assert main([*arguments, "--simulate", "2"]) != 0
    assert "simulate" in capsys.readouterr().err


def test_bench_speculative_samples_from_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAISYS_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(vocab_size=200, max_position_embeddings=256))
    arguments = ["bench", "speculative", "--shape", "tiny", "--json", "--concurrency", "1,2"]
    assert main([*arguments, "--new-tokens", "40", "--repeats", "1"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["work"], run["concurrency"]) for run in runs] == [
        (work, count) for work in ("free", "chance", "repeat") for count in (1, 2)
    ]
    assert all(run["same_tokens"] and run["tok_s"] > 0 for run in runs)


def test_bench_throughput_rejects_requests_beyond_the_kv_cache(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "throughput", "--model", model, "--concurrency", "9999"]
    assert main([*arguments, "--prompt-tokens", "20", "--new-tokens", "4"]) != 0
    assert "--kv-cache-memory-bytes to at least" in capsys.readouterr().err


def test_bench_ops_reports_every_operator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny sizes: checks the report, not the speed."""
    monkeypatch.setattr(ops, "LINEAR_SHAPES", {"qwen2.5-0.5b": [(40, 24), (40, 256)]})
    monkeypatch.setattr(ops, "cold_bytes", lambda: 1 << 16)
    monkeypatch.setattr(target, "MIN_SECONDS", 1e-4)
    monkeypatch.setattr(target, "PASSES", 1)
    arguments = ["bench", "ops", "--threads", "1", "--model", "qwen2.5-0.5b", "--dtype", "bf16"]
    arguments += ["--dtype", "q4_k", "--dtype", "i4_g128"]
    assert main([*arguments, "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"read_bandwidth", "f32", "f16", "i8"} <= set(document["machine"])
    results = document["results"]
    expected = {"op", "dtype", "shape", "rows", "microseconds", "value", "unit", "limit"}
    expected |= {"fraction"}
    assert all(set(result) == expected for result in results)
    found = {result["op"] for result in results}
    assert {"linear", "attention decode", "attention prefill"} <= found
    assert {name for name, *_ in ops.ROW_OPS} <= found
    products = {(r["dtype"], r["shape"]) for r in results if r["op"] == "linear"}
    assert products == {  # blocks of 256 and 128 do not fit into 24 columns
        *(("bf16", shape) for shape in ("40x24", "40x256")), ("q4_k", "40x256"),
        ("i4_g128", "40x256"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "cpuinfo, name",
    [
        ("processor : 0\nmodel name\t: Some Xeon\nflags : fpu\n", "Some Xeon"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nCPU part\t: 0xd0d\n", "Neoverse-N1"),
        ("CPU implementer : 0x41\nCPU part : 0xfff\n", "implementer 0x41 part 0xfff"),
        ("CPU implementer : 0xc0\nCPU part : 0xd0c\n", "implementer 0xc0 part 0xd0c"),
        ("", platform.machine()),
    ],
)
def test_cpu_name_is_found(cpuinfo: str, name: str) -> None:
    assert cpu_name_of(cpuinfo).endswith(name)
