"""Tool-call parsers by their `--tool-call-parser` names (vLLM's names are
accepted)."""

from llaisys.chat.tool_formats.base import MAX_CALLS, ToolCallParser
from llaisys.chat.tool_formats.deepseek import DeepSeekParser
from llaisys.chat.tool_formats.gemma import FunctionGemmaParser
from llaisys.chat.tool_formats.harmony import HarmonyParser
from llaisys.chat.tool_formats.json_formats import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    Phi4MiniParser,
)
from llaisys.chat.tool_formats.pythonic import PythonicParser
from llaisys.chat.tool_formats.xml import Glm4Parser, Qwen3CoderParser

TOOL_FORMATS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "harmony": HarmonyParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm45": Glm4Parser,
    "pythonic": PythonicParser,
    "phi4_mini_json": Phi4MiniParser,
    "functiongemma": FunctionGemmaParser,
    "json": HermesParser,  # for templates without tools; the format of history._INSTRUCTIONS
}
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama": "llama3_json",
    "openai": "harmony",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "olmo3": "pythonic",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
}

__all__ = ["ALIASES", "MAX_CALLS", "TOOL_FORMATS", "ToolCallParser"]
