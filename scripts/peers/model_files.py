"""Models with random weights as GGUF files that llama.cpp, OpenVINO GenAI and this engine read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.models.loading.local_models import cache_directory
from llaisys.models.synthetic import shape_config
from peers.random_files import write_model_files

# name -> (type of most tensors, type of the other tensors, LLAMA_FTYPE_MOSTLY_*)
FORMATS = {
    "f16": ("F16", "F16", 1),
    "bf16": ("BF16", "BF16", 32),
    "q8_0": ("Q8_0", "Q8_0", 7),
    "q4_0": ("Q4_0", "Q4_0", 2),
    "q4_1": ("Q4_1", "Q4_1", 3),
    "q4_k_m": ("Q4_K", "Q6_K", 15),
    "q6_k": ("Q6_K", "Q6_K", 18),
}
# type -> (values per block, bytes per block, {offset of an f16 scale: value}): the scales give the
# weights a standard deviation of about 0.02
_BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q8_0": (32, 34, {0: 3e-4}),
    "Q4_0": (32, 18, {0: 4e-3}),
    "Q4_1": (32, 20, {0: 4e-3, 2: -0.03}),
    "Q4_K": (256, 144, {0: 7e-5, 2: 5.2e-4}),
    "Q6_K": (256, 210, {208: 1.5e-5}),
}
_SOURCE_BLOCKS = 16381  # random blocks, repeated through every tensor


def model_file(shape: str, engine: str, format_name: str) -> Path:
    """The model in the engine's file format; written on first use."""
    if engine == "transformers":
        folder = cache_directory() / "shapes" / f"{shape}-{format_name}-files"
        return write_model_files(shape, format_name, folder)
    target = (
        cache_directory()
        / "shapes"
        / f"{Path(shape).name.removesuffix('.json')}-{format_name}.gguf"
    )
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(shape, target, format_name)
    return target


def write_gguf(shape: str, target: Path, format_name: str) -> None:
    """A dense decoder of this shape with random blocks and a vocabulary of made-up words."""
    import gguf

    config = shape_config(shape)
    most, other, file_type = FORMATS[format_name]
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    feed_forward, vocab = config["intermediate_size"], config["vocab_size"]
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), config["model_type"])
    writer.add_file_type(file_type)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    _add_vocabulary(writer, vocab)
    blocks = {kind: _random_blocks(kind) for kind in {most, other}}

    def add(name: str, rows: int, columns: int, kind: str = most) -> None:
        block = blocks[kind]
        size = _BLOCKS[kind][0] if kind in _BLOCKS else 1
        values = np.resize(block, (rows, columns // size * block.shape[1]))
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])

    def add_vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    is_tied = bool(config.get("tie_word_embeddings"))
    add("token_embd.weight", vocab, hidden, other if is_tied else most)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        # The tensors that llama.cpp stores in more bits in its files with mixed types.
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        kind = other if more else most
        add_vector(prefix + "attn_norm.weight", hidden, 1.0)
        add_vector(prefix + "ffn_norm.weight", hidden, 1.0)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows = count * head_dim
            add(f"{prefix}attn_{name}.weight", rows, hidden, kind if name == "v" else most)
            if config["model_type"] == "qwen2":
                add_vector(f"{prefix}attn_{name}.bias", rows, 0.0)
        add(prefix + "attn_output.weight", hidden, heads * head_dim)
        add(prefix + "ffn_gate.weight", feed_forward, hidden)
        add(prefix + "ffn_up.weight", feed_forward, hidden)
        add(prefix + "ffn_down.weight", hidden, feed_forward, kind)
    add_vector("output_norm.weight", hidden, 1.0)
    if not is_tied:
        add("output.weight", vocab, hidden, other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _add_vocabulary(writer: Any, size: int) -> None:
    # OpenVINO's tokenizer needs a control token.
    words = ["a", "b", "<|endoftext|>", "<|im_start|>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*words, *(f"t{i}" for i in range(len(words), size))])
    writer.add_token_types([1, 1, 3, 3, *[1] * (size - 4)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def _random_blocks(kind: str) -> NDArray[Any]:
    """Blocks [n, bytes per block] of a quantized type, values [n, 1] of a 16-bit one."""
    rng = np.random.default_rng(0)
    if kind not in _BLOCKS:
        values = rng.standard_normal((_SOURCE_BLOCKS, 1), np.float32) * np.float32(0.02)
        if kind == "F16":
            return values.astype(np.float16)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # BF16
    _, size, scales = _BLOCKS[kind]
    blocks = rng.integers(0, 256, (_SOURCE_BLOCKS, size), np.uint8)
    for offset, value in scales.items():
        blocks[:, offset : offset + 2] = np.array([value], "<f2").view(np.uint8)
    return blocks
