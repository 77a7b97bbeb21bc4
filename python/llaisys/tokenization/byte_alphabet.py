"""The byte-level BPE alphabet: each of the 256 bytes has a printable character of its own."""

from __future__ import annotations

from collections.abc import Callable


def byte_alphabet() -> dict[str, int]:
    """character -> byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_ALPHABET = byte_alphabet()


def token_to_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token outside the alphabet is its own UTF-8."""
    try:
        return bytes([_ALPHABET[c] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class LazyTokenBytes(dict[int, bytes]):
    """token id -> bytes, filled on first use; harmless to share between threads."""

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        value = b"" if token is None else token_to_bytes(token)
        self[token_id] = value
        return value
