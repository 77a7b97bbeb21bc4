"""OpenAI's response objects, built as plain dictionaries."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import AnswerEvent, CallArguments, CallStart, ChatAnswer, ContentText
from llaisys.common.types import CompletionOutput, TokenLogprobs, Usage
from llaisys.server.generation.token_names import TokenNames, chat_logprobs, finite
from llaisys.server.http.response_bodies import json_bytes

DONE = b"data: [DONE]\n\n"
# The JSON encoder holds the GIL, so each call encodes a limited number of tokens.
LOGPROBS_PER_CHUNK = 64 * 21  # of 64 tokens, each with 20 alternatives


def tokens_per_chunk(entries: Sequence[TokenLogprobs]) -> int:
    """Return the number of tokens whose logprobs are encoded at a time."""
    return max(1, LOGPROBS_PER_CHUNK // (1 + max((len(e.top) for e in entries), default=0)))


def usage_object(usage: Usage) -> dict[str, Any]:
    cached = {"cached_tokens": usage.cached_tokens}
    if usage.host_cached_tokens:  # extension: cached tokens loaded from host blocks
        cached["host_cached_tokens"] = usage.host_cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def plain_reader(_: int) -> AnswerReader:
    """Return a parser that treats everything as content."""
    return AnswerReader()


def message_object(answer: ChatAnswer, uses_functions: bool = False) -> dict[str, Any]:
    """Return the message of a chat. Reasoning has both names that clients use."""
    message = {**answer.to_message(), "refusal": None}
    if uses_functions and answer.tool_calls:
        message["function_call"] = message.pop("tool_calls")[0]["function"]
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    return message


def delta_object(event: AnswerEvent, uses_functions: bool = False) -> dict[str, Any]:
    if isinstance(event, ContentText):
        return {"content": event.text}
    if uses_functions and isinstance(event, CallStart):
        return {"function_call": {"name": event.name, "arguments": ""}}
    if uses_functions and isinstance(event, CallArguments):
        return {"function_call": {"arguments": event.text}}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, CallArguments):
        call = {"index": event.index, "function": {"arguments": event.text}}
        return {"tool_calls": [call]}
    return {"reasoning_content": event.text, "reasoning": event.text}


class TextOffsets:
    """Text offsets of the tokens of a choice; partial characters get the character's offset."""

    def __init__(self, names: TokenNames, start: int = 0) -> None:
        self._detokenizer = names.detokenizer()
        self._offset = start

    def next(self, token_id: int) -> int:
        offset = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.add(token_id))
        return offset


def completion_logprobs(
    entries: Sequence[TokenLogprobs] | None, names: TokenNames, offsets: TextOffsets
) -> dict[str, Any] | None:
    if entries is None:
        return None
    tokens = [names.text(entry.token_id) for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {names.text(token): finite(value) for token, value in with_sampled(entry)}
            if entry.rank
            else None
            for entry in entries
        ],
        "text_offset": [offsets.next(entry.token_id) for entry in entries],
    }


