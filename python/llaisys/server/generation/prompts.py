"""Convert texts and chats to token ids within the prompt limit; long ones in a thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from llaisys.chat.tools import ToolSet
from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED, InvalidInputError
from llaisys.common.validation import check_count, invalid_count, invalid_value
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError
from llaisys.server.generation.history import Recent
from llaisys.server.generation.service import Service
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.schemas.chat import ChatMessage, plain_messages

Messages = Sequence[dict[str, Any]]
P = ParamSpec("P")
T = TypeVar("T")

# An upper bound of the mean token length of any vocabulary: a longer text cannot fit.
CHARS_PER_TOKEN = 64

# A long text is first tokenised and counted in windows: 2 million characters may be as many tokens
# as fit the context, or 30 times as many with a gigabyte of tokenizer state.
WINDOW_CHARS = 64 << 10
WINDOW_SLACK = 16  # tokens that splitting at window boundaries may add
MAX_VARIABLE_BYTES = 16 << 10  # of chat_template_kwargs
MESSAGE_CHARS = 64  # rendering cost of a message, in characters
INLINE_MESSAGES = 256  # messages that work on the event loop may have


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Length limit of a prompt; `name` is its field in error messages."""

    name: str
    max_model_len: int
    max_tokens: int

    def check_chars(self, chars: int) -> None:
        """Reject a text that cannot fit the context before it is tokenised."""
        most = CHARS_PER_TOKEN * self.max_model_len
        if chars > most:
            raise self._too_long(chars, "characters", most)

    def check_tokens(self, count: int) -> None:
        """Raise ApiError with count and limit, also as fields of the error object."""
        if count > self.max_tokens:
            error = self._too_long(count, "tokens", self.max_tokens)
            numbers = {"n_prompt_tokens": count, "n_ctx": self.max_model_len}
            raise ApiError(400, str(error), param=error.field, code=error.code, details=numbers)

    def _too_long(self, count: int, unit: str, most: int) -> InvalidInputError:
        """Clients recognise the error by "maximum context length is"."""
        length = f"this model's maximum context length is {self.max_model_len} tokens"
        limit = f"at most {most}: {length}"
        return invalid_count(self.name, count, unit, limit, code=CONTEXT_LENGTH_EXCEEDED)

    def check_text(self, tokenizer: Any, text: str) -> None:
        """Raise ApiError as soon as the counted windows exceed the limit."""
        if len(text) <= WINDOW_CHARS:
            return
        count = 0
        for start in range(0, len(text), WINDOW_CHARS):
            window = tokenizer.encode(text[start : start + WINDOW_CHARS], False)
            count += max(0, len(window) - WINDOW_SLACK)
            self.check_tokens(count)


def has_text(pieces: list[Any]) -> bool:
    """Whether a list has strings among its token ids. Fast for long lists."""
    return str in map(type, pieces)


async def encode_prompts(
    engine: AsyncLLMEngine,
    prompts: Sequence[str | Sequence[int | str]],
    add_special_tokens: bool,
    limit: PromptLimit,
) -> list[list[int]]:
    """Return the token ids of each prompt: a string, or a list of token ids and strings. Raises
    ApiError at the first one that is too long."""
    size = 0
    listed: list[list[Any]] = [[p] if isinstance(p, str) else list(p) for p in prompts]
    for pieces in listed:
        texts = [piece for piece in pieces if isinstance(piece, str)] if has_text(pieces) else []
        limit.check_tokens(len(pieces) - len(texts))
        if texts:
            chars = sum(map(len, texts))
            limit.check_chars(chars)
            size += chars + MESSAGE_CHARS * len(texts)
    tokenizer: Any = engine.require_tokenizer() if size else None

    def encode() -> list[list[int]]:
        found: list[list[int]] = []
        for pieces in listed:
            if not has_text(pieces):
                found.append(pieces)
                continue
            ids: list[int] = []
            for index, piece in enumerate(pieces):
                if isinstance(piece, str):
                    limit.check_text(tokenizer, piece)
                    ids += tokenizer.encode(piece, add_special_tokens and not index)
                    limit.check_tokens(len(ids))
                else:
                    ids.append(piece)
            limit.check_tokens(len(ids))
            found.append(ids)
        return found

    return await engine.texts.run(size, encode)


async def _render(
    engine: AsyncLLMEngine, options: dict[str, Any], size: int, work: Callable[[dict[str, Any]], T]
) -> T:
    """Run `work`, which renders the model's template, with the options of the request and the
    server's defaults of template variables."""
    variables = options.get("variables")
    given = {**options, "variables": template_variables(engine, variables)}
    return await engine.texts.render(size, bool(variables), lambda: work(given))


def _chat_chars(messages: Messages, limit: PromptLimit, tools: ToolSet | None) -> int:
    chars = sum(map(message_chars, messages)) + (0 if tools is None else tools.num_chars)
    limit.check_chars(chars)
    return chars


async def encode_messages(
    engine: AsyncLLMEngine,
    messages: Messages,
    limit: PromptLimit,
    tools: ToolSet | None = None,
    **options: Any,
) -> list[int]:
    """Return the token ids of a chat rendered by the model's template, with its tools."""
    inputs, tokenizer = engine.inputs, engine.require_tokenizer()
    chars = _chat_chars(messages, limit, tools)

    def encode(options: dict[str, Any]) -> list[int]:
        if chars > WINDOW_CHARS:
            texts = (message.get("content") or "" for message in messages)
            limit.check_text(tokenizer, "\n".join(texts))
        prepared, listed = engine.style.prepare(messages, tools)
        return inputs.encode_chat(prepared, tools=listed, **options)

    ids = await _render(engine, options, chars + MESSAGE_CHARS * len(messages), encode)
    limit.check_tokens(len(ids))
    return ids


