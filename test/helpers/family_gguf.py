"""GGUF files of transformers models, with the tensor names of the gguf package and the metadata
that llama.cpp's converter writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from model_files import permute_rows

_PERMUTED = ("granite", "smollm3")  # q and k in interleaved order
_SUFFIXES = (".weight", ".bias")


def write_family_gguf(model: Any, path: Path, arch: str, kind: str = "Q8_0") -> None:
    """Write the model with matrices of this kind, and replace them in `model` by their dequantised
    values."""
    config = model.config
    qtype = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, config, arch)
    number = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.numpy()
        target = names.get_name(name, try_suffixes=_SUFFIXES)
        assert target is not None, name
        if values.ndim == 1:
            is_gemma_norm = arch.startswith("gemma") and name.endswith("norm.weight")
            writer.add_tensor(
                target, values + 1 if is_gemma_norm else _permuted(values, name, config, arch)
            )
            continue
        blocks = gguf.quantize(_permuted(values, name, config, arch), qtype)
        writer.add_tensor(target, blocks, raw_dtype=qtype)
        plain = gguf.quantize(values, qtype)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(gguf.dequantize(plain, qtype))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(values: Any, name: str, config: Any, arch: str) -> Any:
    if arch not in _PERMUTED:
        return values
    if ".q_proj." in name:
        return permute_rows(values, config.num_attention_heads)
    return permute_rows(values, config.num_key_value_heads) if ".k_proj." in name else values


def _add_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    given = config.to_dict()
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = given.get("head_dim") or hidden // heads
    rope = given["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
    if "rms_norm_eps" in given:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(given.get("layer_norm_eps") or given["norm_epsilon"])
    if given.get("sliding_window"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "olmo2" and given.get("layer_types"):
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if given.get(key) is not None:
            add(given[key])
    if full["rope_type"] == "longrope":
        factor = config.max_position_embeddings / config.original_max_position_embeddings
        attention = (1 + np.log(factor) / np.log(config.original_max_position_embeddings)) ** 0.5
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(float(attention))
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)
