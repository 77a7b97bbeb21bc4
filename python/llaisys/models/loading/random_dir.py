"""Model directories without weights: config.json with the key `random_weights`.

Every tensor of the config exists; the adapter makes its values in memory. For benchmarks of models
that are larger than the disk.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint, TensorRecord
from llaisys.models.loading.convert import Array, convert
from llaisys.models.loading.family import Family
from llaisys.tokenization.json_file import read_json_object
from llaisys.tokenization.source import TokenizerSource

KEY = "random_weights"
PLAIN = "plain"  # weights of torch_dtype
BLOCKS = ("f8_g128", "i4_g128")  # linear weights in blocks; embedding and head are plain


class RandomCheckpoint(Checkpoint):
    def __init__(self, directory: Path, family: Family, config: Any) -> None:
        """`family` and `config`: the result of `read_config`."""
        self.where = str(directory)
        self.family = family
        self.config = replace(config, dtype="bf16") if config.dtype == "auto" else config
        self.tokenizer_source = TokenizerSource.of_directory(directory, self.config.eos_token_ids)
        kind = read_json_object(directory / "config.json").get(KEY)
        if kind not in (PLAIN, *BLOCKS):
            raise ModelLoadError(
                f"{directory}: {KEY} is {kind!r}; it must be one of {', '.join((PLAIN, *BLOCKS))}"
            )
        self._blocks = None if kind == PLAIN else str(kind)
        self._tensors = dict(family.tensors(self.config))  # shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)

    def record(self, name: str) -> TensorRecord | None:
        self.shape(name)
        return None

    def read(self, name: str, dtype: str) -> Array:
        shape = self.shape(name)
        return convert(random_values(name, shape), "f32", dtype)

    def block_type(self, name: str) -> str | None:
        shape = self.shape(name)
        is_linear = name.endswith("_proj.weight") and shape[-1] % 128 == 0
        return self._blocks.upper() if self._blocks is not None and is_linear else None


def is_random(directory: Path) -> bool:
    """Whether the config.json of a model directory has the key."""
    path = directory / "config.json"
    return path.is_file() and KEY in read_json_object(path)


def random_values(name: str, shape: tuple[int, ...]) -> Array:
    """Norms are one, other values normal with a standard deviation of 0.02; large tensors repeat
    them."""
    if "norm" in name and len(shape) == 1:
        return np.ones(shape, np.float32)
    size = int(np.prod(shape))
    some = np.random.default_rng(0).standard_normal(min(size, 1 << 20), np.float32)
    return np.asarray(np.resize(some * np.float32(0.02), shape), np.float32)
