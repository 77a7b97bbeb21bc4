"""RoPE scaling for long contexts, as in transformers and llama.cpp.

Every scheme yields one divisor per frequency and one attention factor. The products of queries and
keys are multiplied by the square of that factor (transformers multiplies sines and cosines by it,
with the same result).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS

MAX_FACTOR = 1e6
KNOWN = "default, linear, dynamic, yarn, llama3, longrope"
KNOWN_IN_GGUF = "none, linear, yarn"


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


def rope_section(fields: Fields) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling`; empty when absent."""
    section = fields.section("rope_parameters")
    return section if section.values else fields.section("rope_scaling")


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
        return theta, _longrope(fields, section, head_dim)
    raise section.fail("rope_type", f"{kind!r} is not supported; known: {KNOWN}")


def rope_from_gguf(
    fields: Fields, arch: str, theta: float, factors: Array | None
) -> RopeScaling | None:
    """From the keys `ARCH.rope.scaling.*`, or from rope_freqs.weight, [head_dim / 2]."""
    prefix = f"{arch}.rope.scaling"
    kind = fields.string(f"{prefix}.type", "none")
    factor = fields.number(f"{prefix}.factor", 1.0, MAX_FACTOR, 1.0)
    scaling: RopeScaling | None = None
    if kind == "none":
        factor = fields.number(f"{arch}.rope.scale_linear", 1.0, MAX_FACTOR, 1.0)  # old files
        scaling = LinearRopeScaling(factor) if factor != 1.0 else None
    elif kind == "linear":
        scaling = LinearRopeScaling(factor) if factor != 1.0 else None
    elif kind == "yarn":
        scaling = _yarn_from_gguf(fields, arch, factor, theta)
    else:
        raise fields.fail(f"{prefix}.type", f"{kind!r} is not supported; known: {KNOWN_IN_GGUF}")
    if factors is None:
        return scaling
    if scaling is not None:
        raise fields.fail(f"{prefix}.type", "is set in a file that also has rope_freqs.weight")
    values = tuple(float(value) for value in factors)
    if not all(math.isfinite(value) and 1e-3 <= value <= MAX_FACTOR for value in values):
        raise ModelLoadError(
            f"{fields.where}: tensor 'rope_freqs.weight': holds a value outside 0.001..1e6"
        )
    return None if all(value == 1.0 for value in values) else GivenRopeScaling(values)


def _stretched(length: int, factor: float) -> int:
    return min(MAX_POSITIONS, int(length * factor))


def _original(fields: Fields, section: Fields) -> int:
    """The context before scaling: from the config, the section, or max_position_embeddings."""
    name = "original_max_position_embeddings"
    holder = fields if fields.has(name) else section
    if not holder.has(name):
        holder, name = fields, "max_position_embeddings"
    return int(holder.integer(name, 1, MAX_POSITIONS))


def long_rope(
    where: Fields,
    short: Iterable[float],
    long: Iterable[float],
    original: int,
    factor: float,
    attention: float | None,
) -> LongRopeScaling:
    """`factor`: context divided by the original; `attention` None: the paper's."""
    lists = []
    for name, values in (("short_factor", short), ("long_factor", long)):
        found = tuple(float(value) for value in values)
        if not all(math.isfinite(value) and 1e-3 <= value <= MAX_FACTOR for value in found):
            raise where.fail(name, "holds a value outside 0.001..1e6")
        lists.append(found)
    if attention is None:
        is_scaled = factor > 1.0 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if is_scaled else 1.0
    return LongRopeScaling(lists[0], lists[1], original, attention)


def _longrope(fields: Fields, section: Fields, rotary_dim: int) -> LongRopeScaling:
    original = _original(fields, section)
    factor = fields.integer("max_position_embeddings", 1, MAX_POSITIONS) / original
    lists = []
    for name in ("short_factor", "long_factor"):
        values = section.values.get(name)
        is_list = isinstance(values, list) and len(values) == rotary_dim // 2
        found = values if is_list and values is not None else []
        if not found or not all(isinstance(value, int | float) for value in found):
            raise section.fail(name, f"must be a list of {rotary_dim // 2} numbers")
        lists.append(found)
    attention = section.number("attention_factor", 1e-3, 1e3, None)
    return long_rope(section, lists[0], lists[1], original, factor, attention)


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
    return _checked(
        section,
        theta,
        YarnRopeScaling(
            factor=factor,
            original_max_position_embeddings=original,
            attention=attention,
            beta_fast=section.number("beta_fast", 0.0, 1e6, 0.0) or 32.0,
            beta_slow=section.number("beta_slow", 0.0, 1e6, 0.0) or 1.0,
            truncate=section.boolean("truncate", True),
        ),
    )


def _yarn_from_gguf(fields: Fields, arch: str, factor: float, theta: float) -> YarnRopeScaling:
    """`yarn_attn_factor`, the `attention_factor` of config.json, replaces the factor of the paper;
    `attn_factor` multiplies it. With a `yarn_log_multiplier` (DeepSeek) the factor applies to whole
    products, not to rotated values."""
    prefix = f"{arch}.rope.scaling"
    is_latent = fields.has(f"{arch}.attention.kv_lora_rank")
    multiplier = fields.number(f"{prefix}.yarn_log_multiplier", 0.0, 1e6, 0.0)
    for name, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if is_latent and name == "yarn_log_multiplier":
            continue
        found = fields.number(f"{prefix}.{name}", -1e6, 1e6, neutral)
        if found != neutral and not (name == "yarn_ext_factor" and found < 0):  # negative: default
            raise fields.fail(f"{prefix}.{name}", f"is {found}; only {neutral} is supported")
    context = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
    attention = 1.0 if is_latent and multiplier else _mscale(factor)
    attention = fields.number(f"{prefix}.yarn_attn_factor", 1e-3, 1e3, attention)
    attention *= fields.number(f"{prefix}.attn_factor", 1e-3, 1e3, 1.0)
    return _checked(
        fields,
        theta,
        YarnRopeScaling(
            factor=factor,
            original_max_position_embeddings=fields.integer(
                f"{prefix}.original_context_length", 1, MAX_POSITIONS, context
            ),
            attention=attention,
            beta_fast=fields.number(f"{prefix}.yarn_beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=fields.number(f"{prefix}.yarn_beta_slow", 1e-6, 1e6, 1.0),
        ),
    )


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
