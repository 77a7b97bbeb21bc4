"""The bytes of the tokens of a vocabulary, if they do not depend on other tokens."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # a space in SentencePiece tokens


@dataclass(frozen=True, slots=True)
class TokenText:
    """Conversion of tokens to text: join their bytes, optionally drop the first space."""

    to_bytes: Callable[[str], bytes]
    drop_first_space: bool = False  # SentencePiece adds one before every text


def token_text(decoder: Any) -> TokenText | None:
    """The `TokenText` equivalent of a decoder of the `tokenizers` library, or None."""
    if isinstance(decoder, decoders.ByteLevel):
        return TokenText(token_to_bytes)
    if not isinstance(decoder, decoders.Sequence):
        return None
    parts = json.loads(decoder.__getstate__())["decoders"]
    names = [part["type"] for part in parts]
    replaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or parts[0] != replaces:
        return None
    if names[3:] and parts[3:] != [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return None
    return TokenText(piece_to_bytes, bool(names[3:]))


def piece_to_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece token: a byte token <0xXX>, or text with U+2581 for spaces."""
    name = BYTE_NAME.fullmatch(piece)
    if name is not None:
        return bytes([int(name[1], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "replace")


class LazyTokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled on first use. Thread-safe."""

    def __init__(
        self, id_to_token: Callable[[int], str | None], to_bytes: Callable[[str], bytes]
    ) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        value = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value


def byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 maps to itself, other bytes to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_ALPHABET = byte_alphabet()


_CHARACTERS = {byte: c for c, byte in _ALPHABET.items()}


def bytes_to_token(data: bytes) -> str:
    return "".join(map(_CHARACTERS.__getitem__, data))


def token_to_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the alphabet is UTF-8."""
    try:
        return bytes([_ALPHABET[c] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")
