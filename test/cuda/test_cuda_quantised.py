"""Quantised weights on the GPU against weights that are dequantised on the CPU.

The kernels round scales to bf16 and weights to the dtype of the activations: a relative error of
about 2^-9 each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_helpers import (
    F8,
    GROUPED,
    IS_SMALL,
    PROMPTS,
    Side,
    matching,
    random_weight,
    tokens,
)
from fp8_files import SECTIONS, write_fp8
from gguf_blocks import HALVES, q4_k_m
from model_files import tiny_config, write_gguf, write_hf_model
from native_helpers import Array, handle_array, normal
from quantised_files import Scheme, write_quantised

from llaisys import LLM, SamplingParams
from llaisys.libllaisys.handles import LinearWeight, Stream
from llaisys.models.tensors import tensor_from_blocks

LIMIT = 7e-3  # relative to the norm of the outputs
# Rows of x: one tile, two tiles, several passes, conversion to 16 bits.
ROWS = (1, 5, 16, 37) if IS_SMALL else (1, 2, 7, 8, 9, 16, 17, 40, 64, 65, 300)


def relative_error(got: Array, expected: Array) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def quantised(side: Side, dtype: str, blocks: Array, columns: int) -> LinearWeight:
    weight = tensor_from_blocks(blocks, (len(blocks), columns), dtype)
    made: LinearWeight = side.keep(LinearWeight(side.keep(weight), side.stream))
    return made


BLOCKS_OF_32 = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "i4_g32", "i8_g32")
CASES = [
    *((kind, columns) for kind in BLOCKS_OF_32 for columns in (32, 96, 2144)),
    *((kind, 128) for kind in ("i4_g128", "i8_g128", *F8)),
    *((kind, columns) for kind in (*HALVES, *GROUPED, *F8) for columns in (768, 2304, 4096, 7424)),
]


@pytest.mark.parametrize(("kind", "columns"), CASES)
def test_products_match_dequantised_weights(
    kind: str, columns: int, streams: dict[str, Stream]
) -> None:
    rows = 37 if columns < 4096 else 261
    dtype, blocks, values = random_weight(kind, rows, columns)
    exact = values.astype(np.float64)
    with Side("cuda", streams["cuda"]) as side:
        weight = quantised(side, dtype, blocks, columns)
        for m in ROWS:
            for activation, out_dtype in (("bf16", "f32"), ("f16", "f16"), ("f32", "f32")):
                tensor = side.tensor(normal(m, columns), activation)
                out = side.empty((m, rows), out_dtype)
                side.run("Linear", tensor, None, 1, handle_array([weight]), None,
                         handle_array([out]))  # fmt: skip
                expected = side.array(tensor).astype(np.float64) @ exact.T
                error = relative_error(side.array(out), expected)
                assert error < LIMIT, (m, activation, error)


@pytest.mark.parametrize("columns", [32, 96, 768, 2144, 3584, 7424])
@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "q4_k", "q5_k", "q6_k", *GROUPED, *F8])
def test_products_of_tensor_cores(kind: str, columns: int, streams: dict[str, Stream]) -> None:
    """Multiples of 16 outputs: up to 96 rows of x at a time."""
    group = 256 if kind.endswith("_k") else 32 if kind.endswith(("_0", "_1", "_g32")) else 128
    columns = -(-columns // group) * group
    with Side("cuda", streams["cuda"]) as side:
        for rows in (16, 272, 2112):
            dtype, blocks, values = random_weight(kind, rows, columns)
            exact = values.astype(np.float64)
            weight = quantised(side, dtype, blocks, columns)
            many = (1, 3, 8, 9, 16, 17, 33, 64, 70, 96, 97, 128, 200, 256)
            for m in many if rows == 272 else (2, 40):
                tensor, out = side.tensor(normal(m, columns), "bf16"), side.empty((m, rows), "f32")
                side.run("Linear", tensor, None, 1, handle_array([weight]), None,
                         handle_array([out]))  # fmt: skip
                expected = side.array(tensor).astype(np.float64) @ exact.T
                error = relative_error(side.array(out), expected)
                # e4m3 rows of x have 4 significant bits.
                has_e4m3_x = kind in F8 and m > 96 and (kind == F8[0] or columns == 128)
                assert error < (4e-2 if has_e4m3_x else LIMIT), (rows, m, error)


def test_adjacent_parts_and_biases(streams: dict[str, Stream]) -> None:
    """Parts of different formats, with and without a bias."""
    columns = 1024
    kinds = ["q4_k", "q6_k", "f8 by row"]
    made = [random_weight(kind, 48 + 16 * i, columns) for i, kind in enumerate(kinds)]
    x = normal(3, columns)
    with Side("cuda", streams["cuda"]) as side:
        weights = [quantised(side, dtype, blocks, columns) for dtype, blocks, _ in made]
        outs = [side.empty((3, len(values)), "bf16") for _, _, values in made]
        bias = normal(64)
        biases = handle_array([None, side.tensor(bias, "f32"), None])
        tensor = side.tensor(x, "bf16")
        side.run("Linear", tensor, None, 3, handle_array(weights), biases, handle_array(outs))
        wide = side.array(tensor).astype(np.float64)
        for i, (out, (_, _, values)) in enumerate(zip(outs, made, strict=True)):
            expected = wide @ values.T.astype(np.float64) + (bias if i == 1 else 0)
            assert relative_error(side.array(out), expected) < LIMIT, kinds[i]


def test_rows_of_x_are_selected(streams: dict[str, Stream]) -> None:
    dtype, blocks, values = random_weight("q4_1", 40, 512)
    x = normal(9, 512)
    with Side("cuda", streams["cuda"]) as side:
        weight = quantised(side, dtype, blocks, 512)
        out = side.empty((3, 40), "f32")
        tensor, rows = side.tensor(x, "bf16"), side.tensor(np.array([7, 0, 7]), "i32")
        side.run("Linear", tensor, rows, 1, handle_array([weight]), None, handle_array([out]))
        expected = side.array(tensor)[[7, 0, 7]].astype(np.float64) @ values.T
        assert relative_error(side.array(out), expected) < LIMIT


def best(model: Path, **options: Any) -> list[dict[int, float]]:
    """Logprobs of the likeliest first tokens of each prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, detokenize=False)
    with LLM(str(model), num_kv_blocks=200, **options) as llm:
        found = llm.generate(PROMPTS, params)
    return [dict(output.outputs[0].logprobs[0].top) for output in found]


