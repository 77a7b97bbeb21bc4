"""Text to token ids and back: tokenizer, chat template, incremental detokenizer."""

from llaisys.tokenization.chat_template import ChatTemplate
from llaisys.tokenization.detokenizer import Detokenizer
from llaisys.tokenization.source import BpeVocabulary, TokenizerSource
from llaisys.tokenization.tokenizer import Tokenizer

__all__ = ["BpeVocabulary", "ChatTemplate", "Detokenizer", "Tokenizer", "TokenizerSource"]
