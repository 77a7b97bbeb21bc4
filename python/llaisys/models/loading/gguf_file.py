"""GGUF files as a `Checkpoint` with Hugging Face names.

Files of some families store the rows of q and k in interleaved RoPE order. They are permuted to
rotate-half order when read, so such tensors have no record.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading import mxfp4
from llaisys.models.loading.checkpoint import Checkpoint, TensorBlocks, TensorRecord
from llaisys.models.loading.convert import CHUNK_ELEMENTS, Array, convert, storage_dtype
from llaisys.models.loading.family import Family, GgufContents, find_family
from llaisys.models.loading.fields import MAX_LAYERS, MAX_VOCAB, Fields
from llaisys.models.loading.file_range import read_range, read_rows
from llaisys.models.loading.gguf_reader import GGML_TYPES, GgufHeader, GgufTensor
from llaisys.models.loading.gguf_split import read_gguf_parts
from llaisys.models.loading.shard import Shard
from llaisys.tokenization.source import BpeVocabulary, PackedStrings, TokenizerSource

PLAIN = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Types that the gguf library cannot dequantise, and types that are not weights.
UNREADABLE = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
MAX_REPORTED = 4096  # characters of a text of the metadata


def unpermute_rows(values: Array, num_heads: int) -> Array:
    """Rows of q or k from interleaved RoPE order to rotate-half order.

    values: [num_heads * head_dim, ...]; row 2i + h of a head goes to row h * head_dim / 2 + i.
    """
    heads = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def prediction_layers(metadata: Fields, architecture: str) -> range:
    """Layers of multi-token prediction, which come last and are not loaded."""
    end = metadata.integer(f"{architecture}.block_count", 1, MAX_LAYERS)
    count = metadata.integer(f"{architecture}.nextn_predict_layers", 0, end - 1, 0)
    return range(end - count, end)


def dequantize(data: Array, type_name: str, shape: tuple[int, ...], dtype: str = "f32") -> Array:
    """Raw bytes of a quantised tensor as `dtype` elements of `shape`, by the gguf library."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    kind = GGMLQuantizationType[type_name]
    num_rows, width = math.prod(shape[:-1]), shape[-1]
    rows = data.reshape(num_rows, -1)
    result = np.empty((num_rows, width), dtype=storage_dtype(dtype))
    step = max(1, CHUNK_ELEMENTS // width)
    with np.errstate(all="ignore"):  # damaged scales may be NaN or infinite
        for start in range(0, num_rows, step):
            chunk = np.asarray(gguf_dequantize(rows[start : start + step], kind), dtype="<f4")
            result[start : start + step] = convert(chunk, "f32", dtype)
    return result.reshape(shape)


def reported_metadata(header: GgufHeader) -> dict[str, str | int | float | bool | None]:
    """The metadata with general.parameter_count; None for arrays, long texts and numbers that JSON
    does not have."""

    def reported(value: Any) -> str | int | float | None:
        if isinstance(value, str):
            return value if len(value) <= MAX_REPORTED else None
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    found = {key: reported(value) for key, value in header.metadata.items()}
    count = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return {**found, "general.parameter_count": count}


class GgufCheckpoint(Checkpoint):
    """A GGUF file, or all files of a split model. Unquantised tensors that need no reordering have
    a record."""

    def __init__(self, path: Path, families: Mapping[str, Family]) -> None:
        self.path = path
        self.where = str(path)
        header = read_gguf_parts(path)
        metadata = Fields(header.metadata, self.where)
        self.gguf_metadata = reported_metadata(header)
        architecture = metadata.string("general.architecture")
        by_architecture = {family.architecture(): family for family in families.values()}
        self.family = find_family(by_architecture, architecture, self.where)
        self._tensors: Mapping[str, GgufTensor] = {
            name: tensor
            for tensor in header.tensors.values()
            if (name := self.family.name_from_gguf(tensor.name)) is not None
        }
        contents = GgufContents(metadata, self._tensors, partial(self._read_vector, header.tensors))
        self.config = self.family.config_from_gguf(contents)
        self._check_layers(header.tensors, prediction_layers(metadata, architecture))
        self.tokenizer_source = tokenizer_from_gguf(
            metadata, self.family.gguf_pre_tokenizer, self.config.eos_token_ids
        )

    def _check_layers(self, tensors: Iterable[str], ignored: range) -> None:
        """Reject layer tensors that the forward pass would ignore (MoE, q/k norms)."""
        for name in tensors:
            if not name.startswith("blk.") or name.split(".")[1] in map(str, ignored):
                continue
            if self.family.name_from_gguf(name) is None:
                raise ModelLoadError(
                    f"{self.path}: tensor {name!r} is not part of a {self.config.model_type} layer"
                )

    def _find(self, name: str) -> GgufTensor:
        tensor: GgufTensor = super()._find(name)
        if tensor.type_name in UNREADABLE:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name!r} has type {tensor.type_name}, "
                "which cannot be read as weights"
            )
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def record(self, name: str) -> TensorRecord | None:
        tensor = self._find(name)
        dtype = PLAIN.get(tensor.type_name)
        if dtype is None or self.family.permuted_heads(name, self.config) is not None:
            return None
        return TensorRecord(
            name, dtype, tensor.shape, tensor.path, tensor.offset, tensor.nbytes, tensor.file
        )

    def block_type(self, name: str) -> str | None:
        type_name = self._find(name).type_name
        if type_name == "MXFP4":
            return mxfp4.TYPE_NAME
        return None if type_name in PLAIN else type_name

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        tensor = self._find(name)
        type_name, elements, nbytes = GGML_TYPES[tensor.type_id]
        if type_name in PLAIN:
            return None
        shard = shard or Shard(0, 0, tensor.shape[0])
        shape, stride = shard.shape_in(tensor.shape), tensor.shape[-1] // elements * nbytes
        offset = tensor.offset + shard.start * stride
        if shard.dim != 0:
            if shard.start % elements or shard.stop % elements:
                return None
            offset = tensor.offset + shard.start // elements * nbytes
        width = shape[-1] // elements * nbytes
        rows = np.empty((math.prod(shape[:-1]), width), np.uint8)
        read_rows(tensor.path, offset, width, stride, rows.reshape(-1).data, tensor.file)
        # A block never spans rows, so rows of blocks are permuted like rows of elements.
        rows = self._in_order(name, tensor, rows)
        if type_name == "MXFP4":
            blocks = mxfp4.from_ggml(rows).blocks(f"{tensor.path}: tensor {tensor.name!r}")
            return replace(blocks, shape=shape)
        return TensorBlocks(type_name, elements, nbytes, shape, rows)

    def _in_order(self, name: str, tensor: GgufTensor, rows: Array) -> Array:
        """Rows [n, ...] of the tensor, or of whole heads of it, in Hugging Face order."""
        heads = self.family.permuted_heads(name, self.config)
        if heads is None:
            return rows
        size, rest = divmod(tensor.shape[0], heads)
        if rest or size % 2:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows for {heads} "
                "heads"
            )
        return unpermute_rows(rows, len(rows) // size)

    def _read_bytes(self, tensor: GgufTensor) -> Array:
        data = np.empty(tensor.nbytes, np.uint8)
        read_range(tensor.path, tensor.offset, data.data, tensor.file)
        return data

    def _read_tensor(self, tensor: GgufTensor, dtype: str) -> Array:
        """The tensor as `dtype`, in the file's row order."""
        try:
            data = self._read_bytes(tensor)
            stored = PLAIN.get(tensor.type_name)
            if stored is None:
                return dequantize(data, tensor.type_name, tensor.shape, dtype)
            return convert(data.view(storage_dtype(stored)).reshape(tensor.shape), stored, dtype)
        except ModelLoadError:
            raise
        except MemoryError as error:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name!r}: no memory for its {tensor.nbytes} bytes"
            ) from error
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise ModelLoadError(f"{tensor.path}: tensor {tensor.name!r}: {error}") from error

    def _read_vector(
        self, tensors: Mapping[str, GgufTensor], name: str, shape: tuple[int, ...]
    ) -> Array | None:
        """A small tensor as f32; another shape is rejected before any read."""
        tensor = tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != shape or tensor.type_name not in PLAIN:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name!r} is {tensor.type_name} of shape "
                f"{list(tensor.shape)}; expected floats of shape {list(shape)}"
            )
        return self._read_tensor(tensor, "f32")

    def read(self, name: str, dtype: str) -> Array:
        storage_dtype(dtype)  # rejects an unknown name before any read
        tensor = self._find(name)
        return self._in_order(name, tensor, self._read_tensor(tensor, dtype))


