"""The ways in which models call tools, one module each, by their names for `--tool-call-parser`.

vLLM's names mean the same here."""

from __future__ import annotations

from llaisys.chat.tool_formats.base import MAX_CALLS, ToolCallParser
from llaisys.chat.tool_formats.deepseek import DeepSeekParser
from llaisys.chat.tool_formats.llama3 import Llama3Parser
from llaisys.chat.tool_formats.mistral import MistralParser
from llaisys.chat.tool_formats.tagged import TaggedParser

TOOL_FORMATS: dict[str, type[ToolCallParser]] = {
    "hermes": TaggedParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "json": TaggedParser,  # what we ask for where the template says nothing
}
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama": "llama3_json",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
}

__all__ = ["ALIASES", "MAX_CALLS", "TOOL_FORMATS", "ToolCallParser"]
