"""The tokenizer of the model without weights. Imports next to nothing: the API process of a test
server reads it before it starts its engine."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

VOCAB = 512
EOS = 0


class FakeDetokenizer:
    def __init__(self, skip_special: bool) -> None:
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        if token_id == EOS and self._skip:
            return ""
        return self._decoder.decode(FakeTokenizer.token_bytes(token_id))

    def add_all(self, token_ids: Iterable[int]) -> str:
        return "".join([self.add(token_id) for token_id in token_ids])

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class FakeTokenizer:
    """1..255 are bytes, 256.. are pairs of letters, 0 ends a text."""

    eos_token_ids = (EOS,)
    vocab_size = VOCAB

    @staticmethod
    def token_bytes(token_id: int) -> bytes:
        if token_id == EOS:
            return b"<eos>"
        if token_id < 256:
            return bytes([token_id])
        rest = token_id - 256
        return bytes([97 + rest % 26, 97 + rest // 26])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_id(self, text: str) -> int | None:
        """No text is the name of a token."""
        return None

    def render_chat(
        self,
        messages: Sequence[dict[str, str]],
        add_generation_prompt: bool = True,
        tools: Any = None,
        variables: Any = None,
    ) -> str:
        text = (variables or {}).get("start", "")
        text += "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return text + ("[assistant]" if add_generation_prompt else "")

    def encode_chat(self, *args: Any, **options: Any) -> list[int]:
        return self.encode(self.render_chat(*args, **options))

    def decode_tokens(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.add_all(token_ids) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True) -> FakeDetokenizer:
        return FakeDetokenizer(skip_special_tokens)
