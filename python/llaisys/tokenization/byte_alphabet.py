"""The byte-level BPE alphabet: each of the 256 bytes has a printable character of its own."""

from __future__ import annotations


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
