"""`Tokenizer`: converts text and chats to token ids and back, with the `tokenizers` library.

Control tokens such as <|im_start|> or end-of-text come only from the chat template and from
`add_special_tokens`, never from user text. Their names in user text are encoded as ordinary
characters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import tokenizers

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.validation import invalid_count, invalid_value
from llaisys.tokenization.build import (
    as_load_error,
    from_directory,
    from_vocabulary,
    without_special_tokens,
)
from llaisys.tokenization.chat_template import ChatTemplate, plain_data
from llaisys.tokenization.control_tokens import ControlTokens, Span, mark_strings
from llaisys.tokenization.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from llaisys.tokenization.expansion import check_expansion
from llaisys.tokenization.pair import JUDGE_PREFIX, JUDGE_SUFFIX, PairAffixes
from llaisys.tokenization.settings import TokenizerSettings, read_settings
from llaisys.tokenization.source import TokenizerSource
from llaisys.tokenization.token_text import LazyTokenBytes, token_text
from llaisys.tokenization.unicode_text import clean_text

MAX_TEXT_CHARS = 64 * 1024 * 1024
UNKNOWN_WORD = "\U00013080"  # a hieroglyph, in no vocabulary except as bytes
SHORT_TEXT = 2048  # characters; encoding them is faster than waking other threads

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def _clean(data: Any) -> Any:
    if isinstance(data, str):
        return clean_text(data)
    if isinstance(data, dict):
        return {clean_text(key): _clean(value) for key, value in data.items()}
    return [_clean(item) for item in data] if isinstance(data, list) else data


HARMONY_ENDS = ("<|return|>", "<|call|>")  # end an answer of gpt-oss


class Tokenizer:
    """Immutable and thread-safe."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        eos_token_ids: Iterable[int] = (),
        max_text_chars: int = MAX_TEXT_CHARS,
    ) -> None:
        """Takes ownership of `tokenizer`. `eos_token_ids`: in addition to the tokenizer's
        eos_token."""
        check_expansion(tokenizer)
        self._full = tokenizer
        self._settings = settings
        self._max_text_chars = max_text_chars
        self._templates: dict[str, ChatTemplate | ModelLoadError] = {}
        for name, source in settings.chat_templates.items():
            self._templates[name] = _compile(source)
        added = tokenizer.get_added_tokens_decoder()
        literal = "\0".join(
            t.literal_text for t in self._templates.values() if isinstance(t, ChatTemplate)
        )
        in_template = {token.content for token in added.values() if token.content in literal}
        names = {token.content for token in added.values() if token.special} | in_template
        self._control = ControlTokens(names, in_template)
        self._added = {t.content: (i, t) for i, t in added.items() if t.content in names}
        self._control_ids = frozenset(i for i, _ in self._added.values())
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._plain = without_special_tokens(tokenizer, frozenset(names))
        # The token of unknown words may be a control token (BERT).
        unknown = {tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")}
        unknown.update(self._plain.encode(UNKNOWN_WORD, add_special_tokens=False).ids)
        self._forbidden_ids = self._control_ids - unknown
        self._prefix, self._suffix = self._find_affixes()
        self._pair = PairAffixes.of(tokenizer)
        self._size = max(tokenizer.get_vocab_size(), max(added, default=-1) + 1)
        own_eos = tokenizer.token_to_id(settings.special_tokens.get("eos_token", ""))
        merged = [*eos_token_ids, *([] if own_eos is None else [own_eos])]
        ends = [tokenizer.token_to_id(word) for word in HARMONY_ENDS]
        if None not in ends:  # metadata of GGUF files names only one of them
            merged += [token for token in ends if token is not None]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(merged))
        self._text = token_text(tokenizer.decoder)
        if self._text is not None:
            self._token_bytes = LazyTokenBytes(tokenizer.id_to_token, self._text.to_bytes)

    @classmethod
    def from_source(cls, source: TokenizerSource, chat_template: str | None = None) -> Self:
        """Raises `ModelLoadError` when the source has no tokenizer or a damaged one.
        `chat_template`: replaces all templates of the source."""
        if source.directory is not None:
            directory = Path(source.directory)
            settings = read_settings(directory)
            built = from_directory(directory, settings.raw)
        elif source.vocabulary is not None:
            special_ids = dict(source.special_ids)
            built = from_vocabulary(source.vocabulary, special_ids)
            settings = TokenizerSettings(
                chat_templates={"default": source.chat_template} if source.chat_template else {},
                special_tokens={
                    name: source.vocabulary.tokens[i] for name, i in special_ids.items()
                },
                raw={},
            )
        else:
            raise ModelLoadError(f"no tokenizer: {source.missing}")
        if chat_template is not None:
            ChatTemplate(chat_template)  # raises now, not at the first chat
            settings = replace(settings, chat_templates={"default": chat_template})
        return as_load_error("tokenizer", lambda: cls(built, settings, source.eos_token_ids))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        return cls.from_source(TokenizerSource(directory=str(directory)))

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one (a model's embedding may have more rows)."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` omits."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the default template."""
        return self._settings.chat_templates.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """'bos_token' -> '<s>', ..."""
        return dict(self._settings.special_tokens)

    def template_info(self) -> ChatTemplate | None:
        """The chat template, preferably the one for tools; None without a valid one."""
        for name in ("tool_use", "default"):
            template = self._templates.get(name)
            if isinstance(template, ChatTemplate):
                return template
        return None

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor adds before and after a text."""
        bare = self._full.encode("a", add_special_tokens=False).ids
        whole = self._full.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        raise ModelLoadError("tokenizer: the post-processor changes the tokens of the text")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control token names in it are ordinary text.

        `add_special_tokens` adds the model's prefix and suffix (such as BOS).
        """
        if not isinstance(text, str):
            raise invalid_value("text", text, "a string")
        ids = self._encode_plain(clean_text(self._bounded(text, "text")))
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def join_pair(
        self, first: Sequence[int], second: Sequence[int]
    ) -> tuple[list[int], int | None]:
        """Ids of two texts encoded without special tokens, as one input of a cross-encoder; and the
        index of the first token of the second type, or None when all have one type."""
        return self._pair.join(first, second)

    def judge_prompt(self, text: Sequence[int]) -> list[int]:
        """Ids of a `judge_text` as the prompt of Qwen3-Reranker."""
        prefix, suffix = (_run(self._full, part) for part in (JUDGE_PREFIX, JUDGE_SUFFIX))
        return [*prefix, *text, *suffix]

    def _bounded(self, text: str, what: str) -> str:
        if len(text) > self._max_text_chars:
            raise invalid_count(what, len(text), "characters", f"at most {self._max_text_chars}")
        return text

    def _encode_plain(self, text: str) -> list[int]:
        ids = _run(self._plain, text)
        if not self._forbidden_ids.isdisjoint(ids):
            token_id = next(i for i in ids if i in self._forbidden_ids)
            raise InvalidInputError(
                f"text: cannot be encoded without control token "
                f"{self._full.id_to_token(token_id)!r}",
                field="text", limit="a text that needs no control token",
            )  # fmt: skip
        return ids

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat, for users. The engine uses `encode_chat`."""
        data = self._chat_data(messages, tools, variables)
        return self._render(data, add_generation_prompt, datetime.now())

    def encode_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat: `messages` are {'role', 'content', ...}; `variables`: template variables.

        Control tokens come from the template only. Raises `InvalidInputError` when the template
        rejects the messages, or alters text so that this cannot be guaranteed.
        """
        data = self._chat_data(messages, tools, variables)
        now = datetime.now()
        text = self._render(data, add_generation_prompt, now)
        for marking in self._control.markings(data):
            try:
                marked = self._render(mark_strings(data, marking.apply), add_generation_prompt, now)
            except InvalidInputError:
                continue
            read, spans = marking.read(marked)
            if read == text:
                return self._encode_rendered(text, spans)
        raise InvalidInputError(
            "messages: the chat template alters text that resembles control tokens",
            field="messages",
        )

    def _chat_data(
        self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if not isinstance(messages, (list, tuple)):
            raise invalid_value("messages", messages, "a list of objects")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise invalid_value(f"messages[{number}]", message, "an object with a role")
        data = plain_data({"messages": list(messages), "tools": list(tools or ())})
        data["variables"] = plain_data(dict(variables or {}))
        return dict(_clean(data))

    def _render(self, data: dict[str, Any], add_generation_prompt: bool, now: datetime) -> str:
        tools = data["tools"]
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidInputError("messages: the model has no chat template", field="messages")
        if isinstance(template, ModelLoadError):
            raise InvalidInputError(
                f"messages: unusable chat template: {template}", field="messages"
            )
        text = template.render(
            data["messages"],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self._settings.special_tokens, **data["variables"]},
            now=now,
        )
        return self._bounded(clean_text(text), "messages")

    def _encode_rendered(self, text: str, spans: list[Span]) -> list[int]:
        """Ids of `text` in which exactly `spans` are control tokens."""
        expected = [self._added[text[start:end]][0] for start, end in spans]
        if self._control.find(text) == spans:
            whole = _run(self._full, text)
            if [i for i in whole if i in self._control_ids] == expected:
                return whole
        ids: list[int] = []
        position, strip_left = 0, False
        for (start, end), token_id in zip(spans, expected, strict=True):
            token = self._added[text[start:end]][1]
            segment = text[position:start]
            segment = segment.lstrip() if strip_left else segment
            ids += self._encode_plain(segment.rstrip() if token.lstrip else segment)
            ids.append(token_id)
            position, strip_left = end, token.rstrip
        rest = text[position:]
        return ids + self._encode_plain(rest.lstrip() if strip_left else rest)

    def _checked(self, token_ids: Iterable[int]) -> list[int]:
        ids = list(token_ids)
        for token_id in ids:
            if not 0 <= token_id < 1 << 32:
                limit = f"from 0 to {self._size - 1}"
                raise invalid_value("token_ids", token_id, limit, label="a token id")
        return ids

    def decode_tokens(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; an id without a token (embedding padding) has no text."""
        ids = self._checked(token_ids)
        if self._text is None:
            return str(self._full.decode(ids, skip_special_tokens=skip_special_tokens))
        stream = self.detokenizer(skip_special_tokens)
        text = stream.add_all(ids) + stream.finish()
        return text.removeprefix(" ") if self._text.drop_first_space else text

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary entry of a token id, or None."""
        if not 0 <= token_id < self._size:
            return None
        return self._full.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which need not be whole characters; for a special token those of
        its name, for an id without a token none."""
        if not 0 <= token_id < self._size:
            return b""
        if token_id not in self._added_ids and self._text is not None:
            return self._token_bytes[token_id]
        return self.decode_tokens([token_id], skip_special_tokens=False).encode()

    def vocabulary_bytes(self, size: int) -> list[bytes]:
        """`token_bytes` of the ids below `size`; raises ModelLoadError when the text of a token
        depends on adjacent tokens."""
        if self._text is None:
            raise ModelLoadError(
                "the text of this tokenizer's tokens depends on adjacent tokens (its decoder is "
                f"{type(self._full.decoder).__name__})"
            )
        return [self.token_bytes(token_id) for token_id in range(size)]

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._full.token_to_id(clean_text(text))

    def detokenizer(
        self, skip_special_tokens: bool = True, visible_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A new incremental detokenizer for one sequence. It keeps the space that begins a
        SentencePiece text. `visible_ids`: special tokens that are never skipped."""
        skipped = self._special_ids - visible_ids if skip_special_tokens else frozenset()
        if self._text is not None:
            return ByteDetokenizer(self._token_bytes, skipped)
        if not visible_ids:
            return WindowDetokenizer(lambda ids: self.decode_tokens(ids, skip_special_tokens))
        return WindowDetokenizer(
            lambda ids: self.decode_tokens([i for i in ids if i not in skipped], False)
        )


def _run(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of `text` without special tokens; InvalidInputError when the tokenizer fails."""
    try:
        if len(text) <= SHORT_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        # encode() holds the GIL; encode_batch() releases it.
        return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)
    except Exception as error:
        raise InvalidInputError(
            f"text: the tokenizer fails on it: {str(error)[:200]}",
            field="text", limit="a text that the tokenizer can express",
        ) from error  # fmt: skip


def _compile(source: str) -> ChatTemplate | ModelLoadError:
    """Compile a template; an error is returned and raised by the first chat."""
    try:
        return ChatTemplate(source)
    except ModelLoadError as error:
        return error