def with_sampled(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the logprob of the sampled token, followed by the other top logprobs, as vLLM."""
    others = [pair for pair in entry.top if pair[0] != entry.token_id]
    return [(entry.token_id, entry.logprob), *others]


def prompt_entries(
    entries: Sequence[TokenLogprobs], count: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return prompt logprobs in vLLM's format: by token id, the token and the `count` best."""
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        best = [(i, p, rank) for rank, (i, p) in enumerate(entry.top[:count], 1)]
        tokens = {
            i: (p, rank) for i, p, rank in [*best, (entry.token_id, entry.logprob, entry.rank)]
        }
        by_id = {
            str(i): {"logprob": finite(p), "rank": rank, "decoded_token": names.text(i)}
            for i, (p, rank) in tokens.items()
        }
        found.append(by_id if entry.rank else None)  # the first token has no logprob
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice to format."""

    index: int
    output: CompletionOutput
    echo: str = ""  # prefix of the text
    echoed: Sequence[TokenLogprobs] | None = None  # logprobs of the echo
    prompt: Sequence[TokenLogprobs] | None = None  # for `prompt_logprobs`
    prompt_token_ids: list[int] | None = None  # if requested

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None:
        """Logprobs of the whole text."""
        if self.echoed is None:
            return self.output.logprobs
        return [*self.echoed, *(self.output.logprobs or ())]

    def offsets(self, names: TokenNames) -> TextOffsets:
        return TextOffsets(names, len(self.echo) if self.echoed is None else 0)


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Builds the JSON of a chat or completion response, whole or in chunks."""

    response_id: str
    created: int
    model: str
    chat: bool
    names: TokenNames
    token_ids: bool = False  # return_token_ids
    session_id: str | None = None
    new_reader: Callable[[int], AnswerReader] = plain_reader  # by index of the choice
    fingerprint: str | None = None
    num_prompt_logprobs: int = 0  # top logprobs per prompt token
    # Whether old turns were dropped; None: not possible. In the last chunk of a choice.
    context_truncated: bool | None = None
    uses_functions: bool = False  # calls in the format of `functions`, which `tools` replaced

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        head = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        if self.session_id is not None:
            head["session_id"] = self.session_id
        return head

    def _logprobs(
        self, entries: Sequence[TokenLogprobs] | None, offsets: TextOffsets | None
    ) -> Any:
        if self.chat:
            return chat_logprobs(entries, self.names)
        return completion_logprobs(entries, self.names, offsets or TextOffsets(self.names))

    def whole(
        self,
        choices: Sequence[Choice],
        usage: Usage,
        timings: dict[str, Any],
        more: dict[str, Any] | None = None,
    ) -> Iterator[bytes]:
        """Yield the body in pieces that are each cheap to make. `more`: further fields."""
        head = {**self._head(False), "usage": usage_object(usage), "timings": timings}
        head |= more or {}
        if self.context_truncated is not None:
            head["context_truncated"] = self.context_truncated
        yield json_bytes(head)[:-1]
        if self.chat:
            yield from self._prompt_pieces(choices[0])
        yield b',"choices":['
        for number, choice in enumerate(choices):
            if number:
                yield b","
            head_object = self._choice(choice.index, choice.output, choice.echo)
            yield json_bytes(head_object)[:-1] + b',"logprobs":'
            yield from self._logprobs_pieces(choice.logprobs, choice.offsets(self.names))
            if not self.chat:
                yield from self._prompt_pieces(choice)
            yield b"}"
        yield b"]}"

    def _prompt_pieces(self, choice: Choice) -> Iterator[bytes]:
        """Yield vLLM's fields `prompt_token_ids` and `prompt_logprobs`, null unless requested."""
        entries = choice.prompt
        yield b',"prompt_token_ids":' + json_bytes(choice.prompt_token_ids)
        if entries is None:
            yield b',"prompt_logprobs":null'
            return
        yield b',"prompt_logprobs":['
        step = tokens_per_chunk(entries)
        for start in range(0, len(entries), step):
            block = entries[start : start + step]
            text = json_bytes(prompt_entries(block, self.num_prompt_logprobs, self.names))
            yield (b"," if start else b"") + text[1:-1]
        yield b"]"

    def _logprobs_pieces(
        self, entries: Sequence[TokenLogprobs] | None, offsets: TextOffsets
    ) -> Iterator[bytes]:
        """Yield `_logprobs` as JSON, encoded a few tokens at a time and joined by column."""
        if entries is None:
            yield b"null"
            return
        columns: dict[str, list[bytes]] = {}
        step = tokens_per_chunk(entries)
        for start in range(0, max(1, len(entries)), step):
            block = self._logprobs(entries[start : start + step], offsets)
            for name, column in block.items():
                columns.setdefault(name, []).append(json_bytes(column))
        for number, (name, blocks) in enumerate(columns.items()):
            yield (b"," if number else b"{") + json_bytes(name) + b":"
            if not blocks[0].startswith(b"["):  # not a list: the same in each
                yield blocks[0]
                continue
            for position, text in enumerate(blocks):
                yield (b"," if position else b"[") + text[1:-1]
            yield b"]"
        yield b"}"

    def _choice(self, index: int, output: CompletionOutput, echo: str) -> dict[str, Any]:
        """Return a choice without its logprobs."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.chat:
            answer = self.new_reader(index).read(output.text)
            answer.content = echo + answer.content
            choice["message"] = message_object(answer, self.uses_functions)
            choice["finish_reason"] = self.finish_reason(
                output.finish_reason, bool(answer.tool_calls)
            )
        else:
            choice["text"] = echo + output.text
        if self.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        if not has_calls or reason != "stop":
            return reason
        return "function_call" if self.uses_functions else "tool_calls"

    def chunk(
        self,
        index: int,
        text: str,
        *,
        delta: dict[str, Any] | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
        offsets: TextOffsets | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        """Return a chunk with the new `delta` (chat) or `text` (completion)."""
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(logprobs, offsets),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if self.chat:
            choice["delta"] = delta or {}
        else:
            choice["text"] = text
        if self.token_ids and token_ids is not None:
            choice["token_ids"] = token_ids
        chunk = {**self._head(True), "choices": [choice]}
        if finish_reason is not None and self.context_truncated is not None:
            chunk["context_truncated"] = self.context_truncated
        return chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(True), "choices": [], "usage": usage_object(usage)}
