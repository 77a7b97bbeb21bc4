"""Harmony, the answer format of gpt-oss: messages with a channel each.

    <|channel|>analysis<|message|>..<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{..}<|call|>  a call
    <|start|>assistant<|channel|>final<|message|>..<|return|>                      content

Text of the commentary channel without a recipient is content; messages to other recipients than
functions are reasoning.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from llaisys.chat.records import ReasoningText
from llaisys.chat.text_source import Delimiters, Parsing, Sink
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = "analysis"
RECIPIENT = "functions."
MAX_HEADER = 1024  # characters of a header that are used

_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_STARTS = Delimiters(START, CHANNEL)
_BODY = Delimiters(MESSAGE)
_ENDS = Delimiters(END, CALL, RETURN, START)


class HarmonyParser(ToolCallParser):
    """Also returns reasoning. Without tools (`max_calls` 0) calls are content."""

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    splits_reasoning = True  # otherwise reasoning is content

    def _read(self) -> Parsing[None]:
        yield from self.bare_calls()
        self._begun: set[str] = set()  # kinds of messages so far
        found = yield from self.source.until(_STARTS, self.content)
        while found is not None:
            header = [found]
            if (yield from self.source.until(_BODY, header.append)) is None:
                return
            end = yield from self._message("".join(header)[:MAX_HEADER])
            if end is None:
                return
            if end == START:
                found = START
            else:
                found = yield from self.source.until(_STARTS, self.content)

    def _message(self, header: str) -> Parsing[str | None]:
        """Read the text of a message and return the delimiter after it."""
        channel, to = _CHANNEL.search(header), _TO.search(header)
        name = "" if to is None or self._max_calls == 0 else to[1]
        if name.startswith(RECIPIENT) and NAME.fullmatch(name.removeprefix(RECIPIENT)):
            return (yield from self._call(name.removeprefix(RECIPIENT)))
        kind = "" if channel is None else channel[1]
        is_reasoning = self.splits_reasoning and (bool(name) or kind == ANALYSIS)
        sink = self._joined("reasoning" if is_reasoning else "content")
        return (yield from self.source.until(_ENDS, sink))

    def _call(self, name: str) -> Parsing[str | None]:
        given = False

        def arguments(text: str) -> None:
            nonlocal given
            text = text if given else text.lstrip()
            given = given or bool(text)
            self.arguments(text)

        self.begin(name)
        end = yield from self.source.until(_ENDS, arguments)
        if not given:
            self.arguments("{}")
        return end

    def _joined(self, kind: str) -> Sink:
        """A sink for one message; messages of a kind are joined by an empty line."""
        prefix = "\n\n" if kind in self._begun else ""

        def sink(text: str) -> None:
            nonlocal prefix
            text, prefix = prefix + text, ""
            self._begun.add(kind)
            if kind == "content":
                self.content(text)
            else:
                self._events.append(ReasoningText(text))

        return sink


def reasoning_counter(tokenizer: Any) -> Callable[[Sequence[int]], int] | None:
    """A function that counts the tokens of analysis messages; None: the markers are no tokens."""
    channel, message = tokenizer.token_id(CHANNEL), tokenizer.token_id(MESSAGE)
    ends = {tokenizer.token_id(word) for word in (END, CALL, RETURN, START)}
    if channel is None or message is None or None in ends:
        return None

    def count(tokens: Sequence[int]) -> int:
        found, is_inside = 0, False
        header: list[int] | None = None
        for token in tokens:
            if token == channel:
                header, is_inside = [], False
            elif token == message and header is not None:
                text: str = tokenizer.decode_tokens(header)
                header, is_inside = None, text.lstrip().startswith(ANALYSIS)
            elif token in ends:
                header, is_inside = None, False
            elif header is not None:
                header.append(token)
            else:
                found += is_inside
        return found

    return count
