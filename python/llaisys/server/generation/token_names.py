"""Text of token ids for clients."""

import math
from collections.abc import Sequence
from typing import Any

from llaisys.common.types import TokenLogprobs


class TokenNames:
    """Converts token ids to the strings of logprobs."""

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text: str = self._tokenizer.decode_tokens([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # part of a character: named by its bytes, as OpenAI does
            raw = self._tokenizer.token_bytes(token_id)
            if raw != text.encode():
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def detokenizer(self) -> Any:
        """Return an incremental detokenizer, for text offsets; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.detokenizer(True)

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a logprob object; `bytes` may be an incomplete UTF-8 sequence."""
        raw = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float | None:
    """Return a JSON number: -9999 for -inf, as OpenAI does; None for NaN."""
    if math.isnan(logprob):
        return None
    return logprob if logprob > -9999.0 else -9999.0


def chat_logprobs(
    entries: Sequence[TokenLogprobs] | None, names: TokenNames
) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = []
    for entry in entries:
        item = names.entry(entry.token_id, entry.logprob)
        item["top_logprobs"] = [names.entry(token, value) for token, value in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}
