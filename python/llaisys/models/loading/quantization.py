"""`quantization_config` of config.json."""

from dataclasses import dataclass, replace
from typing import Any

from llaisys.common.validation import is_int
from llaisys.models.loading.fields import Fields

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized")  # compressed-tensors
MAX_GROUP = 1 << 20
_BY_TOKEN = {
    "type": "int",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Quantisation scheme of all quantised weights of a checkpoint."""

    # 'gptq' | 'awq' | 'mxfp4' | 'pack-quantized' | 'int-quantized' | 'float-quantized'
    layout: str
    bits: int  # 4 or 8
    group_size: int  # columns per scale; 0: one scale per row
    zero_offset: int = 0  # GPTQ: added to stored zero points
    is_reordered: bool = False  # columns do not lie in group order (act-order)
    block: tuple[int, int] | None = None  # float-quantized: rows and columns per scale
    scale_suffix: str = "weight_scale"  # float-quantized
    # W8A8: symmetric bytes with one scale per row, calibrated for activations in 8 bits with one
    # scale per token.
    has_byte_activations: bool = False


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
    if method == "fp8":
        return _fp8(section)
    if method == "mxfp4":
        return WeightScheme("mxfp4", 4, 32)
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
    kind = section.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    is_reordered = section.boolean("desc_act", False)
    return WeightScheme("gptq", bits, max(group, 0), int(kind == "gptq"), is_reordered)


def _fp8(section: Fields) -> WeightScheme:
    section.choice("fmt", ("e4m3",), "e4m3")
    if not section.has("weight_block_size"):
        return WeightScheme("float-quantized", 8, 0)
    block = _block(section, "weight_block_size")
    return WeightScheme("float-quantized", 8, 0, block=block, scale_suffix="weight_scale_inv")


def _block(section: Fields, key: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    sizes: Any = section.values.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise section.fail(key, f"is {sizes!r}; expected rows and columns of a block")
    rows, columns = sizes
    if not is_int(rows, 1, MAX_GROUP) or not is_int(columns, 1, MAX_GROUP) or columns % 128:
        raise section.fail(key, f"is {sizes}; columns must be a multiple of 128")
    return rows, columns


def _compressed(section: Fields) -> WeightScheme:
    layout = section.choice("format", LAYOUTS)
    if section.has("kv_cache_scheme"):
        raise section.fail("kv_cache_scheme", "is not supported")
    groups = section.section("config_groups")
    found = {_weights_of(groups.section(name), layout) for name in groups.values}
    if not all(scheme.has_byte_activations for scheme in found):
        found = {replace(scheme, has_byte_activations=False) for scheme in found}
    if len(found) != 1:
        raise section.fail("config_groups", f"has {len(found)} schemes of weights; expected one")
    return found.pop()


def _weights_of(group: Fields, layout: str) -> WeightScheme:
    weights = group.section("weights")
    kind = weights.string("type", "int")
    expected = "float" if layout == "float-quantized" else "int"
    if kind != expected:
        raise weights.fail("type", f"is {kind!r}; only {expected!r} is supported with {layout}")
    bits = weights.integer("num_bits", 1, 16)
    if kind == "float":
        return _float_weights_of(weights, bits)
    if bits not in (4, 8):
        raise weights.fail("num_bits", f"is {bits}; expected 4 or 8")
    if weights.choice("strategy", ("group", "channel", "tensor"), "channel") != "group":
        is_w8a8 = layout == "int-quantized" and bits == 8 and weights.boolean("symmetric", True)
        return WeightScheme(layout, bits, 0, has_byte_activations=is_w8a8 and _by_token(group))
    is_reordered = weights.string("actorder", None) == "group"
    size = weights.integer("group_size", 1, MAX_GROUP)
    return WeightScheme(layout, bits, size, is_reordered=is_reordered)


def _by_token(group: Fields) -> bool:
    """Whether activations have 8 bits and one scale per token, found at run time."""
    if not group.has("input_activations"):
        return False
    found = {"type": "int", "symmetric": True, **group.section("input_activations").values}
    return all(found.get(key) == value for key, value in _BY_TOKEN.items())


def _float_weights_of(weights: Fields, bits: int) -> WeightScheme:
    if bits != 8:
        raise weights.fail("num_bits", f"is {bits}; expected 8")
    if weights.choice("strategy", ("block", "channel", "tensor"), "tensor") != "block":
        return WeightScheme("float-quantized", 8, 0)
    return WeightScheme("float-quantized", 8, 0, block=_block(weights, "block_structure"))
