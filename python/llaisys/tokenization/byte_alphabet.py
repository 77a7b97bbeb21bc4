"""The byte-level BPE alphabet: one printable character per byte."""

from __future__ import annotations


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
