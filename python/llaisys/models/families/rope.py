"""RoPE scaling for long contexts, as in transformers and llama.cpp.

Every scheme yields one divisor per frequency and one attention factor. The products of queries and
keys are multiplied by the square of that factor (transformers multiplies sines and cosines by it,
with the same result).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import MAX_POSITIONS, Fields

MAX_FACTOR = 1e6
KNOWN = "default, linear, dynamic, yarn, llama3, longrope"
KNOWN_IN_GGUF = "none, linear, yarn"
_PREFIX = "rope.scaling"  # of keys of GGUF metadata
# Reads a small tensor of a GGUF file of the given shape; None: no such tensor.
ReadVector = Callable[[str, tuple[int, ...]], Array | None]


@dataclass(frozen=True, slots=True)
class RopeScaling(ABC):
    """Scaling of the frequencies theta^(-2i / head_dim), i in [0, head_dim / 2)."""

    @property
    def attention_factor(self) -> float:
        return 1.0

    @abstractmethod
    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        """Divisors of the frequencies, [head_dim / 2]; `length`: max_model_len."""

    def contexts(self, max_positions: int) -> tuple[int, int]:
        """(default context, longest context) for this max_position_embeddings."""
        return max_positions, max_positions


@dataclass(frozen=True, slots=True)
class LinearRopeScaling(RopeScaling):
    """Positions are divided by `factor`. Models differ in whether max_position_embeddings is the
    context before or after scaling: it is the default here, and `factor` times it the limit."""

    factor: float

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        return [self.factor] * (head_dim // 2)

    def contexts(self, max_positions: int) -> tuple[int, int]:
        return max_positions, _stretched(max_positions, self.factor)


@dataclass(frozen=True, slots=True)
class DynamicRopeScaling(RopeScaling):
    """Dynamic NTK: the base grows with the context. transformers uses the current length; here it
    is max_model_len, so that cached keys stay valid."""

    factor: float
    original_max_position_embeddings: int

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        times = max(1.0, length / self.original_max_position_embeddings)
        growth = (self.factor * times - (self.factor - 1)) ** (head_dim / (head_dim - 2))
        return [growth ** (2 * i / head_dim) for i in range(head_dim // 2)]

    def contexts(self, max_positions: int) -> tuple[int, int]:
        return max_positions, _stretched(max_positions, self.factor)


@dataclass(frozen=True, slots=True)
class YarnRopeScaling(RopeScaling):
    """Frequencies with fewer than `beta_slow` rotations in the original context are divided by
    `factor`, those with more than `beta_fast` are unchanged, with a ramp between."""

    factor: float
    original_max_position_embeddings: int
    attention: float  # the attention factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ends of the ramp to whole frequency indices

    @property
    def attention_factor(self) -> float:
        return self.attention

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        def index_of(rotations: float) -> float:
            wavelength = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero
        ramps = (min(1.0, max(0.0, (i - low) / (high - low))) for i in range(head_dim // 2))
        return [1 / (ramp / self.factor + 1 - ramp) for ramp in ramps]

    def contexts(self, max_positions: int) -> tuple[int, int]:
        longest = _stretched(self.original_max_position_embeddings, self.factor)
        return (max(max_positions, longest),) * 2


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling(RopeScaling):
    """Llama 3.1: low frequencies are divided by `factor`, high ones unchanged, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        result = []
        low, high = self.low_freq_factor, self.high_freq_factor
        for i in range(head_dim // 2):
            rotations = self.original_max_position_embeddings / (
                2 * math.pi * theta ** (2 * i / head_dim)
            )
            smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
            result.append(1 / ((1 - smooth) / self.factor + smooth))
        return result


@dataclass(frozen=True, slots=True)
class GivenRopeScaling(RopeScaling):
    """Explicit divisors: the tensor rope_freqs.weight of GGUF files."""

    values: tuple[float, ...]

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        return list(self.values)


@dataclass(frozen=True, slots=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Phi-3): one list of divisors for contexts up to the original, one for longer ones.
    transformers chooses by the current length; here it is max_model_len, so that cached keys stay
    valid."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention: float  # the attention factor

    @property
    def attention_factor(self) -> float:
        return self.attention

    def divisors(self, theta: float, head_dim: int, length: int) -> list[float]:
        is_long = length > self.original_max_position_embeddings
        return list(self.long if is_long else self.short)


def window_theta(fields: Fields, default: float) -> float:
    """RoPE base of layers with a window, which is not scaled."""
    local = rope_section(fields).section("sliding_attention")
    local.choice("rope_type", ("default",), "default")
    holder = local if local.has("rope_theta") else fields
    key = "rope_theta" if local.has("rope_theta") else "rope_local_base_freq"
    return float(holder.number(key, 1e-3, 1e12, default))


def rope_section(fields: Fields) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling`; empty when absent."""
    section = fields.section("rope_parameters")
    return section if section.values else fields.section("rope_scaling")


def rotated_part(fields: Fields, head_dim: int) -> int:
    """Values of a head that RoPE rotates."""
    if fields.arch:
        return int(fields.integer("rotary_dim", 0, head_dim, head_dim))
    return int(head_dim * partial_rotary_factor(fields))


def partial_rotary_factor(fields: Fields) -> float:
    section = rope_section(fields)
    holder = section if section.has("partial_rotary_factor") else fields
    return float(holder.number("partial_rotary_factor", 0.0, 1.0, 1.0))


def parse_rope(
    fields: Fields, head_dim: int, has_layer_types: bool = False, is_partial: bool = False
) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta`/`rope_scaling`.

    `has_layer_types`: the family reads RoPE of layers with a window elsewhere; this is that of the
    others. `is_partial`: the family supports partial_rotary_factor; head_dim is the rotated part.
    """
    section = rope_section(fields)
    for name in ("full_attention", "sliding_attention"):
        if section.has(name) and not has_layer_types:
            raise section.fail(name, "sets RoPE per layer type, which is not supported")
    if section.has("full_attention"):
        section = section.section("full_attention")
    theta_from = section if section.has("rope_theta") else fields
    theta = theta_from.number("rope_theta", 1e-3, 1e12, 10000.0)
    if not is_partial and partial_rotary_factor(fields) != 1.0:
        raise fields.fail("partial_rotary_factor", "below 1 is not supported")
    kind = section.string("rope_type", None) or section.string("type", "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(section.number("factor", 1.0, MAX_FACTOR))
    if kind == "dynamic":
        if head_dim <= 2:
            raise section.fail("rope_type", f"'dynamic' needs heads above 2, not {head_dim}")
        max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        return theta, DynamicRopeScaling(section.number("factor", 1.0, MAX_FACTOR), max_positions)
    if kind == "yarn":
        return theta, _yarn(fields, section, theta)
    if kind == "llama3":
        low = section.number("low_freq_factor", 1e-6, 1e6)
        high = section.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise section.fail("high_freq_factor", f"is {high}, not above low_freq_factor {low}")
        return theta, Llama3RopeScaling(
            factor=section.number("factor", 1.0, MAX_FACTOR),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=_original(fields, section),
        )
    if kind in ("longrope", "su"):
        return theta, _long_from_json(fields, section, head_dim // 2)
    raise section.fail("rope_type", f"{kind!r} is not supported; known: {KNOWN}")


def rope_from_gguf(
    fields: Fields, rotary_dim: int, truncates: bool, read_vector: ReadVector
) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from the metadata, from rope_freqs.weight, [rotary_dim / 2], or from the
    tensors of LongRoPE. `truncates`: see `YarnRopeScaling.truncate`."""
    theta = fields.number("rope_theta", 1e-3, 1e12, 10000.0)
    names = ("rope_factors_short", "rope_factors_long", "rope_freqs")
    count = rotary_dim // 2
    found = {name: read_vector(f"{name}.weight", (count,)) for name in names}
    short, long, freqs = (
        None if values is None else _factors(fields, f"{name}.weight", values.tolist(), count)
        for name, values in found.items()
    )
    if short is not None and long is not None:
        context = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        original = fields.integer(f"{_PREFIX}.original_context_length", 1, MAX_POSITIONS, context)
        attention = fields.number(f"{_PREFIX}.attn_factor", 1e-3, 1e3, None)
        return theta, _long_rope(short, long, original, context / original, attention)
    kind = fields.string(f"{_PREFIX}.type", "none")
    factor = fields.number(f"{_PREFIX}.factor", 1.0, MAX_FACTOR, 1.0)
    scaling: RopeScaling | None = None
    if kind == "none":
        factor = fields.number("rope.scale_linear", 1.0, MAX_FACTOR, 1.0)  # old files
    if kind in ("none", "linear"):
        scaling = LinearRopeScaling(factor) if factor != 1.0 else None
    elif kind == "yarn":
        scaling = _yarn_from_gguf(fields, factor, theta, truncates)
    else:
        raise fields.fail(f"{_PREFIX}.type", f"{kind!r} is not supported; known: {KNOWN_IN_GGUF}")
    if freqs is None:
        return theta, scaling
    if scaling is not None:
        raise fields.fail(f"{_PREFIX}.type", "is set in a file that also has rope_freqs.weight")
    return theta, None if all(value == 1.0 for value in freqs) else GivenRopeScaling(freqs)


def _stretched(length: int, factor: float) -> int:
    return min(MAX_POSITIONS, int(length * factor))


def _original(fields: Fields, section: Fields) -> int:
    """The context before scaling: from the config, the section, or max_position_embeddings."""
    name = "original_max_position_embeddings"
    holder = fields if fields.has(name) else section
    if not holder.has(name):
        holder, name = fields, "max_position_embeddings"
    return int(holder.integer(name, 1, MAX_POSITIONS))


def _factors(fields: Fields, name: str, values: Any, count: int) -> tuple[float, ...]:
    """Divisors of frequencies."""
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(isinstance(value, int | float) for value in values):
        raise fields.fail(name, f"must be a list of {count} numbers")
    if not all(math.isfinite(value) and 1e-3 <= value <= MAX_FACTOR for value in values):
        raise fields.fail(name, "holds a value outside 0.001..1e6")
    return tuple(map(float, values))


def _long_rope(
    short: tuple[float, ...],
    long: tuple[float, ...],
    original: int,
    factor: float,
    attention: float | None,
) -> LongRopeScaling:
    """`factor`: context divided by the original; `attention` None: the paper's."""
    if attention is None:
        is_scaled = factor > 1.0 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if is_scaled else 1.0
    return LongRopeScaling(short, long, original, attention)


def _long_from_json(fields: Fields, section: Fields, count: int) -> LongRopeScaling:
    original = _original(fields, section)
    factor = fields.integer("max_position_embeddings", 1, MAX_POSITIONS) / original
    short, long = (
        _factors(section, name, section.get(name), count)
        for name in ("short_factor", "long_factor")
    )
    attention = section.number("attention_factor", 1e-3, 1e3, None)
    return _long_rope(short, long, original, factor, attention)


def _yarn(fields: Fields, section: Fields, theta: float) -> YarnRopeScaling:
    original = _original(fields, section)
    if section.has("factor"):
        factor = section.number("factor", 1.0, MAX_FACTOR)
    else:
        factor = fields.integer("max_position_embeddings", 1, MAX_POSITIONS) / original
        if factor < 1.0:
            raise section.fail("factor", f"is missing, and the context is {factor} of {original}")
    attention = section.number("attention_factor", 1e-3, 1e3, None)
    if attention is None:
        mscale = section.number("mscale", 0.0, 1e3, 0.0)
        all_dims = section.number("mscale_all_dim", 0.0, 1e3, 0.0)
        if mscale and all_dims:
            attention = _mscale(factor, mscale) / _mscale(factor, all_dims)
        else:
            attention = _mscale(factor)
    fast = section.number("beta_fast", 0.0, 1e6, 0.0) or 32.0
    slow = section.number("beta_slow", 0.0, 1e6, 0.0) or 1.0
    truncates = section.boolean("truncate", True)
    found = YarnRopeScaling(factor, original, attention, fast, slow, truncates)
    return _checked(section, theta, found)


def _yarn_from_gguf(
    fields: Fields, factor: float, theta: float, truncates: bool
) -> YarnRopeScaling:
    """`yarn_attn_factor`, the `attention_factor` of config.json, replaces the factor of the paper;
    `attn_factor` multiplies it. With a `yarn_log_multiplier` (DeepSeek) the factor applies to whole
    products, not to rotated values."""
    is_latent = fields.has("kv_lora_rank")
    multiplier = fields.number(f"{_PREFIX}.yarn_log_multiplier", 0.0, 1e6, 0.0)
    if multiplier and not is_latent:
        raise fields.fail(
            f"{_PREFIX}.yarn_log_multiplier", f"is {multiplier}; only 0.0 is supported"
        )
    mix = fields.number(f"{_PREFIX}.yarn_ext_factor", -1e6, 1e6, 1.0)
    if mix >= 0 and mix != 1.0:  # negative: default
        raise fields.fail(f"{_PREFIX}.yarn_ext_factor", f"is {mix}; only 1.0 is supported")
    context = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    attention = 1.0 if is_latent and multiplier else _mscale(factor)
    attention = fields.number(f"{_PREFIX}.yarn_attn_factor", 1e-3, 1e3, attention)
    attention *= fields.number(f"{_PREFIX}.attn_factor", 1e-3, 1e3, 1.0)
    original = fields.integer(f"{_PREFIX}.original_context_length", 1, MAX_POSITIONS, context)
    fast = fields.number(f"{_PREFIX}.yarn_beta_fast", 1e-6, 1e6, 32.0)
    slow = fields.number(f"{_PREFIX}.yarn_beta_slow", 1e-6, 1e6, 1.0)
    found = YarnRopeScaling(factor, original, attention, fast, slow, truncates)
    return _checked(fields, theta, found)


def _checked(section: Fields, theta: float, scaling: YarnRopeScaling) -> YarnRopeScaling:
    if theta <= 1.0:
        raise section.fail("rope_theta", f"is {theta}; yarn needs a base above 1")
    if scaling.beta_fast < scaling.beta_slow:
        raise section.fail(
            "beta_fast", f"is {scaling.beta_fast}, below beta_slow {scaling.beta_slow}"
        )
    return scaling


def _mscale(factor: float, weight: float = 1.0) -> float:
    """The attention scale of the YaRN paper for a context factor."""
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1.0 else 1.0
