"""Incremental detokenisation: ids in, text out, never half a character.

For every sequence of ids, the pieces returned by `add` followed by `finish` join to what
`Tokenizer.decode_tokens` gives for the whole sequence; of a SentencePiece vocabulary, with the
space that `decode_tokens` takes off the beginning.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one growing sequence. Not shared between threads."""

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        raise NotImplementedError

    def finish(self) -> str:
        """What is still held back (an incomplete character becomes U+FFFD); resets the state."""
        raise NotImplementedError

    def add_all(self, token_ids: Iterable[int]) -> str:
        return "".join([self.add(token_id) for token_id in token_ids])


class ByteDetokenizer(Detokenizer):
    """For vocabularies in which each token is a run of bytes. O(1) per token."""

    def __init__(self, token_bytes: Mapping[int, bytes], skipped: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._bytes[token_id])

    def add_all(self, token_ids: Iterable[int]) -> str:
        skipped, token_bytes = self._skipped, self._bytes
        return self._decoder.decode(
            b"".join([token_bytes[token_id] for token_id in token_ids if token_id not in skipped])
        )

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a short window of ids again with each token.

    The cost per token is bounded by the window. Equality with the whole decode holds unless the
    vocabulary has byte tokens and an invalid byte directly follows a character made of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], window: int = 16) -> None:
        self._decode = decode
        self._window = window
        self._ids: list[int] = []
        self._shown = 0  # characters of the window's text that are out

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[self._shown :]
        self._shown = len(text)
        if len(self._ids) >= 2 * self._window:
            self._shrink()
        return piece

    def _shrink(self) -> None:
        """Drop the older ids, unless that would cut a character that is made of several."""
        kept = self._ids[-self._window :]
        text = self._decode(kept)
        if REPLACEMENT not in text or len(self._ids) >= 16 * self._window:
            self._ids, self._shown = kept, len(text)

    def finish(self) -> str:
        piece = self._decode(self._ids)[self._shown :] if self._ids else ""
        self._ids, self._shown = [], 0
        return piece
