"""`tokenizer.model`: a SentencePiece model file (a protocol buffer), read without its library.

BPE models without text normalisation are supported (Llama 2, Mistral, Gemma, Phi-3), and unigram
models with a character map (XLM-RoBERTa). Other fields of the file are skipped.

A BPE model repeatedly joins the two adjacent pieces whose join has the highest score, the leftmost
on ties; characters outside the vocabulary become byte tokens. As merges: every split of a piece
into two pieces is a merge, ordered by the score of the piece. Where two splits of one piece compete
for the same characters ("aaa"), the one with the longer left part comes first, which equals joining
from the left. The space before a text is added again after every control or user-defined token, as
in llama.cpp.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.json_file import read_bytes
from llaisys.tokenization.source import BpeVocabulary, PackedStrings
from llaisys.tokenization.token_text import BYTE_NAME, SPACE

MAX_MODEL_BYTES = 64 * 1024 * 1024
MAX_PIECES = 1 << 22
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_UNIGRAM, _BPE = 1, 2  # model_type of trainer_spec; the default is unigram
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


def read_unigram(path: Path) -> tuple[list[tuple[str, float]], bytes]:
    """Pieces with scores, and the character map of the normalisation, empty: none. Raises
    `ModelLoadError` for a damaged file or another kind of model."""
    file = _read(path, _UNIGRAM)
    return list(zip(file.pieces, file.scores, strict=True)), file.character_map


class _DamagedError(ValueError):
    pass


@dataclass(slots=True)
class _Contents:
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    trainer: dict[int, int] = field(default_factory=dict)
    normaliser: dict[int, int] = field(default_factory=dict)
    character_map: bytes = b""


def _read(path: Path, kind: int) -> _Contents:
    """The contents of a model of this kind."""
    data = read_bytes(path, MAX_MODEL_BYTES)
    try:
        found = _parse(data, path)
    except (IndexError, struct.error, UnicodeDecodeError, _DamagedError) as error:
        raise ModelLoadError(f"{path}: not a SentencePiece model: {error}") from error
    own = found.trainer.get(3, _UNIGRAM)
    if own != kind:
        name = _KINDS.get(own, str(own))
        raise ModelLoadError(
            f"{path}: a SentencePiece {name} model; only {_KINDS[kind]} is supported here"
        )
    return found


def _parse(data: bytes, path: Path) -> _Contents:
    found = _Contents()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece, score, kind = _piece(value)
            found.pieces.append(piece)
            found.scores.append(score)
            found.types.append(kind)
            if len(found.pieces) > MAX_PIECES:
                raise ModelLoadError(f"{path}: more than {MAX_PIECES} pieces")
        elif number == 2 and isinstance(value, bytes):
            found.trainer = {key: item for key, item in _fields(value) if isinstance(item, int)}
        elif number == 3 and isinstance(value, bytes):
            parts = list(_fields(value))
            found.normaliser = {key: item for key, item in parts if isinstance(item, int)}
            maps = [item for key, item in parts if key == 2 and isinstance(item, bytes)]
            found.character_map = maps[-1] if maps else b""
    if not found.pieces:
        raise _DamagedError("it has no pieces")
    return found


def read_sentencepiece(
    path: Path, add_bos: bool, add_eos: bool
) -> tuple[BpeVocabulary, dict[str, int]]:
    """Raises `ModelLoadError` for a damaged file or an unsupported kind of model."""
    file = _read(path, _BPE)
    pieces, trainer, normaliser = file.pieces, file.trainer, file.normaliser
    if file.character_map or normaliser.get(4, 1):
        raise ModelLoadError(f"{path}: the model normalises text, which is not supported")
    special = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}
    defaults = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
    ids = {}
    for name, number in special.items():
        token_id = _signed(trainer.get(number, defaults[name]))
        if 0 <= token_id < len(pieces):
            ids[name] = token_id
    vocabulary = BpeVocabulary(
        tokens=PackedStrings.of(pieces),
        token_types=tuple(file.types),
        scores=tuple(file.scores),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=bool(normaliser.get(3, 1)),
    )
    return vocabulary, ids


def _piece(data: bytes) -> tuple[str, float, int]:
    """(text, score, type) of a piece."""
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of a message: varints as int, 32 bits as float, else bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | float | bytes
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _FIXED32:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        elif wire == _FIXED64:
            value, at = data[at : at + 8], at + 8
        elif wire == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise _DamagedError(f"wire type {wire} at byte {at}")
        if at > end or number == 0:
            raise _DamagedError(f"field {number} ends at byte {at} of {end}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise _DamagedError(f"a number of more than 10 bytes at byte {at}")


def _signed(value: int) -> int:
    """Negative numbers are stored in 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


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
