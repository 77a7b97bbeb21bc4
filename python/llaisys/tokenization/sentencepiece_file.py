"""`tokenizer.model`: a SentencePiece model file (a protocol buffer), read without its library.

Only BPE models without text normalisation are supported: Llama 2, Mistral, Gemma, Phi-3. Other
fields of the file are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llaisys.common.errors import ModelLoadError
from llaisys.common.packed_strings import PackedStrings
from llaisys.tokenization.json_file import read_bytes
from llaisys.tokenization.source import BpeVocabulary

MAX_MODEL_BYTES = 64 * 1024 * 1024
MAX_PIECES = 1 << 22
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_BPE = 2  # model_type of trainer_spec; the default, 1, is unigram
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    vocabulary: BpeVocabulary
    special_ids: dict[str, int]  # 'bos_token' -> id, ...


def read_sentencepiece(path: Path, add_bos: bool, add_eos: bool) -> SentencePieceFile:
    """Raises `ModelLoadError` for a damaged file or an unsupported kind of model."""
    data = read_bytes(path, MAX_MODEL_BYTES)
    try:
        return _parse(data, path, add_bos, add_eos)
    except (IndexError, struct.error, UnicodeDecodeError, _DamagedError) as error:
        raise ModelLoadError(f"{path}: not a SentencePiece model: {error}") from error


class _DamagedError(ValueError):
    pass


def _parse(data: bytes, path: Path, add_bos: bool, add_eos: bool) -> SentencePieceFile:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {}
    normaliser: dict[int, int] = {}
    has_character_map = False
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            piece, score, kind = _piece(value)
            pieces.append(piece)
            scores.append(score)
            types.append(kind)
            if len(pieces) > MAX_PIECES:
                raise ModelLoadError(f"{path}: more than {MAX_PIECES} pieces")
        elif field == 2 and isinstance(value, bytes):
            trainer = {key: item for key, item in _fields(value) if isinstance(item, int)}
        elif field == 3 and isinstance(value, bytes):
            parts = list(_fields(value))
            normaliser = {key: item for key, item in parts if isinstance(item, int)}
            has_character_map = any(key == 2 and item for key, item in parts)
    if not pieces:
        raise _DamagedError("it has no pieces")
    kind = trainer.get(3, 1)
    if kind != _BPE:
        name = _KINDS.get(kind, str(kind))
        raise ModelLoadError(f"{path}: a SentencePiece {name} model; only BPE is supported")
    if has_character_map or normaliser.get(4, 1):
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
        token_types=tuple(types),
        scores=tuple(scores),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=bool(normaliser.get(3, 1)),
    )
    return SentencePieceFile(vocabulary, ids)


def _piece(data: bytes) -> tuple[str, float, int]:
    """(text, score, type) of a piece."""
    text, score, kind = "", 0.0, 1
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif field == 2 and isinstance(value, float):
            score = value
        elif field == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of a message: varints as int, 32 bits as float, else bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
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
        if at > end or field == 0:
            raise _DamagedError(f"field {field} ends at byte {at} of {end}")
        yield field, value


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
