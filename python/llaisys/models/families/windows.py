"""Sliding windows of the layers, from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS

Windows = tuple[int | None, tuple[int, ...]]  # (window in tokens, layers with that window)
JsonWindows = Callable[[Fields, int], Windows]  # (config.json, number of layers)
GgufWindows = Callable[[Fields, str, int], Windows]  # (metadata, key of the window, layers)
_TYPES = ("full_attention", "sliding_attention")


def no_windows(fields: Fields, layers: int) -> Windows:
    """Full attention in every layer, even if the config names a window."""
    return None, ()


def no_gguf_windows(fields: Fields, key: str, layers: int) -> Windows:
    """GGUF files of a family whose windows have no metadata: a window is rejected."""
    if fields.has(key):
        raise fields.fail(key, "is not supported in GGUF files of this architecture")
    return None, ()


def window_layers(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """The layers with a window in `layer_types`; None without that key."""
    types = fields.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("layer_types", f"must be a list of {layers} names")
    for item in types:
        if item not in _TYPES:
            raise fields.fail("layer_types", f"holds {item!r}; known: {', '.join(_TYPES)}")
    return tuple(i for i, item in enumerate(types) if item == "sliding_attention")


def with_layers(window: int | None, chosen: tuple[int, ...]) -> Windows:
    return (window, chosen) if window is not None and chosen else (None, ())


def every_layer(fields: Fields, layers: int) -> Windows:
    """`sliding_window`, if set, applies to every layer."""
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    return with_layers(window, tuple(range(layers)))


def gguf_every_layer(fields: Fields, key: str, layers: int) -> Windows:
    """As `every_layer`; 0 means no window."""
    window = fields.integer(key, 0, MAX_POSITIONS, 0)
    return with_layers(window or None, tuple(range(layers)))


def _in_pattern(layers: int, pattern: int) -> tuple[int, ...]:
    """All layers except every `pattern`-th."""
    return tuple(i for i in range(layers) if (i + 1) % pattern)


def pattern_windows(default_window: int, pattern: int) -> JsonWindows:
    """All layers except every `pattern`-th have a window, unless `layer_types` names others."""

    def windows(fields: Fields, layers: int) -> Windows:
        window = fields.integer("sliding_window", 1, MAX_POSITIONS, default_window)
        chosen = window_layers(fields, layers)
        if chosen is None:
            private = "_sliding_window_pattern"
            key = private if fields.has(private) else "sliding_window_pattern"
            chosen = _in_pattern(layers, fields.integer(key, 1, MAX_POSITIONS, pattern))
        return with_layers(window, chosen)

    return windows


def gguf_pattern_windows(pattern: int) -> GgufWindows:
    """As `pattern_windows`; the pattern may be in the metadata as a number."""

    def windows(fields: Fields, key: str, layers: int) -> Windows:
        window = fields.integer(key, 0, MAX_POSITIONS, 0)
        given = fields.values.get(f"{key}_pattern")
        if not isinstance(given, list | np.ndarray):
            step = fields.integer(f"{key}_pattern", 1, MAX_POSITIONS, pattern)
            return with_layers(window or None, _in_pattern(layers, step))
        # One boolean per layer, of multi-token prediction layers too.
        if len(given) < layers:
            raise fields.fail(f"{key}_pattern", f"must have {layers} entries")
        chosen = tuple(i for i in range(layers) if given[i])
        return with_layers(window or None, chosen)

    return windows
