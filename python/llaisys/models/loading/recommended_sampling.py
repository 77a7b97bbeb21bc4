"""Sampling defaults of a model: those in its files, else those that its publisher recommends."""

import re

from llaisys.common.sampling import DEFAULT_SAMPLING
from llaisys.models.loading.fields import Fields

Sampling = dict[str, float | int]

# Metadata key of a GGUF file -> field of generation_config.json.
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_QWEN_CHAT: Sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
_REASONING: Sampling = {"temperature": 0.6, "top_p": 0.95}

# Pattern in the lower-case name of a model -> values of its generation_config.json or model card;
# the first match applies. GGUF files seldom have them.
RECOMMENDED: tuple[tuple[str, Sampling], ...] = (
    (r"deepseek-r1|(?:^|[-/])qwq-", _REASONING),
    (r"smollm2-.*instruct", {"temperature": 0.2, "top_p": 0.9}),
    (r"smollm3-3b(?!-base)", _REASONING),
    (r"qwen2(?:\.5)?-.*\b[01]\.5b-instruct", {**_QWEN_CHAT, "repetition_penalty": 1.1}),
    (r"qwen2(?:\.5)?-.*instruct", {**_QWEN_CHAT, "repetition_penalty": 1.05}),
    (r"qwen3-.*instruct-2507|qwen3-coder", _QWEN_CHAT),
    (r"qwen3-[\d.]+b(?!-base|-embedding)", {**_REASONING, "top_k": 20}),
    (r"llama-3\.?\d?-.*instruct", {"temperature": 0.6, "top_p": 0.9}),
    (r"gemma-3n?-.*it\b", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    (r"gpt-oss-\d+b", {"temperature": 1.0}),
    (r"mistral-nemo-instruct", {"temperature": 0.3}),
    (r"mistral-small-3.*instruct|mistral-small-.*-2[45]\d\d", {"temperature": 0.15}),
)


def recommended_sampling(name: str) -> Sampling:
    """The values of RECOMMENDED for a model name or path; empty: unknown."""
    text = re.sub(r"[\s_]+", "-", name.lower())
    return next((dict(found) for pattern, found in RECOMMENDED if re.search(pattern, text)), {})


def model_sampling(own: Sampling, name: str) -> Sampling:
    """`own`, the values in the files, completed by RECOMMENDED if they do not say how to sample."""
    return own if DEFAULT_SAMPLING.keys() & own.keys() else recommended_sampling(name) | own


def gguf_sampling_fields(metadata: Fields) -> Fields:
    """The sampling keys of a GGUF file under their names in generation_config.json."""
    found = {name: metadata.values.get(key) for key, name in _GGUF_KEYS.items()}
    return Fields(found, metadata.where)


def gguf_model_name(metadata: Fields) -> str:
    """The name in the metadata and the name of the file."""
    return f"{str(metadata.values.get('general.name', ''))[:200]} {metadata.where}"
