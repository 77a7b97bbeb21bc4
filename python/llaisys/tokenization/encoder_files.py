"""Tokenizers of encoders without tokenizer.json: vocab.txt (WordPiece, BERT) and
sentencepiece.bpe.model (unigram, XLM-RoBERTa)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.json_file import read_bytes
from llaisys.tokenization.sentencepiece_file import read_unigram
from llaisys.tokenization.settings import special_text
from llaisys.tokenization.token_text import SPACE

VOCAB_TXT, UNIGRAM = "vocab.txt", "sentencepiece.bpe.model"
_CONTROL = 3  # token type of GGUF files
HIDDEN_SCORE = -1e4  # of special tokens: a text never has them as pieces


def hide_special_pieces(text: bytes) -> bytes:
    """tokenizer.json in which a unigram model does not find special tokens in a text; other models
    are unchanged."""
    if b"Unigram" not in text:
        return text
    content = msgspec.json.decode(text)
    model, added = content.get("model", {}), content.get("added_tokens", [])
    if model.get("type") != "Unigram":
        return text
    names = {token["content"] for token in added if token.get("special")}
    model["vocab"] = [
        [piece, HIDDEN_SCORE if piece in names else score] for piece, score in model["vocab"]
    ]
    return msgspec.json.encode(content)


def _name(settings: dict[str, Any], key: str, default: str) -> str:
    """The text of a special token."""
    return special_text(settings.get(key)) or default


def word_piece(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """BERT's tokenizer from vocab.txt."""
    path = directory / VOCAB_TXT
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: not UTF-8: {error.reason}") from error
    tokens = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelLoadError(f"{path}: the token {twice[:80]!r} is there twice")
    return build_word_piece(vocab, settings, str(path))


def gguf_word_piece(tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """BERT's tokenizer from GGUF metadata, where a token that begins a word has U+2581 before it
    and others have no '##'. Lower case unless a token has a capital."""
    vocab: dict[str, int] = {}
    is_lower = True
    for i, token in enumerate(tokens):
        name = token
        if not types or types[i] != _CONTROL:
            name = token[1:] if token.startswith(SPACE) else f"##{token}"
            is_lower = is_lower and not any("A" <= letter <= "Z" for letter in token)
        vocab.setdefault(name, i)
    return build_word_piece(vocab, {"do_lower_case": is_lower}, "tokenizer.ggml.tokens")


def build_word_piece(
    vocab: dict[str, int], settings: dict[str, Any], path: str
) -> tokenizers.Tokenizer:
    keys = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    names = {key: _name(settings, key, f"[{key[:-6].upper()}]") for key in keys}
    for key in ("unk_token", "cls_token", "sep_token"):
        if names[key] not in vocab:
            raise ModelLoadError(f"{path}: it has no {key} {names[key]!r}")
    result = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"]))
    accents = settings.get("strip_accents")
    result.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars") is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=settings.get("do_lower_case") is not False,
    )
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.decoder = decoders.WordPiece(prefix="##")
    known = [name for name in names.values() if name in vocab]
    result.add_tokens([AddedToken(name, special=True, normalized=False) for name in known])
    first, last = names["cls_token"], names["sep_token"]
    result.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=[f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"],
        special_tokens=[(first, vocab[first]), (last, vocab[last])],
    )
    return result


def unigram(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer from a SentencePiece model. Its ids are those of the pieces plus 1,
    as fairseq puts <s>, <pad>, </s> and <unk> first, and <mask> is the last."""
    pieces, character_map = read_unigram(directory / UNIGRAM)
    ends = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    first = [_name(settings, key, default) for key, default in ends.items()]
    mask = _name(settings, "mask_token", "<mask>")
    names = [(name, HIDDEN_SCORE) for name in first]
    vocab = [*names, *pieces[3:], (mask, HIDDEN_SCORE)]
    result = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    if character_map:
        result.normalizer = normalizers.Precompiled(character_map)
    space = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    result.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    result.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    added = [AddedToken(name, special=True, normalized=False) for name in first]
    result.add_tokens([*added, AddedToken(mask, special=True, normalized=False, lstrip=True)])
    begin, end = first[0], first[2]
    result.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", end, end, "$B", end],
        special_tokens=[(begin, 0), (end, 2)],
    )
    return result
