"""A checkpoint whose tensors have other names or layouts than the model's: fused, renamed or
reordered tensors are presented under the names that the adapter loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint, TensorBlocks, TensorRecord
from llaisys.models.loading.convert import Array, convert
from llaisys.models.loading.shard import Shard
from llaisys.models.loading.tensor_source import TensorSource

# Prefixes of the language model in the files of multimodal models.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
_TEXT_HEAD = "language_model.lm_head."


def mapped(checkpoint: Checkpoint, is_gguf: bool) -> Checkpoint:
    """The checkpoint under the names of its family's tensors; itself if they are the same."""
    config = checkpoint.config
    sources = {
        name: checkpoint.family.source(name, config, is_gguf)
        for name, _ in checkpoint.family.tensors(config)
    }
    actual = _text_names(checkpoint.names())
    if actual:
        sources = {
            name: replace(source, name=actual.get(source.name, source.name))
            for name, source in sources.items()
        }
    if all(source == TensorSource(name) for name, source in sources.items()):
        return checkpoint
    return MappedCheckpoint(checkpoint, sources)


def _text_names(names: tuple[str, ...]) -> dict[str, str]:
    """The usual name of a tensor -> its name in the files of a multimodal model."""
    found = {}
    for name in names:
        for prefix in _TEXT_PREFIXES:
            if name.startswith(prefix):
                found["model." + name.removeprefix(prefix)] = name
        if name.startswith(_TEXT_HEAD):
            found["lm_head." + name.removeprefix(_TEXT_HEAD)] = name
    return found


class MappedCheckpoint(Checkpoint):
    """`inner` under the names of `sources`; its other tensors are hidden."""

    def __init__(self, inner: Checkpoint, sources: Mapping[str, TensorSource]) -> None:
        self.inner = inner
        self.where, self.family, self.config = inner.where, inner.family, inner.config
        self.tokenizer_source = inner.tokenizer_source
        self._sources = dict(sources)

    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def source_names(self) -> set[str]:
        """Tensors of `inner` that are used."""
        return {source.name for source in self._sources.values()}

    def _find(self, name: str) -> TensorSource:
        source = self._sources.get(name)
        if source is None:
            raise ModelLoadError(f"{self.where}: tensor {name!r} is missing")
        return source

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._find(name)
        shape = self.inner.shape(source.name)
        if source.shard is None:
            return shape
        if source.shard.stop > shape[0]:
            raise ModelLoadError(
                f"{self.where}: tensor {source.name!r} has shape {list(shape)}, the config "
                f"requires at least {source.shard.stop} rows"
            )
        return source.shard.shape_in(shape)

    def record(self, name: str) -> TensorRecord | None:
        source = self._find(name)
        record = self.inner.record(source.name)
        if record is None or source.head_order is not None or source.add:
            return None
        return record if source.shard is None else record.rows(source.shard)

    def read(self, name: str, dtype: str) -> Array:
        source = self._find(name)
        inner_dtype = "f32" if source.add else dtype
        if source.shard is None:
            values = self.inner.read(source.name, inner_dtype)
        else:
            values = self.inner.read_shard(source.name, inner_dtype, source.shard)
        values = self._in_order(source, values)
        return convert(values + np.float32(source.add), "f32", dtype) if source.add else values

    def block_type(self, name: str) -> str | None:
        return self.inner.block_type(self._find(name).name)

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        source = self._find(name)
        if source.add:
            return None
        if source.head_order is None and (source.shard is None or shard is None):
            return self.inner.read_blocks(source.name, source.shard or shard)
        blocks = self.inner.read_blocks(source.name, source.shard)
        if blocks is None or (shard is not None and shard.dim != 0):
            return None
        rows = self._in_order(source, blocks.rows)
        if shard is not None:
            rows = np.ascontiguousarray(rows[shard.start : shard.stop])
        return replace(blocks, rows=rows, shape=(len(rows), *blocks.shape[1:]))

    def read_integers(self, name: str) -> Array:
        return self.inner.read_integers(self._find(name).name)

    def _in_order(self, source: TensorSource, rows: Array) -> Array:
        order = source.head_order
        if order is None:
            return rows
        if len(rows) % len(order):
            raise ModelLoadError(
                f"{self.where}: tensor {source.name!r} has {len(rows)} rows for heads of "
                f"{len(order)}"
            )
        heads = rows.reshape(-1, len(order), *rows.shape[1:])
        return np.ascontiguousarray(heads[:, list(order)]).reshape(rows.shape)

    def close(self) -> None:
        self.inner.close()
