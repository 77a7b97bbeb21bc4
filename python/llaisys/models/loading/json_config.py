"""config.json and generation_config.json: the fields common to all families."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.common.options import Integer, Number
from llaisys.common.sampling import FIELDS
from llaisys.models.loading.family import CheckpointConfig, Family, find_family
from llaisys.models.loading.fields import Fields
from llaisys.tokenization.json_file import read_json_object, read_optional_json_object

DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def read_config(directory: Path, families: Mapping[str, Family]) -> tuple[Family, CheckpointConfig]:
    """From config.json and the optional generation_config.json of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise _not_a_model(directory)
    generation = read_optional_json_object(directory / "generation_config.json")
    return parse_config(read_json_object(path), generation, str(path), families)


def _not_a_model(directory: Path) -> ModelLoadError:
    """The error of a directory without config.json; an adapter's says how to use it."""
    adapter = read_optional_json_object(directory / "adapter_config.json")
    if not adapter:
        return ModelLoadError(f"{directory}: config.json is missing, and there is no .gguf file")
    base = adapter.get("base_model_name_or_path")
    base = base[:200] if isinstance(base, str) and base else "BASE_MODEL"
    return ModelLoadError(
        f"{directory}: a LoRA adapter, not a model; use it with its base model: "
        f"`llaisys chat {base} --lora {directory}` or "
        f"`llaisys serve {base} --lora-modules NAME={directory}`"
    )


def parse_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    where: str,
    families: Mapping[str, Family],
) -> tuple[Family, CheckpointConfig]:
    """The family and config of a Hugging Face model."""
    fields = Fields(language_config(config, where), where)
    extra = Fields(generation or {}, "generation_config.json")
    family = find_family(families, fields.string("model_type"), where)
    return family, family.config_from_json(fields, extra)


def stored_dtype(fields: Fields) -> str:
    """The value of `CheckpointConfig.dtype`."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return "auto"
    name = fields.string(key).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.fail(key, f"is {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def read_generation(directory: Path) -> dict[str, float | int]:
    """The sampling defaults of the generation_config.json in a directory."""
    path = directory / "generation_config.json"
    return parse_generation(Fields(read_json_object(path), str(path)))


def parse_generation(fields: Fields) -> dict[str, float | int]:
    """Sampling defaults of generation_config.json: fields of SamplingParams that a model may set.
    `do_sample: false` means temperature 0; a top_p of 0 is ignored."""
    found: dict[str, float | int] = {}
    for name, about in FIELDS.items():
        kind = about.kind
        if not about.from_model or not isinstance(kind, (Integer, Number)):
            continue
        if isinstance(kind, Integer):
            value = fields.integer(name, kind.low, kind.high, None)
        else:
            value = fields.number(name, kind.low, kind.high, None)
        if value is not None and not (isinstance(kind, Number) and kind.above_low and value == 0):
            found[name] = value
    if not fields.boolean("do_sample", True):
        found["temperature"] = 0.0
    return found


logger = logging.getLogger("llaisys.models")

# Multimodal models: only their language model is loaded; a warning names what is ignored.
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
