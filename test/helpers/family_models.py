"""Tiny random transformers models of every dense family, with odd sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 173
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}
# name -> (prefix of the classes, changes to the config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 9}),
    "phi4-longrope": (
        "Phi3",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**_LONG, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.7,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 9,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "cwm": ("Cwm", {"sliding_window": 9, "head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 10},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 10,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"sliding_window": 9, "logit_scale": 0.3, "head_dim": 12}),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "exaone4": ("Exaone4", {"sliding_window": 9}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "helium": ("Helium", {"head_dim": 16, "hidden_size": 64}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "hidden_size": 64}),
}


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model in f32 with weights large enough for clearly different logits."""
    prefix, own = MODELS[name]
    config_name = f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**{**_SIZES, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    is_gemma = prefix.startswith("Gemma")  # norm weights are stored minus 1
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in label and label.endswith("weight"):
                parameter.copy_(0.2 * noise + (0 if is_gemma else 1))
            else:
                scale = 0.2 if label.endswith("bias") else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
    return model.eval()
