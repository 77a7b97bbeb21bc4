"""SentencePiece BPE vocabularies (Llama 2, TinyLlama, Mistral) as `tokenizers` objects.

SentencePiece repeatedly joins the two adjacent pieces whose join has the highest score, the
leftmost on ties; characters outside the vocabulary become byte tokens. As merges: every split of a
piece into two pieces is a merge, ordered by the score of the piece. Where two splits of one piece
compete for the same characters ("aaa"), the one with the longer left part comes first, which equals
joining from the left. The space before a text is added again after every control or user-defined
token, as in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.source import BpeVocabulary
from llaisys.tokenization.token_text import BYTE_NAME, SPACE

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece token types
MAX_PIECE_CHARS = 256


def sentencepiece_bpe(
    vocabulary: BpeVocabulary, vocab: dict[str, int], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """A tokenizer without added tokens; `kinds`: token types by id."""
    model = models.BPE(
        vocab=vocab,
        merges=merges_of(vocabulary.tokens, vocabulary.scores, kinds),
        unk_token=vocabulary.tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    result = tokenizers.Tokenizer(model)
    in_parts: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    out_parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        in_parts.insert(0, normalizers.Prepend(SPACE))
        out_parts.append(decoders.Strip(" ", 1, 0))
    result.normalizer = normalizers.Sequence(in_parts)
    result.decoder = decoders.Sequence(out_parts)
    return result


def default_kinds(tokens: Sequence[str], special_ids: dict[str, int]) -> tuple[int, ...]:
    """Token types for a file without them."""
    kinds = [BYTE if BYTE_NAME.fullmatch(token) else NORMAL for token in tokens]
    for name, token_id in special_ids.items():
        kinds[token_id] = UNKNOWN if name == "unk_token" else CONTROL
    return tuple(kinds)


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, best first."""
    pieces = {t: i for i, t in enumerate(tokens) if kinds[i] == NORMAL and t}
    ranked = []
    for piece, token_id in pieces.items():
        if not math.isfinite(scores[token_id]):
            raise ModelLoadError(f"tokenizer: token {piece[:80]!r} has score {scores[token_id]}")
        if len(piece) > MAX_PIECE_CHARS:
            raise ModelLoadError(
                f"tokenizer: token {token_id} has {len(piece)} characters, at most "
                f"{MAX_PIECE_CHARS} are supported"
            )
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[token_id], token_id, -cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
