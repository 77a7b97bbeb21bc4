"""How a decoder departs from the Llama architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llaisys.models.loading.fields import Fields

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
