"""Tiny model directories in the formats of GPTQ, AWQ and compressed-tensors, packed from random
integers, and their dequantised weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from model_files import tiny_config, tiny_weights, write_tiny_tokenizer
from safetensors.numpy import save_file

from llaisys.models.loading.convert import Array

CONFIG = tiny_config("qwen2", hidden_size=128, intermediate_size=256)
# Activations of W8A8 checkpoints: one scale per token, found at run time.
BY_TOKEN = (("num_bits", 8), ("type", "int"), ("strategy", "token"), ("dynamic", True))
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Scheme:
    """A quantisation format; `group` 0: one scale per row."""

    name: str  # 'gptq', 'gptq_v2', 'awq', 'pack-quantized', 'int-quantized'
    bits: int
    group: int
    has_zeros: bool = True  # compressed-tensors: asymmetric
    scales: str = "<f2"
    activations: tuple[tuple[str, Any], ...] = ()  # compressed-tensors: of W8A8

    def config(self) -> dict[str, Any]:
        if self.name in ("gptq", "gptq_v2"):
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group or -1,
                "desc_act": False, "checkpoint_format": self.name,
            }  # fmt: skip
        if self.name == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm"}
        strategy = {"strategy": "group", "group_size": self.group}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": not self.has_zeros}
        weights |= strategy if self.group else {"strategy": "channel"}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
        if self.activations:
            group["input_activations"] = dict(self.activations)
        return {
            "quant_method": "compressed-tensors",
            "format": self.name,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }

    def quantise(self, shape: tuple[int, int], seed: int) -> tuple[dict[str, Array], Array]:
        """(tensors by suffix, dequantised f32 values) of a random weight."""
        rng = np.random.default_rng(seed)
        n, k = shape
        groups = k // self.group if self.group else 1
        top = 1 << self.bits
        q = rng.integers(0, top, shape)
        offset = int(self.name == "gptq")  # stored minus one
        zeros = rng.integers(offset, top + offset, (n, groups))
        if self.name in ("pack-quantized", "int-quantized") and not self.has_zeros:
            zeros = np.full((n, groups), top // 2)
        scales = (rng.uniform(0.5, 1.5, (n, groups)) * 0.4 / top).astype(self.scales)
        column = np.arange(k) * groups // k
        values = (q - zeros[:, column]).astype(np.float32) * scales.astype(np.float32)[:, column]
        return self._tensors(q, zeros - offset, scales), values

    def _tensors(self, q: Array, zeros: Array, scales: Array) -> dict[str, Array]:
        n, k = q.shape
        if self.name in ("gptq", "gptq_v2"):
            return {
                "qweight": words(q.T, self.bits, 0),
                "qzeros": words(zeros.T, self.bits, 1),
                "scales": np.ascontiguousarray(scales.T),
                "g_idx": (np.arange(k) * scales.shape[1] // k).astype("<i4"),
            }
        if self.name == "awq":
            return {
                "qweight": words(_in_awq_order(q.T), 4, 1),
                "qzeros": words(_in_awq_order(zeros.T), 4, 1),
                "scales": np.ascontiguousarray(scales.T),
            }
        middle = 1 << (self.bits - 1)
        made: dict[str, Array] = {"weight_scale": scales}
        if self.name == "pack-quantized":
            made["weight_packed"] = words(q, self.bits, 1)
            made["weight_shape"] = np.array([n, k], "<i8")
            if self.has_zeros:
                made["weight_zero_point"] = words(zeros, self.bits, 0)
        else:
            made["weight"] = (q - middle).astype(np.int8)
            if self.has_zeros:
                made["weight_zero_point"] = (zeros - middle).astype(np.int8)
        return made


def words(values: Array, bits: int, axis: int) -> Array:
    """Pack values along an axis into int32 words, lowest bits first, zero-padded."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    per_word = 32 // bits
    moved = np.pad(moved, ((0, 0), (0, -moved.shape[1] % per_word)))
    packed = np.zeros((len(moved), moved.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        packed |= moved[:, i::per_word] << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view("<i4")


def _in_awq_order(values: Array) -> Array:
    """Columns in AWQ's order, lowest bits of a word first."""
    rows, columns = values.shape
    return values.reshape(rows, columns // 8, 8)[:, :, _AWQ_ORDER].reshape(rows, columns)


def write_quantised(
    directory: Path, scheme: Scheme, **changes: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Write a model directory; returns (dequantised f32 weights, written tensors). `changes`
    replaces tensors by name; None removes one."""
    directory.mkdir(parents=True, exist_ok=True)
    worth, stored = tiny_weights(CONFIG), {}
    for number, (name, values) in enumerate(list(worth.items())):
        if "proj.weight" not in name:
            stored[name] = values
            continue
        tensors, worth[name] = scheme.quantise((values.shape[0], values.shape[1]), number)
        module = name.removesuffix("weight")
        stored |= {module + suffix: tensor for suffix, tensor in tensors.items()}
    stored |= changes
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, directory / "model.safetensors")
    config = CONFIG | {"quantization_config": scheme.config()}
    (directory / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(directory)
    return worth, stored