_ARRAY_KINDS = {"i": int, "u": int, "f": float}  # by numpy's kind of dtype
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def tokenizer_from_gguf(
    fields: Fields, default_pre_tokenizer: str, eos_token_ids: tuple[int, ...]
) -> TokenizerSource:
    """Type-checked tokenizer metadata, from which `Tokenizer` is built."""
    model = fields.string("tokenizer.ggml.model", None)
    if model not in ("gpt2", "llama", "bert"):
        known = "gpt2 (byte-level BPE), llama (SentencePiece BPE), bert (WordPiece)"
        why = f"{fields.where}: tokenizer.ggml.model {model!r} is not supported; known: {known}"
        return TokenizerSource(missing=why)
    vocabulary = _vocabulary(fields, model, default_pre_tokenizer)
    kinds = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    special_ids = []
    for name, key in kinds:
        value = fields.integer(f"tokenizer.ggml.{key}_token_id", 0, MAX_VOCAB, None)
        if value is not None and value < len(vocabulary.tokens):
            special_ids.append((f"{name}_token", int(value)))
    return TokenizerSource(
        vocabulary=vocabulary,
        chat_template=fields.string("tokenizer.chat_template", None),
        special_ids=tuple(special_ids),
        eos_token_ids=eos_token_ids,
    )


