"""config.json of multimodal models: the config of their language model. Images, audio and video are
not supported; a warning names what is ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("llaisys.models")

# model_type of a multimodal model -> that of its language model; '': as in its text_config.
TOWERS = {
    "gemma3": "gemma3_text",
    "idefics3": "",
    "llava": "",
    "llava_next": "",
    "mistral3": "",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "smolvlm": "",
}
# Fields that the language model takes from the whole config if its own lacks them.
_SHARED = (
    *("tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "bos_token_id"),
    "quantization_config",
)


def language_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config of the language model; `config` itself if the model is not multimodal."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TOWERS:
        return config
    text = config.get("text_config")
    own = dict(text) if isinstance(text, Mapping) else dict(config)  # old files are flat
    for key in _SHARED:
        if own.get(key) is None and config.get(key) is not None:
            own[key] = config[key]
    own["model_type"] = TOWERS[kind] or own.get("model_type")
    for key in ("rope_parameters", "rope_scaling"):
        section = own.get(key)
        if isinstance(section, Mapping):
            own[key] = _text_positions(section)
    ignored = sorted(key for key in config if key.endswith("_config") and key != "text_config")
    ignored = [key for key in ignored if key != "quantization_config"]
    logger.warning(
        "%s: only the language model of this %s model is loaded; ignored: %s",
        *(where, kind, ", ".join(ignored) or "all other parts"),
    )
    return own


def _text_positions(section: Mapping[str, Any]) -> dict[str, Any]:
    """Multimodal RoPE rotates text like plain RoPE: its three positions are equal."""
    found = dict(section)
    for key in ("type", "rope_type"):
        if found.get(key) == "mrope":
            found[key] = "default"
    return found
