"""Turns user input into requests: chat template, tokenization, checks of the model's limits."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.lora import check_lora_name
from llaisys.common.request import Request
from llaisys.common.sampling import (
    ALL_LOGPROBS,
    BAN,
    BIAS_KEY,
    DRY_BREAKERS,
    POOLINGS,
    SCORE,
    SamplingParams,
    sampling_defaults,
)
from llaisys.common.types import ModelInfo
from llaisys.common.validation import (
    MAX_INT,
    check_count,
    check_int,
    check_prompt_ids,
    check_text,
    check_token_ids,
    invalid_count,
    invalid_value,
)

Messages = Sequence[Mapping[str, Any]]
MAX_SALT_CHARS = 1024
SEED_BITS = 53  # of a random seed; JSON numbers of all clients represent it
REASONING_MARKERS = ("<think>", "</think>")  # default; the chat template may have others
MAX_BREAKERS = 256  # texts of dry_sequence_breakers whose tokens are cached
MAX_BAD_WORD_TOKENS = 16_384  # of all words, each at the start of a text and after a space


@dataclass(slots=True)
class ProcessedInput:
    """A prompt and its requests, one per choice."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    requests: list[Request]


def open_tokenizer(info: ModelInfo, given: Any = None, chat_template: str | None = None) -> Any:
    """Return `given` or the model's tokenizer; None when there is none. `chat_template` replaces
    the model's template."""
    source = info.tokenizer_source
    has_own = source is not None and not (source.directory is None and source.vocabulary is None)
    if given is not None or not has_own:
        if chat_template is not None:
            raise InvalidInputError(
                "chat_template needs the model's own tokenizer", field="chat_template"
            )
        return given
    from llaisys.tokenization import Tokenizer

    return Tokenizer.from_source(source, chat_template)


@contextmanager
def vocabulary_errors(size: int) -> Iterator[None]:
    """Add to errors of token ids that the id is out of vocabulary."""
    try:
        yield
    except InvalidInputError as error:
        if type(error.value) is not int or error.value < size:
            raise
        text = f"{error}; larger ids are out of vocabulary ({size} tokens)"
        raise InvalidInputError(
            text, field=error.field, value=error.value, limit=error.limit
        ) from None


