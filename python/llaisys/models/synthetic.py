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
from numpy.typing import NDArray

from llaisys.common.validation import check_choice, invalid_value
from llaisys.models.families import file_tensors, parse_config
from llaisys.models.loading.convert import convert

_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN2,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN2,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        **_QWEN2,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN2,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-14b": {
        **_QWEN2,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13824,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-32b": {
        **_QWEN2,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        **_QWEN2,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 40960,
        "hidden_size": 4096,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN2,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_position_embeddings": 40960,
        "hidden_size": 2048,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "eos_token_id": 128001,
        "bos_token_id": 128000,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
_TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_SAFETENSORS_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_CHUNK = 1 << 20  # elements


def shape_config(shape: str) -> dict[str, Any]:
    """The Hugging Face config of a shape, or of a `config.json` file."""
    if shape.endswith(".json"):
        config: dict[str, Any] = json.loads(Path(shape).read_text())
        return config
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
        nbytes = int(np.prod(shape)) * _ELEMENT_BYTES[dtype]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # tensors start aligned
    file.write(len(text).to_bytes(8, "little") + text)
    weights, norm = _random_chunk(dtype), convert(np.ones(_CHUNK, np.float32), "f32", dtype)
    for name, shape in tensors:
        chunk = norm if "norm" in name else weights
        left = int(np.prod(shape))
        while left > 0:
            count = min(left, _CHUNK)
            file.write(chunk[:count].tobytes())
            left -= count


def _random_chunk(dtype: str) -> NDArray[Any]:
    values = np.random.default_rng(0).standard_normal(_CHUNK, np.float32) * np.float32(0.02)
    return convert(values, "f32", dtype)
