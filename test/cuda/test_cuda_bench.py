"""`llaisys bench` on the GPU: report format, not speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import tiny_config, write_hf_model

from llaisys.bench import ops, target
from llaisys.entrypoints.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("cuda-bench")
    write_hf_model(path, tiny_config(max_position_embeddings=512))
    return str(path)


def test_bench_ops_times_every_kernel_with_gpu_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "LINEAR_SHAPES", {"qwen2.5-1.5b": [(2048, 1536), (50_000, 264)]})
    monkeypatch.setattr(ops, "cold_bytes", lambda: 1 << 24)
    monkeypatch.setattr(target, "GPU_SECONDS", 1e-4)
    monkeypatch.setattr(target, "PASSES", 1)
    arguments = ["bench", "ops", "--device", "cuda", "--model", "qwen2.5-1.5b", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    machine, results = document["machine"], document["results"]
    assert machine["read_bandwidth"] > 1e11 and machine["f32"] > 1e12 and machine["bf16"] > 1e13
    found = {result["op"] for result in results}
    names = {name for name, *_ in ops.ROW_OPS}
    assert found == {"linear", "attention decode", "attention prefill"} | names
    rows = {r["rows"] for r in results if r["op"] == "linear" and r["shape"] == "50000x264"}
    assert rows == set(ops.LINEAR_ROWS)
    assert all(result["microseconds"] > 0 and result["value"] > 0 for result in results)


def test_bench_latency_and_throughput_run_on_the_gpu(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--device", "cuda", "--json", "--prompt-tokens", "20", "--new-tokens", "4"]
    assert main(["bench", "latency", model, *asked]) == 0
    latency = json.loads(capsys.readouterr().out)
    assert latency["decode_tok_s"] > 0 < latency["bandwidth_fraction"] and latency["threads"] == 0
    load = ["--concurrency", "1,3", "--repeats", "1", "--num-kv-blocks", "100"]
    assert main(["bench", "throughput", "--model", model, *asked, *load]) == 0
    assert [run["concurrency"] for run in json.loads(capsys.readouterr().out)["runs"]] == [1, 3]
