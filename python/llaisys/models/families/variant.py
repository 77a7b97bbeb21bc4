"""How a decoder departs from the Llama architecture: variant, RoPE layout, sliding windows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llaisys.models.loading.fields import MAX_POSITIONS, Fields

MAX_SCALE = 1e6  # of multipliers and caps


@dataclass(frozen=True, slots=True)
class Variant:
    """Norms, MLP and multipliers. The defaults are those of Llama; a scale or cap of 0 is none."""

    norm: str = "rms"  # 'rms' | 'layer'
    # Of attention and MLP: 'before' | 'after' | 'both' | 'residual' (after they are added).
    norm_position: str = "before"
    norm_bias: bool = False  # layer norms have a bias
    mlp: str = "swiglu"  # 'swiglu' | 'geglu' | 'gelu' or 'gelu_erf' (no gate)
    mlp_bias: bool = False
    is_parallel: bool = False  # attention and MLP read the same norm
    has_row_norms: bool = False  # norms of q and k span all heads of a token
    has_sinks: bool = False  # a learned logit per head in the softmax denominator
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_soft_cap: float = 0.0
    logit_scale: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 0.0
    residual_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """Which values of a head RoPE rotates, and in which layers."""

    rotary_dim: int = 0  # first values of a head that are rotated; 0: all
    is_interleaved: bool = False  # pairs (2i, 2i + 1) in the files, not (i, i + rotary_dim / 2)
    layers_without: tuple[int, ...] = ()  # layers without RoPE
    window_theta: float | None = None  # RoPE base of layers with a window; None: the model's
    # With window_theta: the attention factor of the other layers multiplies their norm of q.
    scales_q_norm: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that a variant may depend on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int


ReadVariant = Callable[[Fields, Sizes], Variant]
ReadLayout = Callable[[Fields, Sizes], RopeLayout]


def scale_of(fields: Fields, key: str, default: float = 0.0) -> float:
    """A multiplier or cap, at least 0."""
    return float(fields.number(key, 0.0, MAX_SCALE, default))


Windows = tuple[int | None, tuple[int, ...]]  # (window in tokens, layers with that window)
ReadWindows = Callable[[Fields, int], Windows]  # (config, number of layers)
ReadLayers = Callable[[Fields, int], tuple[int, ...]]  # the layers with a window
_TYPES = ("full_attention", "sliding_attention")


def no_windows(fields: Fields, layers: int) -> Windows:
    """Full attention in every layer, even if config.json names a window."""
    if fields.arch and fields.has("sliding_window"):
        raise fields.fail("sliding_window", "is not supported in GGUF files of this architecture")
    return None, ()


def every_layer(fields: Fields, layers: int) -> tuple[int, ...]:
    return tuple(range(layers))


def late_layers(first: int) -> ReadLayers:
    """Layers from `max_window_layers` on; `first`: its default."""

    def chosen(fields: Fields, layers: int) -> tuple[int, ...]:
        no_windows(fields, layers)  # GGUF files have no such key
        start = fields.integer("max_window_layers", 0, MAX_POSITIONS, first)
        return tuple(range(min(start, layers), layers))

    return chosen


def pattern(step: int, full: int = -1) -> ReadLayers:
    """All layers except one of `step`, that with the remainder `full`. The file may have another
    step; GGUF files may have one boolean per layer."""

    def chosen(fields: Fields, layers: int) -> tuple[int, ...]:
        private = "_sliding_window_pattern"
        key = private if fields.has(private) else "sliding_window_pattern"
        given = fields.get(key)
        if fields.arch and isinstance(given, list | np.ndarray):
            if len(given) < layers:  # multi-token prediction layers have a boolean too
                raise fields.fail(key, f"must have {layers} entries")
            return tuple(i for i in range(layers) if given[i])
        size = fields.integer(key, 1, MAX_POSITIONS, step)
        return tuple(i for i in range(layers) if i % size != full % size)

    return chosen


def windows(default: int | None = None, chosen: ReadLayers = every_layer) -> ReadWindows:
    """`sliding_window` in the layers of `layer_types`, else in `chosen`. `default`: where
    config.json does not say; null is no window."""

    def read(fields: Fields, layers: int) -> Windows:
        is_given = bool(fields.arch) or "sliding_window" in fields.values
        low = 0 if fields.arch else 1  # GGUF: 0 is no window
        window = fields.integer("sliding_window", low, MAX_POSITIONS, None if is_given else default)
        if not window:
            return None, ()
        found = _named_layers(fields, layers)
        if found is None:
            found = chosen(fields, layers)
        return (window, found) if found else (None, ())

    return read


def _named_layers(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """The layers with a window in `layer_types`; None without that key."""
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("layer_types", f"must be a list of {layers} names")
    for item in types:
        if item not in _TYPES:
            raise fields.fail("layer_types", f"holds {item!r}; known: {', '.join(_TYPES)}")
    return tuple(i for i, item in enumerate(types) if item == "sliding_attention")
