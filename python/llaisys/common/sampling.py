"""Sampling parameters and the order of the sampler chain.

`SamplingParams` declares every sampling field: the checks, the arrays of a step, the wire form, the
HTTP schema and the command-line flags derive from it. It is immutable and validated once. The chain
runs in the native sampler; the worker turns these fields into its arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

from llaisys.common.options import (
    Choice,
    Integer,
    Kind,
    Number,
    Option,
    Record,
    Strings,
    Switch,
    TokenIds,
    changed,
    check_options,
    described,
    options_of,
    rebuilt,
)
from llaisys.common.repetition import RepetitionDetection
from llaisys.common.structured import Structured, StructuredOutputs
from llaisys.common.validation import (
    check_choice,
    check_count,
    check_float,
    check_int,
    invalid_value,
)


class SamplerKind(IntEnum):
    """A sampler of the chain; the values are those of the C API."""

    PENALTIES = 0
    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 3
    MIN_P = 4
    TYPICAL_P = 5
    XTC = 6
    TOP_N_SIGMA = 7
    MIROSTAT = 8


# The samplers in their default order. The mask (allowed_token_ids) and the bias (logit_bias,
# bad_words, min_tokens, DRY) come before the chain, whatever its order.
DEFAULT_SAMPLERS = (
    "penalties", "temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc",
)  # fmt: skip

MIROSTAT_SAMPLERS = ("penalties", "temperature", "mirostat")  # the chain of requests with mirostat
DRY_BREAKERS = ("\n", ":", '"', "*")

POOLINGS = ("last", "mean", "cls")  # of embeddings
SCORE = "score"  # pooling of a reranker: the score of a pair of texts
MAX_N = 128
MAX_LOGPROBS = 20  # of a token over HTTP by default, see Limits.max_logprobs
ALL_LOGPROBS = -1  # those of the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_BIAS = 100.0
BAN = float("-inf")  # the bias of a token that is never sampled
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_PRIORITY = 1000
MAX_TIMEOUT = 30 * 86400.0
MAX_SEED = (1 << 64) - 1
BIAS_KEY = "a token id of logit_bias"  # label in errors


@dataclass(frozen=True, slots=True)
class LogitBias(Kind):
    """Token id -> number added to its logit; -inf: never sampled."""

    def limits(self) -> str:
        return f"object of token ids and numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}"

    def check(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "a mapping of token ids to numbers")
        check_count(name, len(value), MAX_LOGIT_BIAS, "entries")
        return {
            check_int(name, _as_id(key), 0, label=BIAS_KEY): check_bias(f"{name}[{key}]", bias)
            for key, bias in value.items()
        }

    def json_schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": Number(-MAX_BIAS, MAX_BIAS).json_schema(),
            "maxProperties": MAX_LOGIT_BIAS,
        }


def check_bias(name: str, value: Any) -> float:
    return BAN if value == BAN else check_float(name, value, -MAX_BIAS, MAX_BIAS)


@dataclass(frozen=True, slots=True)
class Samplers(Kind):
    """The chain: known names without repetition, as a list or like "top_k;temperature"."""

    def limits(self) -> str:
        return "list of names, or text with semicolons"

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        names = value.split(";") if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)):
            raise invalid_value(
                name, value, f"a list of names out of {', '.join(DEFAULT_SAMPLERS)}"
            )
        for index, sampler in enumerate(names):
            check_choice(f"{name}[{index}]", sampler, DEFAULT_SAMPLERS)
        if len(set(names)) != len(names):
            raise invalid_value(name, value, "a list without repetition")
        return tuple(names)

    def json_schema(self) -> dict[str, Any]:
        item = {"type": "string", "enum": list(DEFAULT_SAMPLERS)}
        return {"type": "array", "items": item, "uniqueItems": True}


@dataclass(frozen=True, slots=True)
class SamplingOption(Option):
    """A field of SamplingParams.

    `array`: name of the sampler's array, one entry per row (see `llaisys.common.step`); `neutral`:
    the value without effect. `from_model`: the model's generation_config.json may set the field;
    None then means the model's value, else "not used".
    """

    array: str | None = None
    neutral: float | int = 0
    from_model: bool = False


def plain(default: Any, kind: Kind, help: str, flag: str | None = None, **more: Any) -> Any:
    """A field that the engine reads; `more`: further fields of SamplingOption."""
    return described(default, SamplingOption(kind, help, flag, "sampling", **more))


def number(
    array: str,
    default: Any,
    kind: Integer | Number,
    help: str,
    *,
    flag: str | None = "",
    **more: Any,
) -> Any:
    """A field that is a number of each row in the sampler."""
    if more.get("from_model"):
        more.setdefault("default_text", "from model")
    return plain(default, kind, help, flag, array=array, **more)


def penalty(array: str, help: str) -> Any:
    return number(array, 0.0, Number(-2, 2), help)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of a request. None means "the model's default" for the
    fields that a generation_config.json may set (see `with_defaults`), else "not used".

    temperature 0 is greedy; neutral values sample from the full distribution. Without a seed each
    request gets a random one.
    """

    n: int = plain(1, Integer(1, MAX_N), "Choices per prompt", "", common=True)
    temperature: float | None = number(
        "temperature", None, Number(0, 100), "Sampling temperature; 0: greedy",
        neutral=1.0, from_model=True, common=True, aliases=("temp",),
    )  # fmt: skip
    top_p: float | None = number(
        "top_p", None, Number(0, 1, above_low=True), "Top-p (nucleus) sampling",
        neutral=1.0, from_model=True, common=True,
    )  # fmt: skip
    top_k: int | None = number(
        "top_k", None, Integer(-1), "Top-k sampling; 0 or -1: off", from_model=True, common=True
    )
    min_p: float | None = number(
        "min_p", None, Number(0, 1), "Minimum probability relative to the most likely token",
        from_model=True,
    )  # fmt: skip
    typical_p: float | None = number(
        "typical_p", None, Number(0, 1, above_low=True), "Locally typical sampling",
        neutral=1.0, from_model=True, aliases=("typical",),
    )  # fmt: skip
    top_n_sigma: float = number(
        "top_n_sigma", 0.0, Number(0, 100),
        "Keep tokens within this many standard deviations of the best logit",
        aliases=("top_nsigma",), more="0: off.",
    )  # fmt: skip
    xtc_probability: float = number(
        "xtc_probability", 0.0, Number(0, 1), "Probability of XTC (exclude top choices) per token"
    )
    xtc_threshold: float = number(
        "xtc_threshold", 0.1, Number(0, 1), "Probability of an XTC top choice; above 0.5: off",
        neutral=0.1,
    )  # fmt: skip
    dynatemp_range: float = number(
        "dynatemp_range", 0.0, Number(0, 100),
        "Largest change of the temperature with the entropy (dynamic); 0: off",
    )  # fmt: skip
    dynatemp_exponent: float = number(
        "dynatemp_exponent", 1.0, Number(0, 100, above_low=True),
        "Exponent of the normalised entropy in dynamic temperature", neutral=1.0,
    )  # fmt: skip
    mirostat: int = number(
        "mirostat", 0, Integer(0, 2), "Mirostat version, instead of truncating samplers; 0: off"
    )
    mirostat_tau: float = plain(
        5.0, Number(0, 100), "Target surprise of Mirostat, in bits per token", ""
    )
    mirostat_eta: float = plain(0.1, Number(0, 1), "Learning rate of Mirostat", "")
    dry_multiplier: float = plain(
        0.0, Number(0, 100), "DRY penalty of tokens that extend a repetition; 0: off", ""
    )
    dry_base: float = plain(1.75, Number(1, 100), "Growth of the DRY penalty per token", "")
    dry_allowed_length: int = plain(
        2, Integer(0, MAX_TOKENS), "Longest repetition without a larger DRY penalty", ""
    )
    dry_penalty_last_n: int = plain(
        -1, Integer(-1, MAX_TOKENS), "Last tokens that DRY searches; -1: all", ""
    )
    dry_sequence_breakers: tuple[str, ...] | list[str] | str | None = plain(
        None, Strings(64, 64), "Text that ends a repetition for DRY; repeatable", "",
        default_text=json.dumps(DRY_BREAKERS),
    )  # fmt: skip
    repeat_last_n: int = plain(
        -1, Integer(-1, MAX_TOKENS), "Last tokens that penalties cover; -1: all, 0: none", ""
    )
    repetition_penalty: float | None = number(
        "repetition_penalty", None, Number(0, 100, above_low=True),
        "Repetition penalty of prompt and output tokens; 1: off",
        neutral=1.0, from_model=True, aliases=("repeat_penalty",),
    )  # fmt: skip
    presence_penalty: float = penalty("presence_penalty", "Penalty of tokens already generated")
    frequency_penalty: float = penalty(
        "frequency_penalty", "Penalty per occurrence of a generated token"
    )
    logit_bias: Mapping[int, float] | None = plain(
        None, LogitBias(), "Bias by token id, added to the logits"
    )
    bad_words: tuple[str, ...] | list[str] | str | None = plain(
        None, Strings(256, 1024), "Text that is never generated; repeatable", ""
    )
    allowed_token_ids: tuple[int, ...] | list[int] | None = plain(
        None, TokenIds(MAX_ALLOWED_TOKEN_IDS, min_count=1), "Token ids that may be generated",
        default_text="all",
    )  # fmt: skip
    seed: int | None = plain(
        None, Integer(0, MAX_SEED), "Random seed", "", common=True, default_text="random"
    )
    stop: tuple[str, ...] | list[str] | str | None = plain(
        None, Strings(MAX_STOP_STRINGS, MAX_STOP_CHARS), "Stop string; repeatable", "", common=True
    )
    stop_token_ids: tuple[int, ...] | list[int] | None = plain(
        None, TokenIds(1024), "Stop token ids, beside those of the model"
    )
    include_stop_str_in_output: bool = plain(False, Switch(), "Include the stop string in the text")
    ignore_eos: bool = plain(False, Switch(), "Continue after end-of-sequence tokens", "")
    max_tokens: int | None = plain(
        None, Integer(0, MAX_TOKENS), "Maximum tokens to generate", "", common=True,
        default_text="up to the context length", aliases=("n_predict",),
    )  # fmt: skip
    min_tokens: int = plain(0, Integer(0, MAX_TOKENS), "Minimum tokens before any stop", "")
    thinking_budget: int | None = plain(
        None, Integer(0, MAX_TOKENS), "Maximum reasoning tokens", ""
    )
    priority: int = plain(
        0, Integer(-MAX_PRIORITY, MAX_PRIORITY), "Priority; lower values are served first", ""
    )
    timeout: float | None = plain(
        None, Number(0, MAX_TIMEOUT, above_low=True), "Time limit of the request", "",
        metavar="SECONDS", more="The output so far is returned.",
    )  # fmt: skip
    n_keep: int | None = plain(
        None, Integer(-1, MAX_TOKENS), "Prompt tokens to keep at a context shift; -1: all", ""
    )
    repetition_detection: Mapping[str, Any] | None = plain(
        None, Record(RepetitionDetection), "End an answer that repeats a pattern of tokens"
    )
    logprobs: int | None = number(
        "n_logprobs", None, Integer(ALL_LOGPROBS),
        "Logprobs of the sampled token and of the k most likely ones; -1: of all",
        neutral=-1, flag=None,
    )  # fmt: skip
    post_sampling_probs: bool = plain(
        False, Switch(), "Logprobs are those after the sampler chain, not the model's",
        array="post_sampling_probs",
    )  # fmt: skip
    logprob_token_ids: tuple[int, ...] | list[int] | None = plain(
        None, TokenIds(MAX_LOGPROB_TOKEN_IDS, min_count=1),
        "Token ids whose logprobs replace those of the k most likely",
    )  # fmt: skip
    prompt_logprobs: int | None = plain(
        None, Integer(ALL_LOGPROBS),
        "Logprobs of the prompt tokens and of the k most likely ones; -1: of all",
    )  # fmt: skip
    pooling: str | None = plain(
        None, Choice((*POOLINGS, SCORE)), "Return an embedding with this pooling method, no text"
    )
    second_text: int | None = plain(
        None, Integer(1, MAX_TOKENS), "First token of the second text of a pair, with `pooling`"
    )
    skip_special_tokens: bool = plain(True, Switch(), "Leave special tokens out of the text")
    detokenize: bool = plain(
        True, Switch(), "Return text", more="`false`: token ids only, no stop strings."
    )
    samplers: tuple[str, ...] | list[str] | None = plain(
        None, Samplers(), "Order of the sampler chain", "",
        default_text=";".join(DEFAULT_SAMPLERS), metavar="A;B",
    )  # fmt: skip
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = plain(
        None, Structured(), "Constraint on the output: schema, regex, choice or grammar"
    )

    def __post_init__(self) -> None:
        check_options(self)
        put = partial(object.__setattr__, self)
        if self.top_k == -1:
            put("top_k", 0)
        for name in ("stop", "bad_words", "stop_token_ids"):
            if getattr(self, name) is None:
                put(name, ())
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_value(
                "min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}"
            )
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise invalid_value(
                "logprob_token_ids", self.logprob_token_ids, "left out unless logprobs is given"
            )
        if self.pooling is not None and (self.max_tokens != 0 or self.n != 1):
            raise invalid_value(
                "pooling", self.pooling, "left out unless max_tokens is 0 and n is 1"
            )
        if self.second_text is not None and self.pooling is None:
            raise invalid_value("second_text", self.second_text, "left out without pooling")
        if self.stop and not self.detokenize:
            raise invalid_value("detokenize", self.detokenize, "true when there are stop strings")

    @property
    def bias_items(self) -> tuple[tuple[int, float], ...]:
        """The logit_bias as (token id, value) pairs in order."""
        return tuple((self.logit_bias or {}).items())

    @property
    def generates(self) -> bool:
        """Whether a token is sampled; without, only the prompt is computed."""
        return self.max_tokens != 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        return self.repeat_last_n != 0 and (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def with_defaults(self, defaults: Mapping[str, Any] | None) -> SamplingParams:
        """A copy in which each field that a model may set and that is None has its value in
        `defaults`, or its neutral value."""
        known = defaults or {}
        missing = [name for name in NEUTRAL if getattr(self, name) is None]
        chain = known.get("samplers") if self.samplers is None else None
        if not missing and chain is None:
            return self
        result = object.__new__(SamplingParams)
        put = partial(object.__setattr__, result)
        for name in FIELDS:
            put(name, getattr(self, name))
        for name in missing:
            value = known.get(name)
            put(name, NEUTRAL[name] if value is None else FIELDS[name].kind.check(name, value))
        if result.top_k == -1:
            put("top_k", 0)
        if chain is not None:
            put("samplers", FIELDS["samplers"].kind.check("samplers", chain))
        return result

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, for logs and JSON."""
        values = {name: getattr(self, name) for name in FIELDS}
        return values | {"structured_outputs": self.to_wire().get("structured_outputs")}

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that are set, as plain data for `from_wire`."""
        values = changed(self)
        if isinstance(self.structured_outputs, StructuredOutputs):
            values["structured_outputs"] = self.structured_outputs.to_wire()
        return values

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Validate and build; raises InvalidInputError."""
        return rebuilt(cls, values)


def _as_id(key: object) -> object:
    """Convert a JSON key: "50256" is the id 50256."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    return key


# Every field of SamplingParams by name.
FIELDS: dict[str, SamplingOption] = {
    name: about
    for name, about, _ in options_of(SamplingParams)
    if isinstance(about, SamplingOption)
}
# The fields that a generation_config.json may set, with their neutral values.
NEUTRAL: dict[str, float | int] = {
    name: about.neutral for name, about in FIELDS.items() if about.from_model
}
# The fields that a server may set for requests that leave them out.
DEFAULTED = (*NEUTRAL, "samplers")
# Defaults of a chat where neither the request nor generation_config.json sets any of them.
DEFAULT_SAMPLING: dict[str, float | int] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}


def sampling_defaults(
    model: Mapping[str, Any], chosen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Defaults of a request without parameters: `chosen`, then the model's, or DEFAULT_SAMPLING if
    the model sets none of its fields."""
    own = {name: value for name, value in model.items() if value is not None}
    if not DEFAULT_SAMPLING.keys() & own.keys():
        own = DEFAULT_SAMPLING | own
    return own | dict(chosen or {})
