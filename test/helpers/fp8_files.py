"""FP8 model directories with scales per tensor, row and block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf_blocks import e4m3_values
from model_files import tiny_config, tiny_weights, write_tiny_tokenizer
from native_helpers import Array

CONFIG = tiny_config("qwen2", hidden_size=256, intermediate_size=384)
Q_PROJ = "model.layers.0.self_attn.q_proj"
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def compressed(strategy: str) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


SECTIONS = {
    "fp8 block": BLOCK,
    "fp8 tensor": {"quant_method": "fp8"},
    "fp8 static tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "compressed channel": compressed("channel"),
    "compressed tensor": compressed("tensor"),
    "compressed block": compressed("block"),
}


def write_raw(path: Path, tensors: dict[str, Array]) -> None:
    """A safetensors file; uint8 arrays are e4m3."""
    names = {"u1": "F8_E4M3", "f4": "F32"}
    header, blobs, offset = {}, [], 0
    for name, values in tensors.items():
        blob = values.tobytes()
        header[name] = {
            "dtype": names[values.dtype.str[1:]],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_fp8(directory: Path, kind: str, **changes: Any) -> dict[str, Array]:
    """Write a model directory and return its dequantised weights. `changes`: tensors of q_proj."""
    rng = np.random.default_rng(0)
    worth, stored = tiny_weights(CONFIG), {}
    suffix = "weight_scale_inv" if kind == "fp8 block" else "weight_scale"
    for name, values in list(worth.items()):
        if "proj.weight" not in name:
            stored[name] = values.astype("<f4")
            continue
        n, k = values.shape
        q = rng.integers(0, 256, (n, k), np.uint8)
        q[(q & 127) == 127] = 0
        shape: tuple[int, ...] = (1,) if kind.endswith("tensor") else (n, 1)
        if kind.endswith("block"):
            shape = (-(-n // 128), -(-k // 128))
        scales = rng.uniform(1e-4, 2e-3, shape).astype("<f4")
        wide = scales.reshape(1, 1) if scales.size == 1 else scales
        if kind.endswith("block"):
            wide = scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
        worth[name] = (e4m3_values()[q] * wide).astype(np.float32)
        stored[name] = q
        stored[name.removesuffix("weight") + suffix] = scales
        if "static" in kind:  # not used: scales chosen at run time are finer
            stored[name.removesuffix("weight") + "input_scale"] = np.array([0.02], "<f4")
    stored |= {f"{Q_PROJ}.{name}": value for name, value in changes.items()}
    directory.mkdir(exist_ok=True)
    write_raw(directory / "model.safetensors", stored)
    config = CONFIG | {"quantization_config": SECTIONS[kind]}
    (directory / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(directory)
    return worth
