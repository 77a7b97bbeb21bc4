"""How a request's tokens are drawn: the parameters and the order of the sampler chain.

`SamplingParams` is validated once, when it is made, and never changes. Nothing here touches logits:
the chain runs in the native sampler, the worker turns these fields into its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llaisys.common.validation import (
    check_bool,
    check_choice,
    check_count,
    check_float,
    check_int,
    check_strings,
    check_token_ids,
    refuse,
    refuse_count,
)

# The links of the chain, in their default order. The mask (allowed_token_ids) and the bias
# (logit_bias, bad_words, min_tokens) come before the chain, whatever its order.
DEFAULT_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_TEMPERATURE = 100.0
MAX_TOKENS = 1 << 31
MAX_TOP_K = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
BIAS_KEY = "a token id of logit_bias"  # what errors call it
MIN_FLOAT = 2.0**-126  # the sampler computes in f32: what is smaller would become 0 there


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop. None means "the model's default" for the five fields
    that a generation_config.json may set (see `with_defaults`), else "not used".

    temperature 0 is greedy; the default, 1, samples. Without a seed each request gets a random one.
    """

    n: int = 1  # choices per prompt
    temperature: float | None = None  # [0, 100]; neutral 1
    top_p: float | None = None  # (0, 1]; neutral 1
    top_k: int | None = None  # 0 or -1: all; neutral 0
    min_p: float | None = None  # [0, 1]; neutral 0
    repetition_penalty: float | None = None  # (0, 100]; neutral 1
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: Mapping[int, float] | None = None  # token id -> [-100, 100], added to the logit
    bad_words: tuple[str, ...] | list[str] | str | None = None  # never produced
    allowed_token_ids: tuple[int, ...] | list[int] | None = None  # nothing else is produced
    seed: int | None = None  # [0, 2^64)
    stop: tuple[str, ...] | list[str] | str | None = None  # end when the text contains one
    stop_token_ids: tuple[int, ...] | list[int] | None = None  # end at one, beside the model's eos
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    max_tokens: int | None = None  # new tokens; None: as many as the context holds
    min_tokens: int = 0  # no stop token and no stop string before this many
    logprobs: int | None = None  # 0: of the drawn token, k: and the k best
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: token ids only, no text and no stop strings
    samplers: tuple[str, ...] | list[str] | None = None  # the chain; None: DEFAULT_SAMPLERS

    # What the checks make of `logit_bias`, in the order given.
    _bias_items: tuple[tuple[int, float], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        put = _Setter(self)
        put("n", check_int("n", self.n, 1, MAX_N))
        self._check_defaulted(put)
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, check_float(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY))
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
        ):
            check_bool(name, getattr(self, name))
        self._check_lengths(put)
        self._check_tokens(put)
        if self.samplers is not None:
            put("samplers", check_samplers(self.samplers))

    def _check_defaulted(self, put: _Setter) -> None:
        """The fields that `with_defaults` may set."""
        for name, low, high, above in (
            ("temperature", 0.0, MAX_TEMPERATURE, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.0, MAX_REPETITION_PENALTY, True),
        ):
            value = getattr(self, name)
            if value is not None:
                number = check_float(name, value, low, high, above_low=above)
                if above and number < MIN_FLOAT:
                    raise refuse(name, value, f"a number from {MIN_FLOAT:g} to {high:g}")
                put(name, number)
        if self.top_k is not None:
            put("top_k", max(0, check_int("top_k", self.top_k, -1, MAX_TOP_K)))

    def _check_lengths(self, put: _Setter) -> None:
        if self.seed is not None:
            put("seed", check_int("seed", self.seed, 0, MAX_SEED))
        if self.max_tokens is not None:
            put("max_tokens", check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS))
        limit = MAX_TOKENS if self.max_tokens is None else self.max_tokens
        put("min_tokens", check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.min_tokens > limit:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens, {limit}")
        if self.logprobs is not None:
            put("logprobs", check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS))

    def _check_tokens(self, put: _Setter) -> None:
        put("stop", check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        put(
            "bad_words",
            check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        )
        if self.stop and not self.detokenize:
            raise refuse("detokenize", self.detokenize, "True when there are stop strings")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        stops = check_token_ids("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
        put("stop_token_ids", tuple(dict.fromkeys(stops)))
        if self.allowed_token_ids is not None:
            allowed = check_token_ids(
                "allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS
            )
            if not allowed:
                raise refuse_count("allowed_token_ids", 0, "ids", "at least 1")
            put("allowed_token_ids", tuple(dict.fromkeys(allowed)))
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "entries")
        items = tuple(
            (
                check_int("logit_bias", _as_id(key), 0, MAX_TOP_K, called=BIAS_KEY),
                check_float(f"logit_bias[{key}]", value, -MAX_BIAS, MAX_BIAS),
            )
            for key, value in self.logit_bias.items()
        )
        put("logit_bias", dict(items))
        put("_bias_items", items)

    @property
    def bias_items(self) -> tuple[tuple[int, float], ...]:
        """The checked logit_bias as (token id, value) pairs."""
        return self._bias_items

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        """Whether any penalty looks at the tokens so far."""
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def with_defaults(self, defaults: Mapping[str, float | int | None] | None) -> SamplingParams:
        """The same with each of the model-dependent fields that is None set from `defaults`
        (generation_config.json), or else to its neutral value."""
        missing = [name for name in NEUTRAL if getattr(self, name) is None]
        if not missing:
            return self
        result, known = object.__new__(SamplingParams), defaults or {}
        put = _Setter(result)
        for name in _FIELD_NAMES:
            put(name, getattr(self, name))
        for name in missing:
            value = known.get(name)
            put(name, NEUTRAL[name] if value is None else value)
        result._check_defaulted(put)
        return result

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for logs and JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


# The fields that a generation_config.json may set, with their neutral values.
NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


_FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))


class _Setter:
    """Writes a checked value into a frozen instance while it is being made."""

    def __init__(self, target: SamplingParams) -> None:
        self._target = target

    def __call__(self, name: str, value: object) -> None:
        object.__setattr__(self._target, name, value)


def _as_id(key: object) -> object:
    """JSON has string keys only: "50256" is the id 50256."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    return key


def check_samplers(value: Any) -> tuple[str, ...]:
    """The chain as a tuple of known names, none twice."""
    names = value.split(";") if isinstance(value, str) else value
    known = ", ".join(DEFAULT_SAMPLERS)
    if not isinstance(names, (list, tuple)):
        raise refuse("samplers", value, f"a list of names out of {known}")
    for place, name in enumerate(names):
        check_choice(f"samplers[{place}]", name, DEFAULT_SAMPLERS)
    if len(set(names)) != len(names):
        raise refuse("samplers", value, "a list without repetition")
    return tuple(names)
