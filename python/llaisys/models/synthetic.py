"""Models of known shapes with random weights, which are made in memory.

They run at the speed of the real model, so that speed can be measured without a download. Load time
and peak memory are those of making the weights.
"""

import json
from pathlib import Path
from typing import Any

from llaisys.common.validation import check_choice, invalid_value
from llaisys.models.loading.random_dir import KEY, PLAIN

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
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def shape_config(shape: str) -> dict[str, Any]:
    """The Hugging Face config of a shape, or of a `config.json` file."""
    if shape.endswith(".json"):
        return json.loads(Path(shape).read_text())
    if shape not in SHAPES:
        raise invalid_value("shape", shape, f"one of {', '.join(SHAPES)}, or a config.json")
    return SHAPES[shape]


def write_shape_model(
    shape: str, dtype: str, directory: Path, layers: int | None = None, weights: str = PLAIN
) -> Path:
    """Write the config.json of a model whose weights are made in memory (loading/random_dir.py).
    `layers`: instead of the shape's; `weights`: PLAIN or one of BLOCKS."""
    config = shape_config(shape)
    check_choice("dtype", dtype, tuple(TORCH_DTYPES))
    full = {**config, "torch_dtype": TORCH_DTYPES[dtype], KEY: weights}
    if layers is not None:
        full["num_hidden_layers"] = layers
    text, path = json.dumps(full, indent=2), directory / "config.json"
    if not path.is_file() or path.read_text() != text:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory
