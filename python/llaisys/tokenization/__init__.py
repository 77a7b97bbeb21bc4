"""Text to token ids and back: tokenizer, chat template, incremental detokenizer.

Names are imported on first use: a process that only passes a `TokenizerSource` on (the engine) does
not load the tokenizer libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llaisys.tokenization.chat_template import ChatTemplate
    from llaisys.tokenization.detokenizer import Detokenizer
    from llaisys.tokenization.source import BpeVocabulary, TokenizerSource
    from llaisys.tokenization.tokenizer import Tokenizer

_MODULES = {
    "BpeVocabulary": "source",
    "ChatTemplate": "chat_template",
    "Detokenizer": "detokenizer",
    "Tokenizer": "tokenizer",
    "TokenizerSource": "source",
}

__all__ = ["BpeVocabulary", "ChatTemplate", "Detokenizer", "Tokenizer", "TokenizerSource"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
