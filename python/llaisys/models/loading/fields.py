"""Typed, range-checked access to untrusted key/value data (config.json, GGUF metadata)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from llaisys.common.errors import ModelLoadError

T = TypeVar("T")


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


class Fields:
    """A read-only view of `values`; every error names `where`, the key, the value and the limit.

    A key that is absent or null takes the default, or is an error when there is none.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {key!r} {why}")

    def _get(self, key: str, default: T | _Required) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.fail(key, "is missing")
        return default

    def integer(
        self, key: str, low: int, high: int, default: int | _Required | None = REQUIRED
    ) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, found {_shown(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"is {_shown(value)}, outside {low}..{high}")
        return value

    def number(
        self, key: str, low: float, high: float, default: float | _Required | None = REQUIRED
    ) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, found {_shown(value)}")
        if isinstance(value, int) and abs(value) > 1 << 64:
            raise self.fail(key, f"is outside {low}..{high}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(key, f"is {value}, outside {low}..{high}")
        return float(value)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, found {_shown(value)}")
        return value

    def string(self, key: str, default: str | _Required | None = REQUIRED) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, found {_shown(value)}")
        return value

    def section(self, key: str) -> Fields:
        """The object under `key` (empty when absent)."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be an object, found {_shown(value)}")
        return Fields(value, f"{self.where}: {key}")

    def id_list(self, key: str, limit: int) -> tuple[int, ...]:
        """Token ids under `key`: absent, one integer, or a list; each in [0, limit)."""
        value = self._get(key, [])
        items = value if isinstance(value, list) else [value]
        if len(items) > 1024:
            raise self.fail(key, f"lists {len(items)} ids, more than 1024")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.fail(key, f"must hold integers, found {_shown(item)}")
            if not 0 <= item < limit:
                raise self.fail(key, f"is {_shown(item)}, outside [0, vocab_size={limit})")
        return tuple(items)


def _shown(value: object) -> str:
    """`value` for an error text, cut to a sane length; big integers are not printed in full."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