async def render_messages(
    engine: AsyncLLMEngine,
    messages: Messages,
    limit: PromptLimit,
    tools: ToolSet | None = None,
    **options: Any,
) -> str:
    """Return the text of a chat rendered by the model's template, with its tools."""
    tokenizer = engine.require_tokenizer()
    chars = _chat_chars(messages, limit, tools)

    def render(options: dict[str, Any]) -> str:
        prepared, listed = engine.style.prepare(messages, tools)
        return str(tokenizer.render_chat(prepared, tools=listed, **options))

    return await _render(engine, options, chars + MESSAGE_CHARS * len(messages), render)


async def encode_continued(
    engine: AsyncLLMEngine, messages: Messages, limit: PromptLimit, **options: Any
) -> list[int]:
    """Return the token ids of a chat that end with the text of its last message, which the answer
    continues."""
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise invalid_value(
            f"{limit.name}[{len(messages) - 1}].role",
            messages[-1]["role"],
            "'assistant' when continue_final_message is true",
        )
    opened = {**options, "add_generation_prompt": True}  # opens the assistant turn of the text
    start = await encode_messages(engine, messages[:-1], limit, **opened)
    (end,) = await encode_prompts(engine, [messages[-1]["content"]], False, limit)
    limit.check_tokens(len(start) + len(end))
    return start + end


def message_chars(message: dict[str, Any]) -> int:
    """Return the length of a message's text that a template may render."""
    chars = len(message.get("content") or "") + len(message.get("reasoning_content") or "")
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        chars += len(arguments if isinstance(arguments, str) else json_bytes(arguments))
        chars += MESSAGE_CHARS
    return chars


async def encode_recent(
    engine: AsyncLLMEngine,
    recent: Recent,
    limit: PromptLimit,
    tools: ToolSet | None = None,
    **options: Any,
) -> tuple[list[int], int]:
    """Return (token ids, dropped messages) of a conversation whose oldest turns may be dropped.
    Raises ApiError when the newest messages alone are too long."""
    inputs, tokenizer = engine.inputs, engine.require_tokenizer()
    longest = limit.max_model_len * CHARS_PER_TOKEN

    def count(text: str) -> int:
        """Count tokens; for a text that cannot fit, an upper bound without tokenising it."""
        return len(text) if len(text) > longest else len(tokenizer.encode(text, False))

    def render(options: dict[str, Any]) -> tuple[list[int], int]:
        def encode(messages: Messages) -> list[int]:
            prepared, listed = engine.style.prepare(messages, tools)
            return inputs.encode_chat(prepared, tools=listed, **options)

        return recent.render(encode, count)

    recent.check_size(limit.check_chars)
    size = MESSAGE_CHARS * len(recent.messages)
    if size <= INLINE_CHARS:
        size += sum(map(message_chars, recent.messages))
    ids, dropped = await _render(engine, options, size, render)
    limit.check_tokens(len(ids))
    return ids, dropped


def template_variables(
    engine: AsyncLLMEngine, given: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the template variables of a request and the server's defaults. Raises ApiError when
    those of the request are too large."""
    defaults = engine.config.default_chat_template_kwargs or {}
    if not given:
        return dict(defaults) or None
    size = len(json_bytes(given))
    if size > MAX_VARIABLE_BYTES:
        raise ApiError(
            400,
            f"chat_template_kwargs has {size} bytes; at most {MAX_VARIABLE_BYTES} are allowed",
            param="chat_template_kwargs",
        )
    return {**defaults, **given}


async def decode(engine: AsyncLLMEngine, ids: Sequence[int], skip_special: bool = False) -> str:
    tokenizer = engine.require_tokenizer()
    return str(await engine.texts.run(len(ids), tokenizer.decode_tokens, ids, skip_special))


async def token_names(engine: AsyncLLMEngine, ids: Sequence[int]) -> list[str]:
    return await _of_each(engine, ids, TokenNames(engine.tokenizer).text)


async def token_pieces(engine: AsyncLLMEngine, ids: Sequence[int]) -> list[str | list[int]]:
    """Return the text of each token, or its bytes if they are not valid UTF-8."""
    tokenizer = engine.require_tokenizer()

    def piece(token: int) -> str | list[int]:
        raw: bytes = tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    return await _of_each(engine, ids, piece)


async def _of_each(engine: AsyncLLMEngine, ids: Sequence[int], show: Callable[[int], T]) -> list[T]:
    def show_all() -> list[T]:
        known = {token: show(token) for token in set(ids)}
        return [known[token] for token in ids]

    return await engine.texts.run(len(ids), show_all)


async def run_on_messages(
    service: Service, count: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run work on `count` messages: many in a thread. A session may have any number."""
    if count <= INLINE_MESSAGES:
        return work(*args, **kwargs)
    return await service.body_pool.run(work, *args, **kwargs)


async def convert_messages(
    service: Service, messages: Sequence[ChatMessage], name: str | None = "messages"
) -> list[dict[str, Any]]:
    """Return `plain_messages`. Raises InvalidInputError for field `name` when there are too many;
    None: any number."""
    if name is not None:
        check_count(name, len(messages), service.config.limits.max_messages, "messages")
    return await run_on_messages(service, len(messages), plain_messages, messages)
