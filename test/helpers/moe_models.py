"""Tiny random transformers models with experts, and their GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from model_files import permute_rows
from safetensors.torch import load_file, save_file

VOCAB = 173
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 36,
    "n_shared_experts": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}
# name -> (prefix of the classes, changes to the config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "moe_intermediate_size": 36, "num_experts": 9, "num_experts_per_tok": 3,
         "norm_topk_prob": True},
    ),
    "qwen3_moe-dense": (  # dense layers between, weights that are not renormalised
        "Qwen3Moe",
        {"head_dim": 16, "moe_intermediate_size": 36, "num_experts": 5, "num_experts_per_tok": 2,
         "norm_topk_prob": False, "num_hidden_layers": 5, "decoder_sparse_step": 2,
         "mlp_only_layers": [1], "intermediate_size": 72},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"moe_intermediate_size": 36, "shared_expert_intermediate_size": 44, "num_experts": 6,
         "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "glm4_moe": (
        "Glm4Moe",
        {"head_dim": 16, "moe_intermediate_size": 36, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True},
    ),
    "glm4_moe-air": (  # without norms of q and k
        "Glm4Moe",
        {"head_dim": 16, "moe_intermediate_size": 36, "n_routed_experts": 5,
         "num_experts_per_tok": 2, "attention_bias": True},
    ),
    "dots1": (
        "Dots1",
        {"head_dim": 16, "moe_intermediate_size": 36, "n_routed_experts": 8, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.3},
    ),
    "solar_open": (
        "SolarOpen",
        {"head_dim": 16, "moe_intermediate_size": 36, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 7, "num_experts_per_tok": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                             "partial_rotary_factor": 0.5}},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {"head_dim": 16, "moe_intermediate_size": 36, "num_experts": 8, "num_experts_per_tok": 3,
         "num_shared_experts": 2, "sliding_window": 9, "num_hidden_layers": 5,
         "first_k_dense_replace": 2, "intermediate_size": 72},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_intermediate_size": 36, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "intermediate_size": 72},
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
         "num_hidden_layers": 4,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 15000.0, "factor": 8.0,
                             "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": 32}},
    ),
    "deepseek_v2": (  # V2-Lite: queries are one product
        "DeepseekV2", {**_LATENT, "q_lora_rank": None, "n_routed_experts": 6,
                       "num_experts_per_tok": 2, "first_k_dense_replace": 1,
                       "routed_scaling_factor": 1.3},
    ),
    "deepseek_v2-groups": (
        "DeepseekV2", {**_LATENT, "q_lora_rank": 20, "n_routed_experts": 8,
                       "num_experts_per_tok": 3, "topk_method": "group_limited_greedy",
                       "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek_v3": (
        "DeepseekV3", {**_LATENT, "q_lora_rank": 24, "n_routed_experts": 8,
                       "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                       "first_k_dense_replace": 1, "n_shared_experts": 1,
                       "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite", {**_LATENT, "q_lora_rank": 24, "n_routed_experts": 8,
                        "num_experts_per_tok": 3, "rope_interleave": False, "v_head_dim": 28},
    ),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
         "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 0.7},
    ),
}  # fmt: skip


def make_moe_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model in f32 with weights large enough for clearly different logits."""
    prefix, own = MODELS[name]
    if "kv_lora_rank" in own:
        changes.pop("head_dim", None)  # the sum of its parts
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in label and label.endswith("weight"):
                parameter.copy_(0.2 * noise + 1)
            else:
                scale = 0.2 if label.endswith("bias") else parameter.shape[-1] ** -0.5
                scale = 1.0 if label.endswith("sinks") else scale
                scale = 0.05 if "e_score_correction_bias" in label else scale
                if prefix == "GptOss" and label.endswith("gate_up_proj"):
                    scale *= 6  # some values are clamped
                parameter.copy_(noise * scale)
        for label, values in model.named_buffers():
            if "e_score_correction_bias" in label:
                values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    return model.eval()


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "block_sparse_moe.router": "ffn_gate_inp",
}
_SCORE_BIASES = ("gate.e_score_correction_bias", "mlp.e_score_correction_bias",
                 "moe_statics.e_score_correction_bias")  # fmt: skip
# Key of the config -> method of the writer. The first key that a config has.
_EXPERT_METADATA = {
    ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"): "expert_count",
    ("num_experts_per_tok", "moe_k"): "expert_used_count",
    ("moe_intermediate_size",): "expert_feed_forward_length",
    ("shared_expert_intermediate_size",): "expert_shared_feed_forward_length",
    ("first_k_dense_replace", "moe_layer_start_index"): "leading_dense_block_count",
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"): "expert_shared_count",
    ("routed_scaling_factor",): "expert_weights_scale",
    ("moe_layer_interval",): "interleave_moe_layer_step",
}
# Families whose converter also writes the groups and the normalisation of the weights.
_GROUPED = ("glm4moe", "dots1", "exaone-moe")
_PLAIN = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # stored as f32


def _rounded(values: Any, qtype: gguf.GGMLQuantizationType) -> Any:
    blocks = gguf.quantize(values.reshape(-1, values.shape[-1]), qtype)
    return np.array(gguf.dequantize(blocks, qtype)).reshape(values.shape)


