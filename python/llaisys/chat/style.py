"""`ChatStyle`: tool-call and reasoning formats of a model, detected from its chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llaisys.chat import reasoning, tool_formats
from llaisys.chat.history import (
    Message,
    harmony_messages,
    native_messages,
    plain_messages,
    with_system_tools,
)
from llaisys.chat.reader import AnswerReader
from llaisys.chat.reasoning import REASONING_FORMATS, ReasoningMarkers, ReasoningSplitter
from llaisys.chat.repeats import RepeatFilter
from llaisys.chat.tool_formats import TOOL_FORMATS, harmony
from llaisys.chat.tool_formats.harmony import HarmonyParser
from llaisys.chat.tool_formats.json_formats import HermesParser
from llaisys.chat.tools import ToolSet
from llaisys.common.validation import check_choice

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, *TOOL_FORMATS, *tool_formats.ALIASES)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS, *reasoning.ALIASES)
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
THINKING_SWITCHES = ("enable_thinking", "thinking")  # template variables: reasoning on or off
HARMONY_EFFORTS = {"minimal": "low", "xhigh": "high"}  # the model knows low, medium and high
TAIL_TOKENS = 16  # tokens at the end of a prompt searched for the opening reasoning marker

# Substring of a template -> tool format, most specific first.
_FORMAT_HINTS = {
    "<｜tool▁call": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<|channel|>": "harmony",
    "<start_function_call>": "functiongemma",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<function_calls>": "pythonic",
    "<|python_start|>": "pythonic",
    "<|tool|>": "phi4_mini_json",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '"parameters": ': "llama3_json",
}


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """Formats of one model. Immutable."""

    tool_format: str = "json"  # key of TOOL_FORMATS
    lists_tools: bool = False  # the template writes the tools into the prompt
    markers: ReasoningMarkers | None = None  # None: no reasoning
    variables: frozenset[str] = frozenset()  # read by the template

    @classmethod
    def of(cls, tokenizer: Any, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Self:
        """Detect the formats from the tokenizer's template, unless a parser is named. Raises
        InvalidInputError for an unknown name."""
        check_choice("tool_call_parser", tool_parser, TOOL_PARSERS)
        check_choice("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        info = getattr(tokenizer, "template_info", lambda: None)()
        text = "" if info is None else info.literal_text
        variables = frozenset() if info is None else info.variables
        lists_tools = "tools" in variables
        name = tool_formats.ALIASES.get(tool_parser, tool_parser)
        if name == AUTO:
            hints = (kind for piece, kind in _FORMAT_HINTS.items() if piece in text)
            name = next(hints, "json")
            lists_tools = lists_tools or name == "phi4_mini_json"
            name = name if lists_tools else "json"
        markers = _markers_of(text, name, reasoning_parser)
        return cls(name, lists_tools, markers, variables)

    @property
    def is_harmony(self) -> bool:
        return self.tool_format == "harmony"

    @property
    def uses_tags(self) -> bool:
        """Whether calls are between <tool_call> tags."""
        return TOOL_FORMATS[self.tool_format] is HermesParser

    def prepare(
        self, messages: Sequence[Message], tools: ToolSet | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages, tools) for the template."""
        if not self.lists_tools:
            return plain_messages(messages, () if tools is None else tools.tools), None
        found = native_messages(
            messages,
            arguments_as_text=self.tool_format == "deepseek",
            short_ids=self.tool_format == "mistral",
        )
        if self.is_harmony:
            found = harmony_messages(found)
        if tools is None:
            return found, None
        if self.tool_format == "phi4_mini_json" and "tools" not in self.variables:
            found = with_system_tools(found, tools.tools)
        return found, tools.for_template()

    def reader(
        self,
        tools: ToolSet | None,
        opened: bool = False,
        keep_reasoning: bool = True,
        seed: str = "",
    ) -> AnswerReader:
        """A reader for one choice. `opened`: the prompt ends inside the reasoning; `seed`: of the
        call ids. A forced answer ends at a repeated call."""
        splitter = parser = repeats = None
        if self.markers is not None and not self.is_harmony:
            splitter = ReasoningSplitter(self.markers, opened)
        if tools is not None:
            schemas = {tool.name: tool.parameters for tool in tools.tools}
            parser = TOOL_FORMATS[self.tool_format](tools.names, tools.max_calls, seed, schemas)
            repeats = RepeatFilter() if tools.ends_at_repeat else None
        elif self.is_harmony:
            parser = HarmonyParser(max_calls=0)
        if isinstance(parser, HarmonyParser):
            parser.splits_reasoning = self.markers is not None
        return AnswerReader(splitter, parser, keep_reasoning, repeats)

    def opens_reasoning(self, tokenizer: Any, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the opening reasoning marker."""
        if self.markers is None:
            return False
        tail: str = tokenizer.decode_tokens(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(self.markers.start)

    def is_inside_reasoning(self, text: str) -> bool:
        """Whether a partial answer ends inside the reasoning."""
        return self.markers is not None and text.rfind(self.markers.start) > text.rfind(
            self.markers.end
        )

    def reasoning_counter(
        self, tokenizer: Any, opened: bool
    ) -> Callable[[Sequence[int]], int] | None:
        """A function that counts the reasoning tokens of an answer; None if the end marker is not a
        single token."""
        if self.markers is None:
            return None
        if self.is_harmony:
            return harmony.reasoning_counter(tokenizer)
        start, end = tokenizer.token_id(self.markers.start), tokenizer.token_id(self.markers.end)
        if end is None:
            return None

        def count(tokens: Sequence[int]) -> int:
            try:
                first = 0 if opened else tokens.index(start) + 1
            except ValueError:
                return 0
            last = tokens.index(end, first) if end in tokens[first:] else len(tokens)
            return last - first

        return count

    def visible_ids(self, tokenizer: Any, tools: ToolSet | None) -> frozenset[int]:
        """Special tokens whose text the reader needs."""
        words: list[str] = []
        if tools is not None or self.is_harmony:
            words += TOOL_FORMATS[self.tool_format].markers
        if self.markers is not None:
            words += [self.markers.start, self.markers.end]
        special: frozenset[int] = getattr(tokenizer, "special_ids", frozenset())
        ids = (tokenizer.token_id(word) for word in words) if special else ()
        return frozenset(token for token in ids if token in special)

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Template variables for a `reasoning_effort`; empty if the template has none."""
        found: dict[str, Any] = {}
        if "reasoning_effort" in self.variables and effort != "none":
            known = HARMONY_EFFORTS if self.is_harmony else {}
            found["reasoning_effort"] = known.get(effort, effort)
        return found | self.switch_variables(effort != "none")

    def switch_variables(self, on: bool) -> dict[str, Any]:
        """The template's variables that turn reasoning on or off; none where it has no switch."""
        if self.markers is None:
            return {}
        return {switch: on for switch in THINKING_SWITCHES if switch in self.variables}


def _markers_of(text: str, tool_format: str, parser: str) -> ReasoningMarkers | None:
    name = reasoning.ALIASES.get(parser, parser)
    if name == NONE:
        return None
    if name != AUTO or tool_format == "harmony":
        return REASONING_FORMATS[name if name != AUTO else tool_format]
    for markers in REASONING_FORMATS.values():
        if markers.end in text or markers.start in text:
            return markers
    return None
