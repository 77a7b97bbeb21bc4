"""`ModelConfig` and `TokenizerSource` from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import DecoderFamily, family_of
from llaisys.models.families.decoder import EMBEDDING, OUTPUT
from llaisys.models.loading import config as limits
from llaisys.models.loading.config import ModelConfig
from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_reader import GgufTensor
from llaisys.models.loading.rope import MAX_POSITIONS, rope_from_gguf
from llaisys.tokenization.source import BpeVocabulary, TokenizerSource

_END_KEYS = ("eot", "eom")  # further tokens that end a turn, beside eos
_ARRAY_KINDS = {"i": int, "u": int, "f": float}  # by numpy's kind of dtype
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def family_from_gguf(metadata: Mapping[str, Any], where: str) -> DecoderFamily:
    family = family_of(Fields(metadata, where).string("general.architecture"), where)
    if not isinstance(family, DecoderFamily):
        raise ModelLoadError(f"{where}: {family.name} models are not read from GGUF files")
    return family


def config_from_gguf(
    family: DecoderFamily,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    read_rope_factors: Callable[[tuple[int, ...]], Array] | None,
    where: str,
) -> ModelConfig:
    """`tensors` by Hugging Face name; `read_rope_factors` reads the tensor rope_freqs.weight, if
    there is one, provided that it has the given shape."""
    fields = Fields(metadata, where)
    arch = family.name
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, 0):
        raise fields.fail(f"{arch}.expert_count", "is not 0; mixtures of experts are not supported")
    hidden = fields.integer(f"{arch}.embedding_length", 1, limits.MAX_HIDDEN)
    heads = fields.integer(f"{arch}.attention.head_count", 1, limits.MAX_HEADS)
    if EMBEDDING not in tensors:
        raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing")
    # The embedding has the final word on the vocabulary: files may pad it.
    vocab = tensors[EMBEDDING].shape[0]
    if vocab > limits.MAX_VOCAB:
        raise ModelLoadError(f"{where}: 'token_embd.weight' has {vocab} rows")
    head_dim = _head_dim(fields, arch, hidden, heads)
    theta = fields.number(f"{arch}.rope.freq_base", 1e-3, 1e12, 10000.0)
    factors = None if read_rope_factors is None else read_rope_factors((head_dim // 2,))
    scaling = rope_from_gguf(fields, arch, theta, factors)
    length = longest = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
    if scaling is not None:
        length, longest = scaling.contexts(length)
    first = "model.layers.0.self_attn"
    eos = [fields.integer("tokenizer.ggml.eos_token_id", 0, vocab - 1, None)]
    eos += [fields.integer(f"tokenizer.ggml.{k}_token_id", 0, vocab - 1, None) for k in _END_KEYS]
    result = ModelConfig(
        model_type=arch,
        hidden_size=hidden,
        num_layers=fields.integer(f"{arch}.block_count", 1, limits.MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", 1, limits.MAX_HEADS, heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length", 1, limits.MAX_INTERMEDIATE),
        vocab_size=vocab,
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=length,
        longest_context=longest,
        tie_word_embeddings=OUTPUT not in tensors,
        attention_bias=f"{first}.q_proj.bias" in tensors,
        output_bias=f"{first}.o_proj.bias" in tensors,
        qk_norm=family.qk_norm,
        sliding_window=None,
        window_layers=(),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", 0, vocab - 1, None),
        dtype=_compute_dtype(tensors),
        generation={},
    )
    if fields.has(f"{arch}.attention.sliding_window"):
        raise fields.fail(f"{arch}.attention.sliding_window", "is not supported in GGUF files")
    result.check(where)
    return result


def _head_dim(fields: Fields, arch: str, hidden: int, heads: int) -> int:
    key_length = f"{arch}.attention.key_length"
    if not fields.has(key_length) and hidden % heads:
        raise fields.fail(f"{arch}.embedding_length", f"{hidden} is not a multiple of {heads}")
    head_dim = fields.integer(key_length, 2, limits.MAX_HEAD_DIM, hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        found = fields.integer(key, 1, limits.MAX_HEAD_DIM, head_dim)
        if found != head_dim:
            raise fields.fail(key, f"is {found}; only the head size {head_dim} is supported")
    return int(head_dim)


def _compute_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype of the first projection; quantised weights are computed in bf16."""
    tensor = tensors.get("model.layers.0.self_attn.q_proj.weight")
    name = "" if tensor is None else tensor.type_name
    return {"F32": "f32", "F16": "f16"}.get(name, "bf16")


def tokenizer_from_gguf(
    family: DecoderFamily, metadata: Mapping[str, Any], eos_token_ids: tuple[int, ...], where: str
) -> TokenizerSource:
    """The tokenizer's metadata, type-checked; building it is left to `Tokenizer`."""
    fields = Fields(metadata, where)
    model = fields.string("tokenizer.ggml.model", None)
    if model not in ("gpt2", "llama"):
        known = "gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        why = f"{where}: tokenizer.ggml.model {model!r} is not supported; known: {known}"
        return TokenizerSource(missing=why)
    vocabulary = _byte_level(fields, family) if model == "gpt2" else _sentencepiece(fields)
    tokens = vocabulary.tokens
    kinds = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    special_ids = []
    for name, key in kinds:
        value = fields.integer(f"tokenizer.ggml.{key}_token_id", 0, limits.MAX_VOCAB, None)
        if value is not None and value < len(tokens):
            special_ids.append((f"{name}_token", int(value)))
    return TokenizerSource(
        vocabulary=vocabulary,
        chat_template=fields.string("tokenizer.chat_template", None),
        special_ids=tuple(special_ids),
        eos_token_ids=eos_token_ids,
    )


def _byte_level(fields: Fields, family: DecoderFamily) -> BpeVocabulary:
    pre = fields.string("tokenizer.ggml.pre", family.gguf_pre_tokenizer)
    tokens = _array(fields, "tokenizer.ggml.tokens", str)
    return BpeVocabulary(
        tokens=tokens,
        token_types=_array(fields, "tokenizer.ggml.token_type", int, len(tokens)),
        merges=_array(fields, "tokenizer.ggml.merges", str),
        pre_tokenizer=pre,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT),
        add_eos=fields.boolean("tokenizer.ggml.add_eos_token", False),
    )


def _sentencepiece(fields: Fields) -> BpeVocabulary:
    tokens = _array(fields, "tokenizer.ggml.tokens", str)
    scores = _array(fields, "tokenizer.ggml.scores", float, len(tokens))
    if not scores:
        raise fields.fail("tokenizer.ggml.scores", "is missing")
    return BpeVocabulary(
        tokens=tokens,
        token_types=_array(fields, "tokenizer.ggml.token_type", int, len(tokens)),
        scores=scores,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", True),
        add_eos=fields.boolean("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=fields.boolean("tokenizer.ggml.add_space_prefix", True),
    )


def _array(fields: Fields, key: str, kind: type, length: int | None = None) -> tuple[Any, ...]:
    """An array of `kind`; with `length` given it may be absent, else its size must agree."""
    value = fields.values.get(key)
    if value is None and length is not None:
        return ()
    if not isinstance(value, (tuple, np.ndarray)):
        raise fields.fail(key, "is missing or not an array")
    found = _ARRAY_KINDS.get(value.dtype.kind) if isinstance(value, np.ndarray) else str
    if len(value) and found is not kind:
        raise fields.fail(key, f"must be an array of {kind.__name__}")
    if length is not None and len(value) != length:
        raise fields.fail(key, f"has {len(value)} items for {length} tokens")
    return value if isinstance(value, tuple) else tuple(value.tolist())
