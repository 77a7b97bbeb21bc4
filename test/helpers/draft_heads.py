"""Tiny random draft heads in their published file formats, and a numpy reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from model_files import SAFETENSORS_NAMES
from numpy.typing import NDArray

Array = NDArray[np.float32]
MTP = "model.mtp_layers.0."


def head_tensors(
    kind: str, config: Mapping[str, Any], draft_vocab: int | None = None, seed: int = 3
) -> dict[str, NDArray[Any]]:
    """Tensors by published name; `draft_vocab`: size of the draft vocabulary."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    prefix = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": MTP}[kind]
    wide = 2 * hidden if kind == "eagle3" else hidden
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (hidden, wide),
        f"{prefix}self_attn.k_proj.weight": (kv, wide),
        f"{prefix}self_attn.v_proj.weight": (kv, wide),
        f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    if kind == "eagle":
        shapes |= {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    elif kind == "eagle3":
        shapes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
        shapes |= {
            f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")
        }
    else:
        shapes[f"{prefix}input_proj.weight"] = (hidden, 2 * hidden)
        names = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in names}
        shapes |= {
            f"{prefix}self_attn.{letter}_proj.bias": (hidden if letter == "q" else kv,)
            for letter in "qkv"
        }
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    tensors: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        scale = 0.3 if name.endswith("bias") else shape[-1] ** -0.5
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        tensors[name] = values * np.float32(0.2) + 1 if "norm" in name else values
    if draft_vocab is not None:
        ids = np.sort(rng.choice(config["vocab_size"], draft_vocab, replace=False))
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), ids)
    return tensors


def write_head(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A directory with config.json and one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    header: dict[str, Any] = {}
    names = {"int64": "I64", "bool": "BOOL", "float32": SAFETENSORS_NAMES["f32"]}
    offset = 0
    for name, values in tensors.items():
        end = offset + values.nbytes
        header[name] = {
            "dtype": names[str(values.dtype)],
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blobs = b"".join(np.ascontiguousarray(v).tobytes() for v in tensors.values())
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blobs)
    return directory


# ---- numpy reference -----------------------------------------------------------------------------


def norm(x: Array, weight: Array, epsilon: float) -> Array:
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon)
    return (x * scale * weight).astype(np.float32)


def rotate(x: Array, positions: NDArray[np.int64], theta: float) -> Array:
    """RoPE (rotate-half, as in transformers) of [n, heads, d]."""
    d = x.shape[-1]
    angles = positions[:, None] * theta ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


def reference_head(
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    embedding: Array,
    output: Array,
    tokens: NDArray[np.int64],
    features: Array,
) -> tuple[Array, Array]:
    """(logits, hidden states) of the first rows of a sequence."""
    hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
    prefix = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": MTP}[kind]
    get = {name.removeprefix(prefix): values for name, values in tensors.items()}
    x, f = embedding[tokens], features
    if kind == "eagle":
        residual = np.concatenate([x, f], -1) @ get["fc.weight"].T + get["fc.bias"]
        inner = residual
    elif kind == "mtp":
        x = norm(x, get["token_layernorm.weight"], epsilon)
        f = norm(f, get["hidden_layernorm.weight"], epsilon)
        residual = np.concatenate([f, x], -1) @ get["input_proj.weight"].T
        inner = norm(residual, get["input_layernorm.weight"], epsilon)
    else:
        residual = f if f.shape[1] == hidden else f @ get["fc.weight"].T
        x = norm(x, get["input_layernorm.weight"], epsilon)
        inner = np.concatenate([x, norm(residual, get["hidden_norm.weight"], epsilon)], -1)
    residual = residual + _attention(config, get, inner)
    inner = norm(residual, get["post_attention_layernorm.weight"], epsilon)
    gate, up = inner @ get["mlp.gate_proj.weight"].T, inner @ get["mlp.up_proj.weight"].T
    residual = residual + (gate / (1 + np.exp(-gate)) * up) @ get["mlp.down_proj.weight"].T
    if kind == "eagle":
        return residual @ output.T, residual
    last = norm(
        residual, get["norm.weight" if kind == "eagle3" else "final_layernorm.weight"], epsilon
    )
    return last @ output.T, last if kind == "mtp" else residual


def _attention(config: Mapping[str, Any], get: Mapping[str, Any], inner: Array) -> Array:
    n, heads, kv_heads = len(inner), config["num_attention_heads"], config["num_key_value_heads"]
    d = config["hidden_size"] // heads
    parts = {}
    for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        part = inner @ get[f"self_attn.{letter}_proj.weight"].T
        part = part + get.get(f"self_attn.{letter}_proj.bias", 0)
        part = part.reshape(n, count, d).astype(np.float32)
        if letter != "v":
            part = rotate(part, np.arange(n), config["rope_theta"])
        parts[letter] = np.repeat(part, heads // count, axis=1)
    scores = np.einsum("ihd,jhd->hij", parts["q"], parts["k"]) / np.sqrt(d)
    scores = np.where(np.tril(np.ones((n, n), dtype=bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, parts["v"]).reshape(n, heads * d)
    result: Array = mixed @ get["self_attn.o_proj.weight"].T
    return result
