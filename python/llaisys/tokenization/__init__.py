"""Text to token ids and back: tokenizer, chat template, incremental detokenizer.

Names are imported when they are first used: who only passes a `TokenizerSource` on (the engine
process) does not pay for the tokenizer's libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llaisys.tokenization.chat_template import ChatTemplate
    from llaisys.tokenization.detokenizer import Detokenizer
    from llaisys.tokenization.source import BpeVocabulary, TokenizerSource
    from llaisys.tokenization.tokenizer import Tokenizer

_HOMES = {
    "BpeVocabulary": "source",
    "ChatTemplate": "chat_template",
    "Detokenizer": "detokenizer",
    "Tokenizer": "tokenizer",
    "TokenizerSource": "source",
}

__all__ = ["BpeVocabulary", "ChatTemplate", "Detokenizer", "Tokenizer", "TokenizerSource"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
