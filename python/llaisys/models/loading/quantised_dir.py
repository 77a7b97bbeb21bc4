"""Hugging Face directories with weights in FP8 or quantised by GPTQ, AWQ or compressed-tensors.

A quantised matrix has the name `<module>.weight`, whatever tensors store it. Modules that are not
quantised (such as the output matrix) are read as in any other directory.

Columns that do not lie in group order (GPTQ's act-order) have no block format of their own: such
matrices become Q8_0, whose rounding error is far below that of 4 bits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading import f8_weight, grouped_weight
from llaisys.models.loading.checkpoint import TensorBlocks, TensorRecord
from llaisys.models.loading.convert import STORAGE, Array, convert, storage_dtype
from llaisys.models.loading.f8_weight import F8Weight
from llaisys.models.loading.family import Family
from llaisys.models.loading.grouped_weight import GroupedWeight, q8_0_blocks, span_of
from llaisys.models.loading.quantization import WeightScheme
from llaisys.models.loading.safetensors_dir import SafetensorsCheckpoint
from llaisys.models.loading.shard import Shard

# Layout -> suffix of the tensor that marks a quantised module.
_SUFFIXES = {
    "gptq": ".qweight",
    "awq": ".qweight",
    "pack-quantized": ".weight_packed",
    "int-quantized": ".weight_scale",
}
_FLOATS = tuple(STORAGE)


class QuantisedCheckpoint(SafetensorsCheckpoint):
    """Quantised matrices have no record: use `read_blocks`, or `read` to dequantise."""

    def __init__(self, directory: Path, family: Family, config: Any) -> None:
        super().__init__(directory, family, config)
        self._scheme: WeightScheme = config.quantization
        suffix = _SUFFIXES.get(self._scheme.layout, "." + self._scheme.scale_suffix)
        self._modules = {
            name.removesuffix(suffix) + ".weight": name.removesuffix(suffix)
            for name in self._tensors
            if name.endswith(suffix)
        }
        self._check_biases()

    def _check_biases(self) -> None:
        """GPTQ writes a bias for every module: one that the model does not have must be 0."""
        expected = {name for name, _ in self.family.tensors(self.config)}
        for module in self._modules.values():
            name = module + ".bias"
            if name in self._tensors and name not in expected and self.read(name, "f32").any():
                raise ModelLoadError(
                    f"{self.where}: tensor {name!r} is not zero, and a {self.config.model_type} "
                    "model has no such bias"
                )

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._tensors, *self._modules]))

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._modules:
            return super().shape(name)
        return self._parts(self._modules[name])[1]

    def record(self, name: str) -> TensorRecord | None:
        if name not in self._modules:
            return super().record(name)
        self._parts(self._modules[name])  # raises
        return None

    def read(self, name: str, dtype: str) -> Array:
        storage_dtype(dtype)  # rejects an unknown name before any read
        if name not in self._modules:
            return super().read(name, dtype)
        return convert(self.weight(self._modules[name]).values(), "f32", dtype)

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        if name not in self._modules:
            return super().read_blocks(name, shard)
        weight = self.weight(self._modules[name])
        if isinstance(weight, F8Weight):
            return weight.blocks(shard)
        if self._scheme.is_reordered:
            values = weight.values()
            return q8_0_blocks(values if shard is None else values[shard.index()])
        part = weight if shard is None else weight.cut(shard)
        return part.channel_blocks(name) if self._scheme.has_byte_activations else part.blocks(name)

    def block_type(self, name: str) -> str | None:
        if name not in self._modules:
            return super().block_type(name)
        _, columns = self.shape(name)
        if self._scheme.layout == "float-quantized":
            return f8_weight.TYPE_NAME if columns % f8_weight.SPAN == 0 else None
        if self._scheme.is_reordered:
            return "Q8_0" if columns % grouped_weight.Q8_0_SPAN == 0 else None
        group = min(self._scheme.group_size or columns, columns)
        bits = 8 if self._scheme.layout == "int-quantized" else self._scheme.bits
        span = span_of(columns, group, f"{self.where}: tensor {name!r}")
        return grouped_weight.CHANNEL if self._scheme.has_byte_activations else f"I{bits}_G{span}"

    def _stored(self, name: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> TensorRecord:
        """The record of a tensor that must have this dtype and shape."""
        record: TensorRecord = self._find(name)
        if record.dtype not in kinds or record.shape != shape:
            raise ModelLoadError(
                f"{record.path}: tensor {name!r} is {record.dtype} of shape {list(record.shape)}; "
                f"the config requires {' or '.join(kinds)} of shape {list(shape)}"
            )
        return record

    def _array(self, record: TensorRecord) -> Array:
        """The elements: integers unchanged, others as f32."""
        values = record.read()
        return convert(values, record.dtype, "f32") if record.dtype in _FLOATS else values

    def _parts(self, module: str) -> tuple[dict[str, TensorRecord], tuple[int, int]]:
        """The tensors of a module by their role, and [out, in] of its weight; raises unless they
        are consistent."""
        scheme = self._scheme
        per_word = 32 // scheme.bits
        if scheme.layout in ("gptq", "awq"):
            main = self._find(module + ".qweight")
            rows, columns = _two(main)
            by_rows = scheme.layout == "gptq"
            k, n = (rows * per_word, columns) if by_rows else (rows, columns * per_word)
            groups = self._groups(main, k)
            parts = {
                "q": self._stored(main.name, ("I32",), main.shape),
                "zeros": self._stored(module + ".qzeros", ("I32",), (groups, n // per_word)),
                "scales": self._stored(module + ".scales", _FLOATS, (groups, n)),
            }
            if module + ".g_idx" in self._tensors:
                parts["order"] = self._stored(module + ".g_idx", ("I32",), (k,))
            return parts, (n, k)
        if scheme.layout == "float-quantized":
            return self._f8_parts(module)
        packed = scheme.layout == "pack-quantized"
        main = self._find(module + (".weight_packed" if packed else ".weight"))
        n, k = _two(main)
        k *= per_word if packed else 1
        parts = {"q": self._stored(main.name, ("I32",) if packed else ("I8",), main.shape)}
        groups = self._groups(main, k)
        scales = self._find(module + ".weight_scale")
        shape = scales.shape if scales.shape in ((1,), (1, 1), (n,)) else (n, groups)
        parts["scales"] = self._stored(scales.name, _FLOATS, shape)
        zeros = module + ".weight_zero_point"
        if zeros in self._tensors:
            kind, rows = ("I32", -(-n // per_word)) if packed else ("I8", n)
            parts["zeros"] = self._stored(zeros, (kind,), (rows, groups))
        if module + ".weight_g_idx" in self._tensors:
            parts["order"] = self._stored(module + ".weight_g_idx", ("I32",), (k,))
        return parts, (n, k)

    def _f8_parts(self, module: str) -> tuple[dict[str, TensorRecord], tuple[int, int]]:
        main = self._find(module + ".weight")
        n, k = _two(main)
        scales = self._find(f"{module}.{self._scheme.scale_suffix}")
        shape: tuple[int, ...] = (n, 1)
        if self._scheme.block is not None:
            rows, columns = self._scheme.block
            shape = (-(-n // rows), -(-k // columns))
        elif scales.shape in ((), (1,), (n,)):
            shape = scales.shape
        return {
            "q": self._stored(main.name, ("F8_E4M3",), main.shape),
            "scales": self._stored(scales.name, _FLOATS, shape),
        }, (n, k)

    def _groups(self, main: TensorRecord, k: int) -> int:
        """Groups per row of k columns."""
        size = self._scheme.group_size or k
        if k % size and size < k:
            raise ModelLoadError(
                f"{main.path}: tensor {main.name!r} of shape {list(main.shape)} has {k} columns, "
                f"not a multiple of group_size {size}"
            )
        return max(1, k // size)

    def weight(self, module: str) -> GroupedWeight | F8Weight:
        scheme = self._scheme
        parts, (n, k) = self._parts(module)
        group = min(scheme.group_size or k, k)
        q, scales = self._array(parts["q"]), self._array(parts["scales"])
        if scheme.layout == "float-quantized":
            what = f"{self.where}: tensor {parts['q'].name!r}"
            return f8_weight.from_scales(q, scales, scheme.block or (1, k), what)
        zeros = self._array(parts["zeros"]) if "zeros" in parts else None
        if scheme.layout in ("gptq", "awq"):
            assert zeros is not None
            if scheme.layout == "awq":
                weight = grouped_weight.from_awq(q, zeros, scales, group)
            else:
                bits, offset = scheme.bits, scheme.zero_offset
                weight = grouped_weight.from_gptq(q, zeros, scales, bits, group, offset)
        else:
            scales = np.broadcast_to(scales.reshape(-1, k // group), (n, k // group))
            if scheme.layout == "pack-quantized":
                weight = grouped_weight.from_packed(q, zeros, scales, scheme.bits, group)
            else:
                weight = grouped_weight.from_bytes(q, zeros, scales, group)
        return replace(weight, order=self._order(parts["order"], k)) if "order" in parts else weight

    def _order(self, record: TensorRecord, k: int) -> Array | None:
        """Group of each column; None: they lie in group order."""
        order = record.read()
        group = min(self._scheme.group_size or k, k)
        if np.array_equal(order, np.arange(k) // group):
            return None
        if order.min() < 0 or order.max() >= max(1, k // group):
            raise ModelLoadError(
                f"{self.where}: tensor {record.name!r} has groups from {order.min()} to "
                f"{order.max()}; expected 0 to {max(1, k // group) - 1}"
            )
        if not self._scheme.is_reordered:
            raise ModelLoadError(
                f"{self.where}: tensor {record.name!r} of shape [{k}] reorders the columns of "
                "groups, but the config sets no desc_act or actorder"
            )
        return order


def _two(record: TensorRecord) -> tuple[int, int]:
    if len(record.shape) != 2:
        raise ModelLoadError(
            f"{record.path}: tensor {record.name!r} has shape {list(record.shape)}; expected two "
            "dimensions"
        )
    return record.shape[0], record.shape[1]
