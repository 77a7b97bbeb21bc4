"""Typed, range-checked access to untrusted key/value data (config.json, GGUF metadata).

Uses the checks of common/validation; errors are ModelLoadErrors that name the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.validation import (
    check_bool,
    check_float,
    check_int,
    check_string,
    check_token_ids,
    invalid_value,
)

T = TypeVar("T")
MAX_IDS = 1024  # in a list of token ids

# Upper limits of config values, far above real models, against damaged or hostile files.
MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 28
MAX_PARAMETERS = 1 << 42


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


class Fields:
    """A read-only view of `values`; every error names `where`, the key, the value and the limit.

    An absent or null key gives the default; without a default it is an error.
    """

    arch = ""  # of GGUF metadata that is read under the names of config.json

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def key(self, name: str) -> str:
        """The key in the file."""
        return name

    def get(self, key: str) -> Any:
        """The unchecked value; None: absent."""
        return self.values.get(self.key(key))

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def fail(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {self.key(key)} {why}")

    def _get(self, key: str, default: T | _Required) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.fail(key, "is missing")
        return default

    def _check(self, check: Callable[..., T], key: str, value: Any, *limits: Any) -> T:
        """Apply `check`; turn InvalidInputError into ModelLoadError."""
        try:
            return check(self.key(key), value, *limits)
        except InvalidInputError as error:
            raise ModelLoadError(f"{self.where}: {error}") from None

    def integer(
        self, key: str, low: int, high: int, default: int | _Required | None = REQUIRED
    ) -> Any:
        value = self._get(key, default)
        return value if value is default else self._check(check_int, key, value, low, high)

    def number(
        self, key: str, low: float, high: float, default: float | _Required | None = REQUIRED
    ) -> Any:
        value = self._get(key, default)
        return value if value is default else self._check(check_float, key, value, low, high)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        return self._check(check_bool, key, self._get(key, default))

    def string(self, key: str, default: str | _Required | None = REQUIRED) -> Any:
        value = self._get(key, default)
        return value if value is default else self._check(check_string, key, value)

    def choice(
        self, key: str, known: Sequence[str], default: str | _Required | None = REQUIRED
    ) -> Any:
        """A string that is one of `known`."""
        value = self.string(key, default)
        if value != default and value not in known:
            only = f"only {known[0]!r} is supported" if len(known) == 1 else "known: "
            raise self.fail(key, f"is {value[:40]!r}; {only}{', '.join(known[1:] and known)}")
        return value

    def section(self, key: str) -> Fields:
        """The object under `key` (empty when absent)."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{self.where}: {invalid_value(key, value, 'an object')}")
        return Fields(value, f"{self.where}: {key}")

    def id_list(self, key: str, limit: int) -> tuple[int, ...]:
        """Token ids under `key`: absent, one integer, or a list; each in [0, limit)."""
        value = self._get(key, [])
        if isinstance(value, list):
            return self._check(check_token_ids, key, value, MAX_IDS, limit - 1)
        return (self._check(check_int, key, value, 0, limit - 1),)
