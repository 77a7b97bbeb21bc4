"""`TokenizerSource` from GGUF metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from llaisys.common.packed_strings import PackedStrings
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_VOCAB
from llaisys.tokenization.source import BpeVocabulary, TokenizerSource

_ARRAY_KINDS = {"i": int, "u": int, "f": float}  # by numpy's kind of dtype
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def tokenizer_from_gguf(
    fields: Fields, default_pre_tokenizer: str, eos_token_ids: tuple[int, ...]
) -> TokenizerSource:
    """Type-checked tokenizer metadata, from which `Tokenizer` is built."""
    model = fields.string("tokenizer.ggml.model", None)
    if model not in ("gpt2", "llama", "bert"):
        known = "gpt2 (byte-level BPE), llama (SentencePiece BPE), bert (WordPiece)"
        why = f"{fields.where}: tokenizer.ggml.model {model!r} is not supported; known: {known}"
        return TokenizerSource(missing=why)
    vocabulary = _vocabulary(fields, model, default_pre_tokenizer)
    kinds = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    special_ids = []
    for name, key in kinds:
        value = fields.integer(f"tokenizer.ggml.{key}_token_id", 0, MAX_VOCAB, None)
        if value is not None and value < len(vocabulary.tokens):
            special_ids.append((f"{name}_token", int(value)))
    return TokenizerSource(
        vocabulary=vocabulary,
        chat_template=fields.string("tokenizer.chat_template", None),
        special_ids=tuple(special_ids),
        eos_token_ids=eos_token_ids,
    )


def _vocabulary(fields: Fields, model: str, default_pre_tokenizer: str) -> BpeVocabulary:
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    types = _array(fields, "tokenizer.ggml.token_type", int, len(tokens))
    if model == "bert":
        return BpeVocabulary(tokens=tokens, token_types=types, is_word_piece=True)
    add_eos = fields.boolean("tokenizer.ggml.add_eos_token", False)
    if model == "gpt2":
        pre = fields.string("tokenizer.ggml.pre", default_pre_tokenizer)
        return BpeVocabulary(
            tokens=tokens,
            token_types=types,
            merges=_texts(fields, "tokenizer.ggml.merges"),
            pre_tokenizer=pre,
            add_bos=fields.boolean("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT),
            add_eos=add_eos,
        )
    scores = _array(fields, "tokenizer.ggml.scores", float, len(tokens))
    if not scores:
        raise fields.fail("tokenizer.ggml.scores", "is missing")
    return BpeVocabulary(
        tokens=tokens,
        token_types=types,
        scores=scores,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", True),
        add_eos=add_eos,
        add_space_prefix=fields.boolean("tokenizer.ggml.add_space_prefix", True),
    )


def _texts(fields: Fields, key: str) -> PackedStrings:
    value = fields.values.get(key)
    if isinstance(value, np.ndarray) and not len(value):
        return PackedStrings()
    if not isinstance(value, (PackedStrings, np.ndarray)):
        raise fields.fail(key, "is missing or not an array")
    if not isinstance(value, PackedStrings):
        raise fields.fail(key, "must be an array of str")
    return value


def _array(fields: Fields, key: str, kind: type, length: int) -> tuple[Any, ...]:
    """An array of `length` numbers of `kind`; empty when absent."""
    value = fields.values.get(key)
    if value is None:
        return ()
    if not isinstance(value, (PackedStrings, np.ndarray)):
        raise fields.fail(key, "is missing or not an array")
    found = _ARRAY_KINDS.get(value.dtype.kind) if isinstance(value, np.ndarray) else str
    if len(value) and found is not kind:
        raise fields.fail(key, f"must be an array of {kind.__name__}")
    if len(value) != length:
        raise fields.fail(key, f"has {len(value)} items for {length} tokens")
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else ()
