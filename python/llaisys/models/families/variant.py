"""How a decoder departs from the Llama architecture, read from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llaisys.models.loading.fields import Fields

MAX_SCALE = 1e6


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
class Keys:
    """A config in either format. Methods take the key of config.json and that of GGUF metadata
    (without the architecture); '' is a key that the format does not have."""

    fields: Fields
    arch: str  # '' for config.json

    def key(self, json: str, gguf: str) -> str:
        if not self.arch:
            return json
        return f"{self.arch}.{gguf}" if gguf else ""

    def number(self, json: str, gguf: str, default: float = 0.0) -> float:
        """A multiplier or cap, at least 0."""
        key = self.key(json, gguf)
        return float(self.fields.number(key, 0.0, MAX_SCALE, default)) if key else default

    def integer(self, json: str, gguf: str, high: int, default: int) -> int:
        key = self.key(json, gguf)
        return int(self.fields.integer(key, 0, high, default)) if key else default

    def boolean(self, json: str, gguf: str, default: bool) -> bool:
        key = self.key(json, gguf)
        return self.fields.boolean(key, default) if key else default


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that a variant may depend on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int


ReadVariant = Callable[[Keys, Sizes], Variant]
ReadLayout = Callable[[Keys, Sizes], RopeLayout]


def llama_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant()


def llama_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    return RopeLayout()
