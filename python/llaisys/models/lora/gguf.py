"""GGUF adapters as written by llama.cpp's convert_lora_to_gguf.py.

Tensors are `<tensor of the model>.lora_a` [rank, inputs] and `.lora_b` [outputs, rank]. The rows of
q and k of some families are in interleaved RoPE order, as in GGUF models.
"""

from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import FAMILIES
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.convert import Array, storage_dtype
from llaisys.models.loading.family import find_family
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.file_range import read_range
from llaisys.models.loading.gguf_file import PLAIN, UNREADABLE, dequantize, unpermute_rows
from llaisys.models.loading.gguf_reader import GgufTensor, read_gguf_header
from llaisys.models.lora.files import LoraFiles, LoraMatrix, base_linears, pair_matrices

MAX_ALPHA = 1e6
_LETTERS = {".lora_a": "A", ".lora_b": "B"}


def open_gguf(path: Path, config: ModelConfig) -> LoraFiles:
    """Read the header. Raises ModelLoadError."""
    where, header = str(path), read_gguf_header(path)
    fields = Fields(header.metadata, where)
    kind = fields.string("general.type", "model")
    if kind != "adapter":
        raise fields.fail("general.type", f"is {kind[:40]!r}; an adapter has 'adapter'")
    fields.choice("adapter.type", ("lora",))
    if any(key.startswith("adapter.alora") for key in header.metadata):
        raise fields.fail("adapter.alora", "is set; activated LoRA is not supported")
    by_architecture = {family.architecture(): family for family in FAMILIES.values()}
    family = find_family(by_architecture, fields.string("general.architecture"), where)
    alpha = fields.number("adapter.lora.alpha", -MAX_ALPHA, MAX_ALPHA, 0.0)
    matrices: dict[tuple[str, str], LoraMatrix] = {}
    for tensor in header.tensors.values():
        base, letter = tensor.name[:-7], _LETTERS.get(tensor.name[-7:])
        name = family.name_from_gguf(base)
        if letter is None or name is None or not name.endswith(".weight"):
            raise ModelLoadError(
                f"{where}: tensor {tensor.name!r} is not lora_a or lora_b of a "
                f"{config.model_type} layer"
            )
        if tensor.type_name in UNREADABLE:
            raise ModelLoadError(
                f"{where}: tensor {tensor.name!r} has type {tensor.type_name}, which cannot be "
                "read as weights"
            )
        module = name.removesuffix(".weight")
        heads = family.permuted_heads(name, config) if letter == "B" else None
        matrices[module, letter] = _matrix(tensor, heads)

    def scale_of(_: str, rank: int) -> float:
        return alpha / rank if alpha else 1.0  # as llama.cpp

    linears = base_linears(config, family, is_gguf=True)
    return pair_matrices(where, matrices, linears, scale_of)


def _matrix(tensor: GgufTensor, permuted_heads: int | None) -> LoraMatrix:
    stored = PLAIN.get(tensor.type_name)

    def read() -> Array:
        data = np.empty(tensor.nbytes, np.uint8)
        read_range(tensor.path, tensor.offset, data.data, tensor.file)
        if stored is None:
            values: Any = dequantize(data, tensor.type_name, tensor.shape)
        else:
            values = data.view(storage_dtype(stored)).reshape(tensor.shape)
        return values if permuted_heads is None else unpermute_rows(values, permuted_heads)

    return LoraMatrix(tensor.name, tensor.shape, stored or "f32", read)
