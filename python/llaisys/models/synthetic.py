"""Models of known shapes with random weights, written as Hugging Face directories.

They run at the speed of the real model, so that speed and memory can be measured without a
download. Files are written in chunks, so memory use does not depend on the shape.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llaisys.common.progress import report
from llaisys.common.validation import check_choice, invalid_value
from llaisys.models.families import file_tensors, parse_config
from llaisys.models.loading.convert import convert, storage_dtype

_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
_QWEN3 = {**_QWEN2, "max_position_embeddings": 40960, "head_dim": 128}
_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
_SMOLLM2 = {
    **_LLAMA3,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _shape(
    base: dict[str, Any],
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocab: int,
    is_tied: bool = False,
    **others: Any,
) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
        **others,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape(_QWEN2, 896, 24, 14, 2, 4864, 151936, is_tied=True),
    "qwen2.5-1.5b": _shape(_QWEN2, 1536, 28, 12, 2, 8960, 151936, is_tied=True),
    "qwen2.5-3b": _shape(_QWEN2, 2048, 36, 16, 2, 11008, 151936, is_tied=True),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-14b": _shape(_QWEN2, 5120, 48, 40, 8, 13824, 152064),
    "qwen2.5-32b": _shape(_QWEN2, 5120, 64, 40, 8, 27648, 152064),
    "qwen3-8b": _shape(
        *(_QWEN3, 4096, 36, 32, 8, 12288, 151936),
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
    ),
    "qwen3-30b-a3b": _shape(
        *(_QWEN3, 2048, 48, 32, 4, 6144, 151936),
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "llama-3.2-1b": _shape(_LLAMA3, 2048, 16, 32, 8, 8192, 128256, is_tied=True),
    "llama-3.1-8b": _shape(_LLAMA3, 4096, 32, 32, 8, 14336, 128256),
    "llama-3.1-70b": _shape(_LLAMA3, 8192, 80, 64, 8, 28672, 128256),
    "smollm2-135m": _shape(_SMOLLM2, 576, 30, 9, 3, 1536, 49152, is_tied=True),
}
_TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_CHUNK = 1 << 20  # elements


def shape_config(shape: str) -> dict[str, Any]:
    """The Hugging Face config of a shape, or of a `config.json` file."""
    if shape.endswith(".json"):
        return json.loads(Path(shape).read_text())
    if shape not in SHAPES:
        raise invalid_value("shape", shape, f"one of {', '.join(SHAPES)}, or a config.json")
    return SHAPES[shape]


def write_shape_model(shape: str, dtype: str, directory: Path, layers: int | None = None) -> Path:
    """Write the model unless the directory already has it: one of another config, which an earlier
    release may have written, is replaced. `layers`: instead of the shape's."""
    config = shape_config(shape)
    check_choice("dtype", dtype, tuple(_TORCH_DTYPES))
    full = {**config, "torch_dtype": _TORCH_DTYPES[dtype]}
    if layers is not None:
        full["num_hidden_layers"] = layers
    text = json.dumps(full, indent=2).encode()
    path = directory / "config.json"
    if path.is_file():
        if path.read_bytes() == text:
            return directory
        path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = list(file_tensors(parse_config(full)))
    _write_atomically(
        directory / "model.safetensors", lambda file: _write_tensors(file, tensors, dtype)
    )
    # The config is written last: its presence marks a complete model.
    _write_atomically(path, lambda file: file.write(text))
    return directory


def _write_atomically(path: Path, write: Any) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write_tensors(file: BinaryIO, tensors: list[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensors:
        nbytes = int(np.prod(shape)) * storage_dtype(dtype).itemsize
        header[name] = {
            "dtype": dtype.upper(),
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    total, written = offset, 0
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # tensors start aligned
    file.write(len(text).to_bytes(8, "little") + text)
    values = np.random.default_rng(0).standard_normal(_CHUNK, np.float32) * np.float32(0.02)
    weights = convert(values, "f32", dtype)
    norm = convert(np.ones(_CHUNK, np.float32), "f32", dtype)
    for name, shape in tensors:
        chunk = norm if "norm" in name else weights
        left = int(np.prod(shape))
        while left > 0:
            count = min(left, _CHUNK)
            written += file.write(chunk[:count].tobytes())
            left -= count
            report("writing random weights", written, total)