def _add_latent(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata of DeepSeek, as llama.cpp's converter writes it."""
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rope_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_experts(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    given = config.to_dict()
    for keys, name in _EXPERT_METADATA.items():
        value = next((given[key] for key in keys if given.get(key) is not None), None)
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if arch == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch in _GROUPED:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "exaone-moe":
        writer.add_sliding_window(config.sliding_window)
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    if arch == "granitemoe":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_prediction_layer(writer: gguf.GGUFWriter, layer: int, hidden: int) -> None:
    """Tensors that a model does not load."""
    writer.add_nextn_predict_layers(1)
    writer.add_tensor(f"blk.{layer}.nextn.enorm.weight", np.ones(hidden, np.float32))
    writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(hidden, np.float32))


def write_moe_gguf(model: Any, path: Path, arch: str, kind: str = "Q8_0") -> None:
    """Write the model with matrices of this kind, and replace them in `model` by their dequantised
    values."""
    config = model.config
    qtype = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    given = config.to_dict()
    head_dim = given.get("head_dim") or config.hidden_size // config.num_attention_heads
    has_prediction = arch == "glm4moe"
    writer.add_block_count(config.num_hidden_layers + has_prediction)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    _add_experts(writer, config, arch)
    if has_prediction:
        _add_prediction_layer(writer, config.num_hidden_layers, config.hidden_size)
    if arch == "deepseek2":
        _add_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(given["rope_parameters"]["rope_theta"])
    rotated = given["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * rotated))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)

    def add(target: str, values: Any, parameter: Any) -> None:
        """Quantise and replace, row by row."""
        blocks = gguf.quantize(values.reshape(-1, values.shape[-1]), qtype)
        writer.add_tensor(target, blocks.reshape(*values.shape[:-1], -1), raw_dtype=qtype)

    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            values = parameter.numpy().copy()
            if name.endswith(_SCORE_BIASES):
                layer = name.split(".")[2]
                writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", values.reshape(-1))
                continue
            routers = (".mlp.gate.weight", "expert_gate.weight", "_moe.router.weight")
            if values.ndim > 1 and not name.endswith(routers):
                parameter.copy_(torch.from_numpy(_rounded(values, qtype)))
            plain_names = {"model.embed_tokens.weight": "token_embd.weight",
                           "model.norm.weight": "output_norm.weight",
                           "lm_head.weight": "output.weight"}  # fmt: skip
            if name in plain_names:
                target = plain_names[name]
                if values.ndim == 1:
                    writer.add_tensor(target, values)
                else:
                    add(target, values, parameter)
                continue
            _, _, layer, rest = name.split(".", 3)
            if rest == "self_attn.kv_b_proj.weight":
                heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
                key = heads[:, : config.qk_nope_head_dim].transpose(0, 2, 1).copy()
                value = heads[:, config.qk_nope_head_dim :].copy()
                add(f"blk.{layer}.attn_k_b.weight", key, parameter)
                add(f"blk.{layer}.attn_v_b.weight", value, parameter)
                parts = [_rounded(key, qtype).transpose(0, 2, 1), _rounded(value, qtype)]
                whole = np.concatenate(parts, axis=1).reshape(values.shape)
                parameter.copy_(torch.from_numpy(whole))
                continue
            if rest.endswith(".experts.gate_up_proj"):
                inner = values.shape[1] // 2
                add(f"blk.{layer}.ffn_gate_exps.weight", values[:, :inner], parameter)
                add(f"blk.{layer}.ffn_up_exps.weight", values[:, inner:], parameter)
                continue
            if rest.endswith(".experts.down_proj"):
                add(f"blk.{layer}.ffn_down_exps.weight", values, parameter)
                continue
            module, suffix = rest.rsplit(".", 1)
            target = _GGUF_NAMES[module]
            if target == "ffn_norm" and arch == "glm4moe":
                target = "post_attention_norm"
            if arch in ("llama", "granitemoe") and target in ("attn_q", "attn_k"):
                heads = config.num_attention_heads
                values = permute_rows(
                    values, heads if target == "attn_q" else config.num_key_value_heads
                )
            if target == "ffn_gate_inp_shexp":
                values = values.reshape(-1)  # a vector, as llama.cpp's converter writes it
            if values.ndim == 1 or target in _PLAIN:
                writer.add_tensor(f"blk.{layer}.{target}.{suffix}", values)
            else:
                add(f"blk.{layer}.{target}.{suffix}", values, parameter)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- MXFP4 ---------------------------------------------------------------------------------------

MXFP4_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "vocab_size": 160,
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def naive_values(codes: Any, exponents: Any) -> Any:
    """Values of blocks [.., n, 16] with two codes per byte, the first in the low nibble."""
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 32)
    table = np.array([*E2M1, *(-value for value in E2M1)])
    values = table[nibbles] * np.exp2(exponents.astype(np.float64) - 127)[..., None]
    return values.reshape(*codes.shape[:-2], -1).astype(np.float32)


def write_mxfp4(directory: Path) -> Any:
    """A directory with random MXFP4 experts; returns the model with their values."""
    rng = np.random.default_rng(3)
    model = make_moe_model("gpt_oss", **MXFP4_SIZES)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(str(path))
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            for kind in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{kind}"
                parameter = getattr(block.mlp.experts, kind)
                experts, columns, rows = parameter.shape  # stored transposed
                shape = (experts, rows, columns // 32)
                codes = rng.integers(0, 256, (*shape, 16), np.uint8)
                exponents = rng.integers(121, 125, shape, np.uint8)
                values = naive_values(codes, exponents)
                parameter.copy_(torch.from_numpy(values.swapaxes(1, 2).copy()))
                del tensors[name]
                tensors[f"{name}_blocks"] = torch.from_numpy(codes)
                tensors[f"{name}_scales"] = torch.from_numpy(exponents)
    save_file(tensors, str(path))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (directory / "config.json").write_text(json.dumps(config))
    return model
