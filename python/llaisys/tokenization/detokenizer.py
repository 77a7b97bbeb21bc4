"""Incremental detokenization that never splits a character.

The texts of `add` and `finish` join to `Tokenizer.decode_tokens` of the whole sequence; for a
SentencePiece vocabulary, with the leading space that `decode_tokens` removes.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one growing sequence. Not thread-safe."""

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        raise NotImplementedError

    def finish(self) -> str:
        """The text held back (an incomplete character becomes U+FFFD); resets the state."""
        raise NotImplementedError

    def add_all(self, token_ids: Iterable[int]) -> str:
        return "".join([self.add(token_id) for token_id in token_ids])


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are byte strings. O(1) per token."""

    def __init__(self, token_bytes: Mapping[int, bytes], skipped: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_partial = False  # the decoder holds the first bytes of a character

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._text(self._bytes[token_id])

    def add_all(self, token_ids: Iterable[int]) -> str:
        skipped, token_bytes = self._skipped, self._bytes
        return self._text(
            b"".join([token_bytes[token_id] for token_id in token_ids if token_id not in skipped])
        )

    def _text(self, data: bytes) -> str:
        if not self._is_partial:
            try:
                return data.decode()  # faster; most tokens are whole characters
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._is_partial = False
        return text


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a window of the last ids with each token.

    The cost per token is bounded by the window. The result equals the whole decode unless the
    vocabulary has byte tokens and an invalid byte directly follows a character made of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], window: int = 16) -> None:
        self._decode = decode
        self._window = window
        self._ids: list[int] = []
        self._emitted = 0  # characters of the window's text already returned

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[self._emitted :]
        self._emitted = len(text)
        if len(self._ids) >= 2 * self._window:
            self._shrink()
        return piece

    def _shrink(self) -> None:
        """Drop older ids, unless that splits a character of several tokens."""
        recent = self._ids[-self._window :]
        text = self._decode(recent)
        if REPLACEMENT not in text or len(self._ids) >= 16 * self._window:
            self._ids, self._emitted = recent, len(text)

    def finish(self) -> str:
        piece = self._decode(self._ids)[self._emitted :] if self._ids else ""
        self._ids, self._emitted = [], 0
        return piece