def _vocabulary(fields: Fields, model: str, default_pre_tokenizer: str) -> BpeVocabulary:
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    types = _array(fields, "tokenizer.ggml.token_type", int, len(tokens))
    if model == "bert":
        return BpeVocabulary(tokens=tokens, token_types=types, is_word_piece=True)
    add_eos = fields.boolean("tokenizer.ggml.add_eos_token", False)
    if model == "gpt2":
        pre = fields.string("tokenizer.ggml.pre", default_pre_tokenizer)
        return BpeVocabulary(
            tokens=tokens,
            token_types=types,
            merges=_texts(fields, "tokenizer.ggml.merges"),
            pre_tokenizer=pre,
            add_bos=fields.boolean("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT),
            add_eos=add_eos,
        )
    scores = _array(fields, "tokenizer.ggml.scores", float, len(tokens))
    if not scores:
        raise fields.fail("tokenizer.ggml.scores", "is missing")
    return BpeVocabulary(
        tokens=tokens,
        token_types=types,
        scores=scores,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", True),
        add_eos=add_eos,
        add_space_prefix=fields.boolean("tokenizer.ggml.add_space_prefix", True),
    )


def _texts(fields: Fields, key: str) -> PackedStrings:
    value = fields.values.get(key)
    if isinstance(value, np.ndarray) and not len(value):
        return PackedStrings()
    if not isinstance(value, (PackedStrings, np.ndarray)):
        raise fields.fail(key, "is missing or not an array")
    if not isinstance(value, PackedStrings):
        raise fields.fail(key, "must be an array of str")
    return value


def _array(fields: Fields, key: str, kind: type, length: int) -> tuple[Any, ...]:
    """An array of `length` numbers of `kind`; empty when absent."""
    value = fields.values.get(key)
    if value is None:
        return ()
    if not isinstance(value, (PackedStrings, np.ndarray)):
        raise fields.fail(key, "is missing or not an array")
    found = _ARRAY_KINDS.get(value.dtype.kind) if isinstance(value, np.ndarray) else str
    if len(value) and found is not kind:
        raise fields.fail(key, f"must be an array of {kind.__name__}")
    if len(value) != length:
        raise fields.fail(key, f"has {len(value)} items for {length} tokens")
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else ()
