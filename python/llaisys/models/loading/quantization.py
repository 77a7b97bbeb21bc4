"""`quantization_config` of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.models.loading.fields import Fields

METHODS = ("gptq", "awq", "compressed-tensors")
MAX_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Quantisation scheme of all quantised weights of a checkpoint."""

    layout: str  # 'gptq' | 'awq' | 'pack-quantized' | 'int-quantized'
    bits: int  # 4 or 8
    group_size: int  # columns per scale; 0: one scale per row
    zero_offset: int = 0  # GPTQ: added to stored zero points


def parse_quantization(fields: Fields) -> WeightScheme | None:
    """The scheme, or None without `quantization_config`; ModelLoadError if unsupported."""
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    method = section.string("quant_method", None)
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise section.fail("quant_method", f"{method!r} is not supported; known: {known}")
    if method == "compressed-tensors":
        return _compressed(section)
    bits = section.integer("bits", 2, 8)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise section.fail(
            "bits", f"is {bits}; {method} is read with 4{' or 8' * (method != 'awq')}"
        )
    group = section.integer("group_size", -1, MAX_GROUP)
    if method == "awq":
        version = section.string("version", "gemm")
        if version.lower() != "gemm":
            raise section.fail("version", f"is {version!r}; only 'gemm' is supported")
        return WeightScheme("awq", bits, max(group, 0))
    kind = section.string("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise section.fail("checkpoint_format", f"is {kind!r}; known: gptq, gptq_v2")
    return WeightScheme("gptq", bits, max(group, 0), int(kind == "gptq"))


def _compressed(section: Fields) -> WeightScheme:
    layout = section.string("format")
    if layout not in ("pack-quantized", "int-quantized"):
        raise section.fail("format", f"is {layout!r}; known: pack-quantized, int-quantized")
    if section.has("kv_cache_scheme"):
        raise section.fail("kv_cache_scheme", "is not supported")
    groups = section.section("config_groups")
    found = {_weights_of(groups.section(name), layout) for name in groups.values}
    if len(found) != 1:
        raise section.fail("config_groups", f"has {len(found)} schemes of weights; expected one")
    return found.pop()


def _weights_of(group: Fields, layout: str) -> WeightScheme:
    weights = group.section("weights")
    kind = weights.string("type", "int")
    if kind != "int":
        raise weights.fail("type", f"is {kind!r}; only 'int' is supported")
    bits = weights.integer("num_bits", 1, 16)
    if bits not in (4, 8):
        raise weights.fail("num_bits", f"is {bits}; expected 4 or 8")
    strategy = weights.string("strategy", "channel")
    if strategy == "group":
        return WeightScheme(layout, bits, weights.integer("group_size", 1, MAX_GROUP))
    if strategy not in ("channel", "tensor"):
        raise weights.fail("strategy", f"is {strategy!r}; known: group, channel, tensor")
    return WeightScheme(layout, bits, 0)