SHAPE = {
    "hidden_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1000, "num_hidden_layers": 3,
    "max_position_embeddings": 1024, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_plain_weights_are_quantised_at_load(
    quantization: str, model_type: str, tmp_path: Path
) -> None:
    write_hf_model(tmp_path, tiny_config(model_type, **SHAPE), dtype="bf16")
    limit = {"int8": 0.2, "int4": 0.8, "fp8": 0.5}[quantization]  # bf16 alone: about 0.1
    plain = best(tmp_path, device="cuda")
    for rows in (16, 48, 2048):  # chunks of prompts: fused kernels, passes, conversion
        got = best(tmp_path, device="cuda", quantization=quantization, max_num_batched_tokens=rows,
                   max_num_seqs=4)  # fmt: skip
        for a, b in zip(plain, got, strict=True):
            shared = a.keys() & b.keys()
            assert len(shared) >= 10
            assert 0 < max(abs(a[i] - b[i]) for i in shared) < limit, rows


def check_near(wide: list[dict[int, float]], kept: list[dict[int, float]], limit: float) -> None:
    for a, b in zip(wide, kept, strict=True):
        shared = a.keys() & b.keys()
        assert len(shared) >= 12
        assert 0 < max(abs(a[i] - b[i]) for i in shared) < limit


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("gptq", 4, 128), Scheme("gptq", 8, 128), Scheme("gptq_v2", 4, 32),
        Scheme("awq", 4, 128), Scheme("awq", 4, 64), Scheme("pack-quantized", 4, 32),
        Scheme("pack-quantized", 4, 64), Scheme("pack-quantized", 4, 128, has_zeros=False),
        Scheme("int-quantized", 8, 128),
    ],
    ids=str,
)  # fmt: skip
def test_quantised_directories(scheme: Scheme, tmp_path: Path) -> None:
    write_quantised(tmp_path, scheme)
    check_directory(tmp_path)


def test_act_order(tmp_path: Path) -> None:
    """A tensor whose columns do not lie in group order becomes Q8_0."""
    order = np.random.default_rng(0).permutation(np.arange(128) // 32).astype("<i4")
    changes = {"model.layers.0.self_attn.q_proj.g_idx": order}
    write_quantised(tmp_path, Scheme("gptq", 4, 32), **changes)
    check_directory(tmp_path, desc_act=True)


@pytest.mark.parametrize("kind", SECTIONS)
def test_fp8_directories(kind: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, kind)
    check_directory(tmp_path)


def check_directory(directory: Path, **section: Any) -> None:
    """The model with bf16 activations is near that with weights and activations in f32."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"torch_dtype": "bfloat16"}
    config["quantization_config"] |= section
    path.write_text(json.dumps(config))
    wide = best(directory, device="cpu", dtype="f32")
    for rows in (16, 2048):  # chunks of prompts: fused kernels, conversion
        options = {"max_num_batched_tokens": rows, "max_num_seqs": 4}
        # e4m3 rows of x have 4 significant bits
        check_near(wide, best(directory, device="cuda", **options), 0.6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K_M"])
def test_gguf_stays_quantised(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "Q4_K_M":
        write_gguf(path, tiny_config("qwen2", **SHAPE | {"num_attention_heads": 4}), blocks=q4_k_m)
    else:
        write_gguf(path, tiny_config("qwen2", **SHAPE), kind=kind)
    kept, wide = best(path, device="cuda"), best(path, device="cuda", dtype="bf16")
    check_near(wide, kept, 0.05)
    ours = tokens(path, "cuda", "auto", max_num_seqs=8)
    assert matching(ours, tokens(path, "cuda", "bf16", max_num_seqs=8)) >= 0.3
