"""Value kinds of request fields beyond those of `SamplingParams`, and the pydantic annotation that
applies a kind."""

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import core_schema

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Integer, Kind, Number, Strings
from llaisys.common.sampling import BAN, MAX_BIAS, MAX_LOGIT_BIAS, MAX_STOP_CHARS, LogitBias
from llaisys.common.validation import MIN_FLOAT, check_count, check_float, check_int, invalid_value
from llaisys.tokenization.unicode_text import clean_text

UNLIMITED = -1  # max_tokens: fill the context
NUMBER = re.compile(r"-?[0-9]+")
MAX_SHOWN = 8  # invalid keys in an error
# A plausible value of a choice field that cannot be a secret or a name.
WORD = re.compile(r"(?=.{1,24}$)[A-Za-z]+([_-][A-Za-z]+)*[0-9]{0,3}")


class Checked:
    """Annotation of a field whose values a kind checks; null is always valid. `name`: in errors, if
    not that of the field."""

    def __init__(self, kind: Kind, name: str | None = None) -> None:
        self.kind = kind
        self.name = name

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        check = partial(self._check, self.name or handler.field_name)
        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [self.kind.json_schema(), {"type": "null"}]}

    def _check(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(self.kind, Strings):
            value = clean(value)
        elif isinstance(self.kind, Integer) and isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients send 100.0 for 100
        return self.kind.check(name, value)


@dataclass(frozen=True, slots=True)
class Breakers(Strings):
    """Strings, or a JSON list of them as text (SillyTavern)."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) and value.startswith("["):
            try:
                value = json.loads(value)
            except ValueError:
                raise invalid_value(name, value, "a list of strings") from None
        return Strings.check(self, name, value)


@dataclass(frozen=True, slots=True)
class NewTokens(Integer):
    """A number of tokens; -1: fill the context."""

    def check(self, name: str, value: Any) -> int:
        return (
            UNLIMITED
            if type(value) is int and value == UNLIMITED
            else Integer.check(self, name, value)
        )

    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": UNLIMITED}, Integer.json_schema(self)]}


@dataclass(frozen=True, slots=True)
class StopStrings(Strings):
    """Stop strings; empty ones are ignored."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        given = [value] if isinstance(value, str) else value
        if isinstance(given, list):
            given = [item for item in given if item != ""]
        return Strings.check(self, name, given)

    def json_schema(self) -> dict[str, Any]:
        one = {"type": "string", "maxLength": self.max_chars}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.max_count}]}


@dataclass(frozen=True, slots=True)
class BiasField(LogitBias):
    """OpenAI's object, or llama.cpp's list of [token id or text, bias]; false bans a token."""

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            texts = [key for key in value if isinstance(key, str) and not NUMBER.fullmatch(key)]
            if texts:
                shown = ", ".join(f'"{key}"' for key in texts[:MAX_SHOWN] if WORD.fullmatch(key))
                keys = f"the keys {shown}" if shown else "keys that are no numbers"
                raise InvalidInputError(
                    f"{name} has {keys}; it must have token ids as keys", field=name
                )
            banned = {key: 0.0 for key, bias in value.items() if bias is False}
            found = LogitBias.check(self, name, value | banned)
            if BAN in found.values():  # not valid JSON, but some parsers accept it
                raise invalid_value(name, BAN, "a mapping of token ids to finite numbers or false")
            return found | dict.fromkeys(LogitBias.check(self, name, banned), BAN)
        if not isinstance(value, list):
            raise invalid_value(
                name, value, "a mapping of token ids to numbers, or a list of pairs"
            )
        check_count(name, len(value), MAX_LOGIT_BIAS, "entries")
        return BiasPairs(tuple(self._pair(f"{name}[{i}]", pair) for i, pair in enumerate(value)))

    def _pair(self, name: str, pair: Any) -> tuple[int | str, float]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise invalid_value(name, pair, "[token id or text, bias or false]")
        token, bias = pair
        if isinstance(token, str):
            check_count(f"{name}[0]", len(token), MAX_STOP_CHARS, "characters")
        else:
            check_int(f"{name}[0]", token, 0)
        # false means -inf, which JSON lacks
        return token, (
            BAN if bias is False else check_float(f"{name}[1]", bias, -MAX_BIAS, MAX_BIAS)
        )

    def json_schema(self) -> dict[str, Any]:
        bias: Any = {"anyOf": [Number(-MAX_BIAS, MAX_BIAS).json_schema(), {"const": False}]}
        token = {
            "anyOf": [Integer(0).json_schema(), {"type": "string", "maxLength": MAX_STOP_CHARS}]
        }
        pair = {
            "type": "array",
            "prefixItems": [token, bias],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        }
        pairs = {"type": "array", "items": pair, "maxItems": MAX_LOGIT_BIAS}
        return {"anyOf": [{**LogitBias.json_schema(self), "additionalProperties": bias}, pairs]}


@dataclass(frozen=True, slots=True)
class BiasPairs:
    """A logit_bias with texts: each token of a text gets its bias."""

    pairs: tuple[tuple[int | str, float], ...]

    @property
    def num_chars(self) -> int:
        return sum(len(token) for token, _ in self.pairs if isinstance(token, str))

    def by_token(self, tokenizer: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for token, bias in self.pairs:
            if isinstance(token, str):
                if tokenizer is None:
                    raise InvalidInputError("texts need a tokenizer", field="logit_bias")
                ids = tokenizer.encode(token, False)
            else:
                ids = [token]
            found.update(dict.fromkeys(ids, bias))
        return found


@dataclass(frozen=True, slots=True)
class TopP(Number):
    """0 means the smallest positive top_p: only the most likely token."""

    def check(self, name: str, value: Any) -> float:
        zero = type(value) in (int, float) and value == 0
        return MIN_FLOAT if zero else Number.check(self, name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class TopNSigma(Number):
    """llama.cpp writes -1 for off, here 0."""

    def check(self, name: str, value: Any) -> float:
        return (
            0.0 if type(value) in (int, float) and value == -1 else Number.check(self, name, value)
        )

    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": -1}, Number.json_schema(self)]}


def clean(value: Any) -> Any:
    """Replace lone surrogates in a string or in the strings of a list with U+FFFD."""
    if isinstance(value, list):
        return [clean(item) for item in value]
    return clean_text(value) if isinstance(value, str) else value