class InputProcessor:
    """Its state is the seed generator, the request id counter and the last bad words. `process` may
    run in any thread."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Any = None,
        seed: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        default_seed: int | None = None,
    ) -> None:
        """`seed`: of the generator of random seeds. `defaults`: of sampling fields; None: those of
        the model. `default_seed`: of requests without a seed; None: a random one for each."""
        self.reasoning_markers = REASONING_MARKERS
        self.info = info
        self._has_own_vocabulary = info.tokenizer_source is not None
        self.defaults = info.generation_defaults if defaults is None else defaults
        self.tokenizer = tokenizer
        own = tuple(tokenizer.eos_token_ids) if tokenizer is not None else ()
        # A tokenizer may have tokens beyond the model's vocabulary.
        ends = (*info.eos_token_ids, *own)
        self.eos_token_ids = frozenset(i for i in ends if i < info.vocab_size)
        self._random = random.Random(seed)
        self._default_seed = default_seed
        self._next_id = 0
        self._last_bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())
        self._breakers: dict[str, tuple[tuple[int, ...], ...]] = {}  # encoded, MAX_BREAKERS at most

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        """Return the token ids of a chat, including the generation prompt."""
        if isinstance(messages, (str, Mapping)) or not messages:
            raise invalid_value("messages", messages, "a list of {'role', 'content'}, not empty")
        tokenizer = self._require_tokenizer("chat", "messages")
        normalized = [normalize_message(message, i) for i, message in enumerate(messages)]
        return tokenizer.encode_chat(normalized, **options)

    def encode(self, text: str) -> list[int]:
        return self._require_tokenizer("a text prompt", "prompt").encode(text)

    def process(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> ProcessedInput:
        """Validate a prompt and its parameters and return its requests."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        if not token_ids:
            raise invalid_count("prompt", 0, "tokens", "at least 1")
        if params is not None and not isinstance(params, SamplingParams):
            raise invalid_value("sampling_params", params, "SamplingParams")
        defaults = self.defaults if params is not None else sampling_defaults(self.defaults)
        sampling = (params or SamplingParams()).with_defaults(defaults)
        sampling = self._count_logprobs(sampling)
        self._check_params(sampling)
        salt = cache_salt or ""
        if not isinstance(salt, str):
            raise invalid_value("cache_salt", salt, "a string")
        check_count("cache_salt", len(salt), MAX_SALT_CHARS, "characters")
        if lora is not None:
            check_lora_name(lora, "lora")
        if request_id is None:
            request_id = f"req-{self._next_id}"
            self._next_id += 1
        else:
            check_text("request_id", request_id)
        seed = self._default_seed if sampling.seed is None else sampling.seed
        seed = self._random.getrandbits(SEED_BITS) if seed is None else seed
        stops = frozenset(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stops |= self.eos_token_ids
        bad_words = self._encode_bad_words(tuple(sampling.bad_words or ()))
        breakers = self._encode_breakers(sampling) if sampling.dry_multiplier else ()
        thinking = () if sampling.thinking_budget is None else self._thinking_tokens()
        constrain_after = -1
        if sampling.structured_outputs is not None:
            self._check_structured()
            constrain_after = self._open_reasoning(token_ids)
        _check_allowed_tokens(sampling, stops, bad_words, self.info.vocab_size)
        now = time.monotonic()
        requests = [
            Request(
                request_id=request_id if sampling.n == 1 else f"{request_id}#{choice}",
                prompt_token_ids=token_ids,
                sampling=sampling,
                seed=seed,
                group=request_id,
                choice=choice,
                stop_token_ids=stops,
                bad_words=bad_words,
                dry_breakers=breakers,
                thinking=thinking,
                constrain_after=constrain_after,
                cache_salt=salt,
                lora=lora or "",
                arrival_time=now,
            )
            for choice in range(sampling.n)
        ]
        return ProcessedInput(request_id, text, sampling, requests)

    def _require_tokenizer(self, what: str, field: str) -> Any:
        if self.tokenizer is None:
            raise InvalidInputError(f"{what} needs a tokenizer; this model has none", field=field)
        return self.tokenizer

    def _check_ids(self, prompt: Sequence[int]) -> list[int]:
        with vocabulary_errors(self.info.vocab_size):
            return check_prompt_ids("prompt", prompt, self.info.vocab_size - 1)

    def check_generates(self) -> None:
        """Raise InvalidInputError for a model that generates no text."""
        if self.info.is_encoder:
            raise InvalidInputError(
                f"model: {self.info.model_type} is an encoder, which generates no text; use the "
                f"{'score and rerank' if self.info.scores_pairs else 'embedding'} calls",
                field="model",
            )

    def _count_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Replace -1, which requests all logprobs, by their number."""
        size, counts = self.info.vocab_size, {}
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            check_int(name, 0 if count is None else count, ALL_LOGPROBS, size)
            if count == ALL_LOGPROBS:
                counts[name] = size
        return params.clone(**counts) if counts else params

    def _check_params(self, params: SamplingParams) -> None:
        if params.pooling is None:
            self.check_generates()
        if params.pooling is not None and (params.pooling == SCORE) != self.info.scores_pairs:
            is_reranker = self.info.scores_pairs
            limit = f"{SCORE}: a reranker has no embeddings" if is_reranker else "/".join(POOLINGS)
            raise invalid_value("pooling", params.pooling, limit)
        last = self.info.vocab_size - 1
        with vocabulary_errors(self.info.vocab_size):
            for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
                check_token_ids(name, getattr(params, name) or (), MAX_INT, last)
            for token_id in params.logit_bias or ():
                check_int("logit_bias", token_id, 0, last, label=BIAS_KEY)
        if params.stop or params.bad_words:
            self._require_tokenizer("stop strings and bad_words", "stop")
        if params.structured_outputs is not None:
            self._require_tokenizer("structured_outputs", "structured_outputs")

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each word, at the start of a text and after a space."""
        known, found = self._last_bad_words
        if words == known:  # the prompts of one request
            return found
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (word, bare, f" {bare}"):
                if text:
                    ids = self.tokenizer.encode(text, add_special_tokens=False)
                    sequences[tuple(ids)] = None
        found = tuple(ids for ids in sequences if ids)
        check_count("bad_words", sum(map(len, found)), MAX_BAD_WORD_TOKENS, "tokens")
        self._last_bad_words = (words, found)
        return found

    def _encode_breakers(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the sequence breakers of DRY: the tokens that contain one, and the tokens of each
        text."""
        given = params.dry_sequence_breakers
        found: dict[tuple[int, ...], None] = {}
        for text in DRY_BREAKERS if given is None else given:
            if text not in self._breakers:
                name = "dry_sequence_breakers"
                tokenizer = self._require_tokenizer(name, name)
                raw = text.encode()
                tokens = range(min(tokenizer.vocab_size, self.info.vocab_size))
                whole = [(token,) for token in tokens if raw in tokenizer.token_bytes(token)]
                spelled = tuple(tokenizer.encode(text, add_special_tokens=False))
                if len(self._breakers) >= MAX_BREAKERS:
                    self._breakers.clear()
                self._breakers[text] = (*whole, *([spelled] if len(spelled) > 1 else ()))
            found |= dict.fromkeys(self._breakers[text])
        return tuple(found)

    def _check_structured(self) -> None:
        """Grammar processes read the vocabulary of the model: another tokenizer cannot be used."""
        if not self._has_own_vocabulary:
            raise InvalidInputError(
                "structured_outputs needs a model with its own tokenizer; this one has none",
                field="structured_outputs",
            )

    def _open_reasoning(self, prompt: list[int]) -> int:
        """Return the end marker of reasoning that the prompt has opened, or -1."""
        start, end = (self.tokenizer.token_id(mark) for mark in self.reasoning_markers)
        if start not in prompt or end is None or end >= self.info.vocab_size:
            return -1
        reverse = prompt[::-1]
        return -1 if end in reverse[: reverse.index(start)] else int(end)

    @property
    def limits_reasoning(self) -> bool:
        """Whether thinking_budget is supported: the end marker of reasoning is one token."""
        end = None if self.tokenizer is None else self.tokenizer.token_id(self.reasoning_markers[1])
        return end is not None and end < self.info.vocab_size

    def _thinking_tokens(self) -> tuple[int, ...]:
        """Return the start marker of reasoning (-1: none), the end marker, and the line breaks that
        follow."""
        tokenizer = self._require_tokenizer("thinking_budget", "thinking_budget")
        start, end = (tokenizer.token_id(mark) for mark in self.reasoning_markers)
        if not self.limits_reasoning:
            raise InvalidInputError(
                f"thinking_budget needs a model that reasons; this one has no token for "
                f"{self.reasoning_markers[1]}",
                field="thinking_budget",
            )
        after: list[int] = tokenizer.encode("\n\n", add_special_tokens=False)
        return (-1 if start is None else start, end, *after)


def normalize_message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with text content for templates. Text parts are joined by line breaks;
    missing content of an assistant becomes "", or None with tool calls. `number`: index in errors.
    """
    if not isinstance(message, Mapping):
        raise invalid_value(f"messages[{number}]", message, "{'role', 'content'}")
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        if message.get("tool_calls"):
            return {**message, "content": None}
        content = ""
    elif isinstance(content, (list, tuple)) and all(map(_is_text_part, content)):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        kinds = {type(None): "missing", list: "a list with more than text in it"}
        found = kinds.get(type(content), f"of type {type(content).__name__}")
        field = f"messages[{number}].content"
        raise InvalidInputError(f"{field} is {found}; it must be text", field=field, limit="text")
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _check_allowed_tokens(
    params: SamplingParams,
    stops: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
) -> None:
    """InvalidInputError when bias, bad words and min_tokens ban every allowed token."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    banned |= {token for token, bias in params.bias_items if bias == BAN}
    if params.min_tokens:
        banned |= stops
    if len(banned) >= vocab_size:
        raise InvalidInputError(
            f"logit_bias, bad_words and min_tokens ban each of the {vocab_size} tokens",
            field="logit_bias",
        )
    if params.allowed_token_ids is None:
        return
    if banned.issuperset(params.allowed_token_ids):
        raise InvalidInputError(
            f"allowed_token_ids has {len(params.allowed_token_ids)} ids; bad_words and "
            f"min_tokens {params.min_tokens} (no stop token before) and logit_bias ban "
            "every one of them",
            field="allowed_token_ids",
        )
