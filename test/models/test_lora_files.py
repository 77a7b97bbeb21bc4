"""Adapter files: PEFT directories and GGUF files are read; everything else is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from lora_files import ALL, ATTENTION, Lora
from model_files import tiny_config, write_safetensors

from llaisys.common.errors import ModelLoadError
from llaisys.common.parallel import ParallelConfig
from llaisys.models.families import parse_config
from llaisys.models.loading.convert import convert
from llaisys.models.lora import open_lora, read_lora
from llaisys.models.lora.files import LoraFiles

CONFIG = tiny_config("qwen2")
BASE = parse_config(CONFIG)


def values_of(files: LoraFiles) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    return {
        pair.linear.module: (
            convert(pair.a.read(), pair.a.dtype, "f32"),
            convert(pair.b.read(), pair.b.dtype, "f32"),
            pair.scale,
        )
        for pair in files.pairs
    }


@pytest.mark.parametrize("rank", [1, 8, 64, 256])
@pytest.mark.parametrize("targets", [ALL, ATTENTION, ("q_proj", "v_proj"), ("down_proj",)])
def test_peft_directory_is_read(tmp_path: Path, rank: int, targets: tuple[str, ...]) -> None:
    lora = Lora(CONFIG, rank, targets, use_rslora=rank == 64)
    files = open_lora(str(lora.write_peft(tmp_path / "a")), BASE)
    assert files.rank == rank
    found = values_of(files)
    assert set(found) == set(lora.pairs)
    for module, (a, b) in lora.pairs.items():
        np.testing.assert_array_equal(found[module][0], a)
        np.testing.assert_array_equal(found[module][1], b)
        assert found[module][2] == pytest.approx(lora.scale)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_is_kept(tmp_path: Path, dtype: str) -> None:
    lora = Lora(CONFIG)
    files = open_lora(str(lora.write_peft(tmp_path / "a", dtype)), BASE)
    a = values_of(files)["model.layers.1.mlp.up_proj"][0]
    np.testing.assert_allclose(a, lora.pairs["model.layers.1.mlp.up_proj"][0], rtol=1e-2)
    assert files.pairs[0].a.dtype == dtype


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_gguf_adapter_is_read(tmp_path: Path, arch: str, kind: str) -> None:
    config = tiny_config(arch)
    lora = Lora(config, rank=4)
    files = open_lora(str(lora.write_gguf(tmp_path / "a.gguf", kind)), parse_config(config))
    for module, (a, b, scale) in values_of(files).items():
        np.testing.assert_allclose(a, lora.pairs[module][0], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(b, lora.pairs[module][1], rtol=1e-3, atol=1e-6)
        assert scale == pytest.approx(lora.scale)


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(CONFIG, 4)
    folder = lora.write_peft(tmp_path / "snapshot")
    asked: list[dict[str, Any]] = []

    def snapshot_download(**options: Any) -> str:
        asked.append(options)
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_lora("org/adapter", BASE).rank == 4
    assert asked[0]["repo_id"] == "org/adapter"


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    lora = Lora(CONFIG, rank=4, targets=("q_proj", "up_proj"))
    wide = Lora(CONFIG, rank=6, targets=("up_proj",))
    lora.pairs.update(wide.pairs)
    path = lora.write_peft(
        tmp_path / "a", rank_pattern={"up_proj": 6}, alpha_pattern={"mlp.up_proj": 3}
    )
    found = values_of(open_lora(str(path), BASE))
    assert found["model.layers.0.mlp.up_proj"][2] == pytest.approx(0.5)
    assert found["model.layers.0.self_attn.q_proj"][2] == pytest.approx(4.0)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj", "(a+)+$"])
def test_targets_as_text_are_accepted(tmp_path: Path, targets: str) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a", target_modules=targets)
    assert len(open_lora(str(path), BASE).pairs) == 14


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 9}, "rank 8"),
        ({"r": 257}, "r is 257"),
        ({"r": "x"}, "r is"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": [3]}, "target_modules"),
        ({"rank_pattern": {"(a+)+": 3}}, "rank_pattern"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a", **changes)
    with pytest.raises(ModelLoadError) as caught:
        open_lora(str(path), BASE)
    assert named in str(caught.value)


def rewritten(tmp_path: Path, change: Any) -> Path:
    """An adapter whose tensors `change` has altered."""
    lora = Lora(CONFIG, targets=("q_proj", "v_proj"))
    path = lora.write_peft(tmp_path / "a")
    tensors = lora.tensors()
    change(tensors)
    write_safetensors(path / "adapter_model.safetensors", tensors)
    return path


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{FIRST}A.weight"), "lora_A of"),
        (lambda t: t.pop(f"{FIRST}B.weight"), "lora_B of"),
        (lambda t: t.clear(), "no tensors"),
        (lambda t: [t.pop(f"{FIRST}{x}.weight") for x in "AB"], "has no tensors"),
        (lambda t: t.update({f"{FIRST}A.weight": t[f"{FIRST}A.weight"][:, :-1]}), "needs [8, 64]"),
        (lambda t: t.update({f"{FIRST}B.weight": t[f"{FIRST}B.weight"][:-1]}), "needs [64, 8]"),
        (lambda t: t.update({"base_model.model.lm_head.weight": np.ones((2, 2))}), "lm_head"),
        (lambda t: t.update({f"{FIRST}magnitude_vector": np.ones(64)}), "DoRA"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        open_lora(str(rewritten(tmp_path, change)), BASE)
    assert named in str(caught.value)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{FIRST}B.weight"][3, 2] = np.nan

    files = open_lora(str(rewritten(tmp_path, change)), BASE)
    with pytest.raises(ModelLoadError):
        read_lora(files, BASE, ParallelConfig())


def test_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with naming(ModelLoadError, "adapter_model.bin"):
        open_lora(str(path), BASE)
    (path / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError):
        open_lora(str(path), BASE)
    with pytest.raises(ModelLoadError):
        open_lora(str(tmp_path / "absent"), BASE)


def test_truncated_and_changed_files_are_refused(tmp_path: Path) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a")
    weights = path / "adapter_model.safetensors"
    data = weights.read_bytes()
    files = open_lora(str(path), BASE)
    weights.write_bytes(data[:-100])
    with pytest.raises(ModelLoadError):
        open_lora(str(path), BASE)
    with pytest.raises(ModelLoadError):
        read_lora(files, BASE, ParallelConfig())


def test_links_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a")
    weights = path / "adapter_model.safetensors"
    os.rename(weights, tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with naming(ModelLoadError, "link"):
        open_lora(str(path), BASE)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [({"general.type": "model"}, "general.type"), ({"adapter.type": "ia3"}, "adapter.type")],
)
def test_other_gguf_files_are_refused(tmp_path: Path, metadata: dict[str, str], named: str) -> None:
    path = Lora(CONFIG, rank=2).write_gguf(tmp_path / "a.gguf", **metadata)
    with pytest.raises(ModelLoadError) as caught:
        open_lora(str(path), BASE)
    assert named in str(caught.value)


def test_damaged_config_is_refused(tmp_path: Path) -> None:
    path = Lora(CONFIG).write_peft(tmp_path / "a")
    for text in ("", "[]", "{", json.dumps({"r": 8})):
        (path / "adapter_config.json").write_text(text)
        with pytest.raises(ModelLoadError):
            open_lora(str(path), BASE)


def test_shards_of_two_ranks(tmp_path: Path) -> None:
    lora = Lora(CONFIG, rank=4)
    files = open_lora(str(lora.write_peft(tmp_path / "a")), BASE)
    for rank in range(2):
        parallel = ParallelConfig(tensor_parallel_size=2, rank=rank)
        with read_lora(files, BASE, parallel) as weights:
            shapes = {t.field: (tuple(t.a.shape), tuple(t.b.shape)) for t in weights.tensors}
        assert shapes["attn_q_w"] == ((4, 64), (32, 4))
        assert shapes["attn_k_w"] == ((4, 64), (16, 4))
        assert shapes["attn_o_w"] == ((4, 32), (64, 4))
        assert shapes["mlp_up_w"] == ((4, 64), (48, 4))
        assert shapes["mlp_down_w"] == ((4, 48), (64, 4))


def test_fused_modules_are_split(tmp_path: Path) -> None:
    """Phi-3 has one module for q, k and v, and one for gate and up."""
    config = tiny_config("phi3", sliding_window=None)
    base = parse_config(config)
    rng = np.random.default_rng(1)
    tensors, parts = {}, {"self_attn.qkv_proj": 64 + 2 * 32, "mlp.gate_up_proj": 2 * 96}
    for layer in range(2):
        for module, rows in parts.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{name}A.weight"] = rng.standard_normal((4, 64), dtype=np.float32)
            tensors[f"{name}B.weight"] = rng.standard_normal((rows, 4), dtype=np.float32)
    lora = Lora(CONFIG, 4, ("qkv_proj", "gate_up_proj"))
    path = lora.write_peft(tmp_path / "a")
    write_safetensors(path / "adapter_model.safetensors", tensors)
    found = values_of(open_lora(str(path), base))
    assert len(found) == 10
    for ours, module, rows in (
        ("self_attn.q_proj", "self_attn.qkv_proj", slice(0, 64)),
        ("self_attn.v_proj", "self_attn.qkv_proj", slice(96, 128)),
        ("mlp.up_proj", "mlp.gate_up_proj", slice(96, 192)),
    ):
        a, b, _ = found[f"model.layers.1.{ours}"]
        name = f"base_model.model.model.layers.1.{module}.lora_"
        np.testing.assert_array_equal(a, tensors[f"{name}A.weight"])
        np.testing.assert_array_equal(b, tensors[f"{name}B.weight"][rows])
