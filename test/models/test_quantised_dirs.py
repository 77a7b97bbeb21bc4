"""GPTQ, AWQ and compressed-tensors directories: repacked values are exact, and inconsistent tensors
are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from model_files import write_safetensors, write_tiny_tokenizer
from quantised_files import BY_TOKEN, CONFIG, Scheme, write_quantised

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_dtype
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import TensorBlocks
from llaisys.models.loading.convert import Array
from llaisys.models.loading.grouped_weight import device_blocks
from llaisys.models.loading.shard import Shard

SCHEMES = [
    Scheme("gptq", 4, 128),
    Scheme("gptq", 4, 0),
    Scheme("gptq", 8, 128),
    Scheme("gptq_v2", 4, 32),
    Scheme("awq", 4, 128),
    Scheme("awq", 4, 64),
    Scheme("pack-quantized", 4, 128, has_zeros=False),
    Scheme("pack-quantized", 4, 128),
    Scheme("pack-quantized", 4, 64),
    Scheme("pack-quantized", 4, 32, has_zeros=False),
    Scheme("pack-quantized", 8, 0, has_zeros=False, scales="<f4"),
    Scheme("int-quantized", 8, 0, has_zeros=False, scales="<f4"),
    Scheme("int-quantized", 8, 128),
]
W8A8 = Scheme("int-quantized", 8, 0, has_zeros=False, scales="<f4", activations=BY_TOKEN)
SCHEMES.append(W8A8)
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
PROMPTS = [[5, 9, 200, 31], [7] * 19]


def values_of(blocks: TensorBlocks) -> Array:
    """Dequantised f32 values of blocks, as defined in include/llaisys/types.h."""
    n, k = blocks.shape
    rows = blocks.rows.reshape(n, -1, blocks.block_bytes)
    s = np.ascontiguousarray(rows[:, :, :4]).view("<f4")
    if blocks.type_name == "I8_CHANNEL":
        assert (s == s[:, :1]).all()
        return np.asarray(s * rows[:, :, 4:].view(np.int8), np.float32).reshape(n, k)
    z = np.ascontiguousarray(rows[:, :, 4:6]).view("<f2").astype(np.float32)
    q: Array = rows[:, :, 6:].view(np.int8)
    if blocks.type_name.startswith("I4"):
        pairs = rows[:, :, 6:]
        q = np.stack([pairs & 15, pairs >> 4], -1).reshape(n, rows.shape[1], -1)
    return np.asarray(s * (q.astype(np.float32) - z), np.float32).reshape(n, k)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_repacked_values_are_exact(scheme: Scheme, tmp_path: Path) -> None:
    worth, _ = write_quantised(tmp_path, scheme)
    span = 128 if scheme.group % 128 == 0 else 32
    kind = "I8_CHANNEL" if scheme == W8A8 else f"I{scheme.bits}_G{span}"
    with open_checkpoint(tmp_path) as checkpoint:
        for name, expected in worth.items():
            assert checkpoint.shape(name) == expected.shape
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
            blocks = checkpoint.read_blocks(name)
            assert (blocks is None) == ("proj.weight" not in name)
            if blocks is not None:
                assert checkpoint.record(name) is None
                assert blocks.type_name == checkpoint.block_type(name) == kind
                np.testing.assert_array_equal(values_of(blocks), expected)


@pytest.mark.parametrize("scheme", [*SCHEMES[::3], W8A8], ids=str)
@pytest.mark.parametrize("part", [Shard(0, 32, 64), Shard(1, 128, 256), Shard(1, 32, 64)], ids=str)
def test_rank_reads_its_rows_or_columns(scheme: Scheme, part: Shard, tmp_path: Path) -> None:
    worth, _ = write_quantised(tmp_path, scheme)
    with open_checkpoint(tmp_path) as checkpoint:
        blocks = checkpoint.read_blocks(DOWN + ".weight", part)
        assert blocks is not None
        np.testing.assert_array_equal(values_of(blocks), worth[DOWN + ".weight"][part.index()])
        with naming(ModelLoadError, "down_proj.weight"):
            checkpoint.read_blocks(DOWN + ".weight", Shard(1, 0, 80))


def best_logprobs(llm: LLM) -> list[dict[int, float]]:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    return [dict(output.outputs[0].logprobs[0].top) for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("scheme", [SCHEMES[i] for i in (0, 2, 4, -3, -1)], ids=str)
def test_quantised_directory_equals_dequantised_model(scheme: Scheme, tmp_path: Path) -> None:
    worth, _ = write_quantised(tmp_path / "quantised", scheme)
    plain = tmp_path / "plain"
    plain.mkdir()
    write_safetensors(plain / "model.safetensors", worth)
    (plain / "config.json").write_text(json.dumps(CONFIG))
    write_tiny_tokenizer(plain)
    with LLM(plain) as llm:
        wide = best_logprobs(llm)
    with LLM(tmp_path / "quantised", dtype="f32") as llm:
        assert best_logprobs(llm) == wide
    with LLM(tmp_path / "quantised") as llm:
        quantised = best_logprobs(llm)
    for expected, got in zip(wide, quantised, strict=True):
        shared = expected.keys() & got.keys()
        assert len(shared) >= 12
        assert max(abs(expected[i] - got[i]) for i in shared) < 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"dynamic": False},
        {"strategy": "tensor"},
        {"num_bits": 4},
        {"type": "float"},
        {"symmetric": False},
    ],
    ids=str,
)
def test_other_activations_keep_group_scales(changes: dict[str, Any], tmp_path: Path) -> None:
    scheme = replace(W8A8, activations=tuple((dict(BY_TOKEN) | changes).items()))
    write_quantised(tmp_path, scheme)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.block_type(DOWN + ".weight") == "I8_G128"


def test_w8a8_has_one_scale_per_row_on_the_cpu_alone(tmp_path: Path) -> None:
    worth, _ = write_quantised(tmp_path, W8A8)
    name = DOWN + ".weight"
    with open_checkpoint(tmp_path) as checkpoint:
        options = AdapterOptions()
        assert weight_dtype(checkpoint, name, options) == "i8_channel"
        assert weight_dtype(checkpoint, name, replace(options, device="cuda")) == "i8_g128"
        blocks = checkpoint.read_blocks(name)
        assert blocks is not None and device_blocks(blocks, "cpu", name) is blocks
        grouped = device_blocks(blocks, "cuda", name)
    assert grouped.type_name == "I8_G128"
    np.testing.assert_array_equal(values_of(grouped), worth[name])


def test_w8a8_with_a_zero_point_is_rejected(tmp_path: Path) -> None:
    zeros = {f"{Q_PROJ}.weight_zero_point": np.ones((128, 1), np.int8)}
    write_quantised(tmp_path, W8A8, **zeros)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        naming(ModelLoadError, "q_proj.weight", "zero point"),
    ):
        checkpoint.read_blocks(Q_PROJ + ".weight")


@pytest.mark.parametrize(
    ("scheme", "changes", "words"),
    [
        (SCHEMES[0], {"qzeros": None}, r"q_proj.qzeros' is missing"),
        (
            SCHEMES[0],
            {"scales": np.ones((2, 128), "<f2")},
            r"q_proj.scales' is f16 of shape \[2, 128\]; .* shape \[1, 128\]",
        ),
        (
            SCHEMES[0],
            {"qweight": np.zeros((8, 128), "<i4")},
            r"q_proj.g_idx' is I32 of shape \[128\]; .* shape \[64\]",
        ),
        (
            SCHEMES[4],
            {"qweight": np.zeros((128, 16, 1), "<i4")},
            r"q_proj.qweight' has shape \[128, 16, 1\]; expected two",
        ),
        (SCHEMES[0], {"bias_of_o": np.ones(128, "<f4")}, r"o_proj.bias' is not zero"),
        (
            SCHEMES[0],
            {"g_idx": np.arange(128, dtype="<i4")[::-1] % 2},
            r"q_proj.g_idx' has groups from 0 to 1; expected 0 to 0",
        ),
        (
            SCHEMES[3],
            {"g_idx": 3 - np.arange(128, dtype="<i4") // 32},
            r"q_proj.g_idx' of shape \[128\] reorders the",
        ),
    ],
)
def test_inconsistent_tensors_are_named(
    scheme: Scheme, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    names = {"bias_of_o": "model.layers.0.self_attn.o_proj.bias"}
    named = {names.get(key, f"{Q_PROJ}.{key}"): value for key, value in changes.items()}
    write_quantised(tmp_path, scheme, **named)
    with pytest.raises(ModelLoadError, match=words), LLM(tmp_path):
        pass


def test_zero_biases_of_gptq_are_ignored(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.o_proj.bias": np.zeros(128, "<f2")}
    write_quantised(tmp_path, SCHEMES[0], **bias)
    with LLM(tmp_path) as llm:
        assert best_logprobs(llm)


@pytest.mark.parametrize("layout", ["gptq", "pack-quantized"])
def test_act_order_is_read_as_q8_0(layout: str, tmp_path: Path) -> None:
    scheme = Scheme(layout, 4, 32)
    plain, _ = write_quantised(tmp_path, scheme)
    order = np.random.default_rng(0).permutation(np.arange(128) // 32).astype("<i4")
    name = "g_idx" if layout == "gptq" else "weight_g_idx"
    write_quantised(tmp_path, scheme, **{f"{Q_PROJ}.{name}": order})
    config = json.loads((tmp_path / "config.json").read_text())
    section = config["quantization_config"]
    if layout == "gptq":
        section["desc_act"] = True
    else:
        section["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path) as checkpoint:
        weight = checkpoint.weight(Q_PROJ)  # type: ignore[attr-defined]
        in_order = replace(checkpoint.weight(Q_PROJ), order=None)  # type: ignore[attr-defined]
        assert np.array_equal(in_order.values(), plain[Q_PROJ + ".weight"])
        q = in_order.values() / in_order.scales.repeat(32, 1)
        q += in_order.zeros.repeat(32, 1)
        expected = (q - in_order.zeros[:, order]) * in_order.scales[:, order]
        np.testing.assert_allclose(weight.values(), expected, atol=1e-6)
        for part in (None, Shard(1, 32, 96), Shard(0, 8, 24)):
            blocks = checkpoint.read_blocks(Q_PROJ + ".weight", part)
            assert blocks is not None and blocks.type_name == "Q8_0"
            wanted = expected if part is None else expected[part.index()]
            got = dequantize(blocks.rows, GGMLQuantizationType.Q8_0)
            steps = np.abs(wanted).reshape(len(wanted), -1, 32).max(2).repeat(32, 1) / 127
            assert (np.abs(got - wanted) <= 0.51 * steps + 1e-7).all()
        assert checkpoint.block_type(Q_PROJ + ".weight") == "Q8_0"
    with LLM(tmp_path) as llm:
        assert best_logprobs(llm)
