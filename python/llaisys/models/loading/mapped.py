"""A checkpoint whose tensors have other names or layouts than the model's: fused, renamed or
reordered tensors are presented under the names that the adapter loads."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint, TensorBlocks, TensorRecord
from llaisys.models.loading.convert import Array, convert, storage_dtype
from llaisys.models.loading.shard import Shard, TensorSource

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
    present = set(checkpoint.names())
    for name, source in sources.items():
        while source.otherwise is not None and source.name not in present:
            source = source.otherwise
        sources[name] = source
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


def _names_of(source: TensorSource) -> tuple[str, ...]:
    return source.parts or (source.name,)


def _rows_of(source: TensorSource, values: Array) -> Array:
    """The rows that a stacked source takes from one tensor, given all of its rows."""
    columns = () if source.is_vector else values.shape[-1:]
    planes: Array = values.reshape(source.planes, -1, *columns)
    if source.is_transposed:
        planes = planes.swapaxes(1, 2)
    start, stop = source.rows or (0, planes.shape[1])
    chosen = planes[:, start : stop : source.step]
    if source.columns is not None:
        chosen = chosen[:, :, slice(*source.columns)]
    return chosen.reshape(-1, *chosen.shape[2:])


def _planes_of(record: TensorRecord, source: TensorSource) -> list[TensorRecord]:
    """The records of the planes of a tensor, each with the rows of the source."""
    rows, columns = prod(record.shape[:-1]) // source.planes, record.shape[-1]
    flat = replace(record, shape=(source.planes * rows, columns))
    start, stop = source.rows or (0, rows)
    return [flat.rows(Shard(0, p * rows + start, p * rows + stop)) for p in range(source.planes)]


class MappedCheckpoint(Checkpoint):
    """`inner` under the names of `sources`; its other tensors are hidden."""

    def __init__(self, inner: Checkpoint, sources: Mapping[str, TensorSource]) -> None:
        self.inner = inner
        self.where, self.family, self.config = inner.where, inner.family, inner.config
        self.tokenizer_source, self.gguf_metadata = inner.tokenizer_source, inner.gguf_metadata
        self._tensors: Mapping[str, TensorSource] = dict(sources)

    def source_names(self) -> set[str]:
        """Tensors of `inner` that are used."""
        return {source.name for source in self._tensors.values()}

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._find(name)
        if source.is_stacked:
            return self._stacked_shape(source)
        shape = self.inner.shape(source.name)
        if source.is_row:
            return (1, shape[-1])
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
        records = [self.inner.record(part) for part in _names_of(source)]
        record = records[0]
        is_moved = source.head_order is not None or source.is_stacked
        if record is None or is_moved or source.is_changed:
            return None
        if source.is_row:
            return replace(record, shape=(1, record.shape[-1]))
        return record if source.shard is None else record.rows(source.shard)

    def records(self, name: str, shard: Shard | None = None) -> list[TensorRecord] | None:
        source = self._find(name)
        if not source.is_stacked:
            return super().records(name, shard)
        if (shard is not None and shard.dim != 0) or not source.is_plain:
            return None
        found = []
        for part in _names_of(source):
            record = self.inner.record(part)
            if record is None:
                return None
            found += _planes_of(record, source)
        if shard is None:
            return found
        if shard.parts != len(found):
            return None
        return [record.rows(Shard(0, shard.start, shard.stop)) for record in found]

    def read(self, name: str, dtype: str) -> Array:
        source = self._find(name)
        if source.is_stacked:
            values = np.empty(self._stacked_shape(source), storage_dtype(dtype))
            at = 0
            for part in _names_of(source):
                rows = _rows_of(source, self.inner.read(part, dtype))
                values[at : at + len(rows)] = rows
                at += len(rows)
            return values
        if source.is_row:
            return self.inner.read(source.name, dtype).reshape(1, -1)
        inner_dtype = "f32" if source.is_changed else dtype
        if source.shard is None:
            values = self.inner.read(source.name, inner_dtype)
        else:
            values = self.inner.read_shard(source.name, inner_dtype, source.shard)
        values = self._in_order(source, values)
        if not source.is_changed:
            return values
        values = (values + np.float32(source.add)) * np.float32(source.scale)
        return convert(values, "f32", dtype)

    def block_type(self, name: str) -> str | None:
        source = self._find(name)
        return None if source.is_transposed else self.inner.block_type(source.name)

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        source = self._find(name)
        if source.is_changed or source.is_transposed:
            return None
        if source.is_stacked or source.is_row:
            return self._stacked_blocks(name, source, shard)
        if source.head_order is None and (source.shard is None or shard is None):
            return self.inner.read_blocks(source.name, source.shard or shard)
        blocks = self.inner.read_blocks(source.name, source.shard)
        if blocks is None or (shard is not None and shard.dim != 0):
            return None
        rows = self._in_order(source, blocks.rows)
        if shard is not None:
            rows = np.ascontiguousarray(rows[shard.start : shard.stop])
        return replace(blocks, rows=rows, shape=(len(rows), *blocks.shape[1:]))

    def _stacked_shape(self, source: TensorSource) -> tuple[int, ...]:
        names = _names_of(source)
        shape = self.inner.shape(source.name)
        expected = 3 if source.planes > 1 and not source.is_vector else 2
        if source.planes > 1 and len(shape) == expected - 1 and shape[0] % source.planes == 0:
            shape = (source.planes, shape[0] // source.planes, *shape[1:])
        if len(shape) != expected or (source.planes > 1 and shape[0] != source.planes):
            raise ModelLoadError(
                f"{self.where}: tensor {source.name!r} has shape {list(shape)}, the config "
                f"requires {source.planes} experts in {expected} dimensions"
            )
        for part in names:
            if source.parts and self.inner.shape(part) != shape:
                raise ModelLoadError(
                    f"{self.where}: tensor {part!r} has shape {list(self.inner.shape(part))}, "
                    f"{source.name!r} has {list(shape)}"
                )
        rows, columns = (shape[-1], 1) if source.is_vector else shape[-2:]
        if source.is_transposed:
            rows, columns = columns, rows
        if source.rows is not None:
            if source.rows[1] > rows:
                raise ModelLoadError(
                    f"{self.where}: tensor {source.name!r} has shape {list(shape)}, the config "
                    f"requires at least {source.rows[1]} rows"
                )
            rows = len(range(*source.rows, source.step))
        if source.columns is not None:
            columns = source.columns[1] - source.columns[0]
        total = rows * source.planes * len(names)
        return (total,) if source.is_vector else (total, columns)

    def _stacked_blocks(
        self, name: str, source: TensorSource, shard: Shard | None
    ) -> TensorBlocks | None:
        found = [self.inner.read_blocks(part) for part in _names_of(source)]
        first = found[0]
        if first is None or any(b is None or b.type_name != first.type_name for b in found):
            return None
        rows = np.concatenate([_rows_of(source, b.rows) for b in found if b is not None])
        shape = self.shape(name)
        if shard is not None and shard.dim == 0:
            rows, shape = shard.cut(rows), shard.shape_in(shape)
        elif shard is not None:
            if shard.start % first.block_elements or shard.stop % first.block_elements:
                return None
            begin, end = (i // first.block_elements for i in (shard.start, shard.stop))
            rows = rows[:, begin * first.block_bytes : end * first.block_bytes]
            shape = shard.shape_in(shape)
        return replace(first, rows=np.ascontiguousarray(rows), shape=shape)

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
        super().close()
        self.inner.close()
