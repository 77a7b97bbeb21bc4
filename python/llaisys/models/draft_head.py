"""Draft heads: one layer over tokens and hidden states of the target model. EAGLE and EAGLE-3
directories, and MTP layers in the model's files or in a directory.

A head without an embedding or output matrix uses the model's, with the rows that d2t selects. The
tensors determine the kind of a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llaisys.common.closing import closed_on_error
from llaisys.common.errors import ModelLoadError
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput
from llaisys.common.validation import invalid_value
from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.model_handle import scratch_bytes
from llaisys.libllaisys.types import (
    DRAFT_HEAD_KINDS,
    DTYPE_BYTES,
    QUANTISED_DTYPES,
    LlaisysDecoderMeta,
    LlaisysDraftHeadMeta,
)
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import dtype_of, keeps_blocks
from llaisys.models.decoder_meta import decoder_meta
from llaisys.models.device import MemoryNeeds
from llaisys.models.families import FAMILIES
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.load_quantization import quantise, quantised_dtype
from llaisys.models.loading.checkpoint import Checkpoint, TensorBlocks
from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.grouped_weight import device_blocks
from llaisys.models.loading.json_config import read_config
from llaisys.models.loading.safetensors_dir import SafetensorsCheckpoint
from llaisys.models.native import NativeAdapter, create_params, kv_head_bytes
from llaisys.models.tensors import tensor_from, tensor_from_blocks
from llaisys.tokenization.json_file import read_json_object

MTP_PREFIX = "model.mtp_layers.0."
# kind -> prefix of its layer's tensors
_PREFIXES = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": MTP_PREFIX}
# kind -> weight field -> tensor name of each norm
_NORMS = {
    "eagle": {"mlp_norm_w": "layers.0.post_attention_layernorm"},
    "eagle3": {
        "token_norm_w": "midlayer.input_layernorm",
        "hidden_norm_w": "midlayer.hidden_norm",
        "mlp_norm_w": "midlayer.post_attention_layernorm",
        "out_norm_w": "norm",
    },
    "mtp": {
        "token_norm_w": f"{MTP_PREFIX}token_layernorm",
        "hidden_norm_w": f"{MTP_PREFIX}hidden_layernorm",
        "attn_norm_w": f"{MTP_PREFIX}input_layernorm",
        "mlp_norm_w": f"{MTP_PREFIX}post_attention_layernorm",
        "out_norm_w": f"{MTP_PREFIX}final_layernorm",
    },
}
# (weight field, tensor of the head, its whole shape, columns of the weight; None: all)
_Weight = tuple[str, str, tuple[int, ...], slice | None]


@dataclass(frozen=True, slots=True)
class DraftHeadFiles:
    """An open draft head and its target model. `close` does not close the model."""

    kind: str  # "eagle", "eagle3" or "mtp"
    config: ModelConfig  # of the one layer; vocab_size: number of tokens it can propose
    files: Checkpoint
    model: Checkpoint
    n_features: int  # hidden states of the model per token
    layers: tuple[int, ...]  # layers they come from, as in llaisysModelKeepHidden
    token_ids: NDArray[np.int64] | None  # [vocab_size]: target model ids; None: the same

    @property
    def where(self) -> str:
        return self.files.where

    def close(self) -> None:
        if self.files is not self.model:
            self.files.close()

    def has(self, name: str) -> bool:
        return name in self.files.names()

    def weights(self, dtype: str) -> Iterator[tuple[str, Callable[[], Array], bool]]:
        """(weight field, reader, is a vector) of every weight; matrices as `dtype`, vectors as
        f32."""
        yield "in_embed", self._reader(EMBEDDING, "embed_tokens.weight", dtype), False
        yield "out_embed", self._output(dtype), False
        for field, name, shape, columns in self.own_weights():
            is_vector = len(shape) == 1
            yield (
                field,
                partial(self._read, name, "f32" if is_vector else dtype, columns),
                is_vector,
            )

    def own_weights(self) -> Iterator[_Weight]:
        """The weights of the layer."""
        config, prefix = self.config, _PREFIXES[self.kind]
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        first, second = slice(0, hidden), slice(hidden, 2 * hidden)
        for field, name in _NORMS[self.kind].items():
            yield field, f"{name}.weight", (hidden,), None
        yield "attn_o_w", f"{prefix}self_attn.o_proj.weight", (hidden, q), None
        yield "mlp_gate_w", f"{prefix}mlp.gate_proj.weight", (inner, hidden), None
        yield "mlp_up_w", f"{prefix}mlp.up_proj.weight", (inner, hidden), None
        yield "mlp_down_w", f"{prefix}mlp.down_proj.weight", (hidden, inner), None
        for letter, rows in (("q", q), ("k", kv), ("v", kv)):
            name = f"{prefix}self_attn.{letter}_proj"
            if self.kind == "eagle3":
                yield f"attn_{letter}_token_w", f"{name}.weight", (rows, 2 * hidden), first
                yield f"attn_{letter}_w", f"{name}.weight", (rows, 2 * hidden), second
            else:
                yield f"attn_{letter}_w", f"{name}.weight", (rows, hidden), None
            if self.has(f"{name}.bias"):
                yield f"attn_{letter}_b", f"{name}.bias", (rows,), None
        if self.kind == "eagle3":
            yield "feature_w", "fc.weight", (hidden, self.n_features * hidden), None
            return
        # EAGLE: token, then feature; MTP: feature, then token.
        fuse, token, feature = "fc", first, second
        if self.kind == "mtp":
            fuse, token, feature = f"{MTP_PREFIX}input_proj", second, first
        yield "fuse_token_w", f"{fuse}.weight", (hidden, 2 * hidden), token
        yield "fuse_hidden_w", f"{fuse}.weight", (hidden, 2 * hidden), feature
        if self.has(f"{fuse}.bias"):
            yield "fuse_b", f"{fuse}.bias", (hidden,), None

    def _read(self, name: str, dtype: str, columns: slice | None = None) -> Array:
        values = self.files.read(name, dtype)
        return values if columns is None else np.ascontiguousarray(values[:, columns])

    @property
    def quantised_model(self) -> bool:
        """Whether the model's embedding has a quantised dtype that the kernels support."""
        return (self.model.block_type(EMBEDDING) or "").lower() in QUANTISED_DTYPES

    def shared_blocks(self, field: str) -> TensorBlocks | None:
        """The quantised blocks of a table that the head shares with the model; None: not shared or
        not quantised."""
        names = {"in_embed": (EMBEDDING, "embed_tokens.weight"), "out_embed": self._output_names()}
        if field not in names or self._is_own(names[field][1]):
            return None
        blocks = self.model.read_blocks(names[field][0])
        if blocks is None or blocks.type_name.lower() not in QUANTISED_DTYPES:
            return None
        if field == "in_embed" or self.token_ids is None:
            return blocks
        shape = (len(self.token_ids), *blocks.shape[1:])
        return replace(blocks, rows=blocks.rows[self.token_ids], shape=shape)

    def _is_own(self, name: str) -> bool:
        return self.has(name) and self.files is not self.model

    def _reader(self, shared: str, own: str, dtype: str) -> Callable[[], Array]:
        """Reader of the head's tensor `own`, else of the model's tensor `shared`."""
        if self._is_own(own):
            return partial(self._read, own, dtype)
        return partial(self.model.read, shared, dtype)

    def _output(self, dtype: str) -> Callable[[], Array]:
        """Reader of the output matrix: the head's, else the model's rows of its draft tokens."""
        shared, own = self._output_names()
        read, ids = self._reader(shared, own, dtype), self.token_ids
        if ids is None or self._is_own(own):
            return read
        return lambda: np.ascontiguousarray(read()[ids])

    def _output_names(self) -> tuple[str, str]:
        """Names of the output matrix in the model's and in the head's files."""
        tied = decoder_config(self.model).tie_word_embeddings
        return EMBEDDING if tied else OUTPUT, "lm_head.weight"


def open_draft_head(directory: Path | None, model: Checkpoint) -> DraftHeadFiles:
    """Open the head in `directory`, else the model's MTP layer. Raises ModelLoadError when there
    is no head or it does not fit the model."""
    if directory is None:
        return _head_of(model, model, {})
    files = SafetensorsCheckpoint(directory, *read_config(directory, FAMILIES))
    with closed_on_error(files):
        return _head_of(files, model, read_json_object(directory / "config.json"))


def _head_of(files: Checkpoint, model: Checkpoint, values: dict[str, Any]) -> DraftHeadFiles:
    names = set(files.names())
    kind = next((k for k in ("eagle3", "mtp", "eagle") if _is(k, names)), None)
    if kind is None:
        raise ModelLoadError(
            f"{files.where}: no draft head: neither midlayer.* (EAGLE-3), {MTP_PREFIX}* (MTP) nor "
            "fc.weight with layers.0.* (EAGLE)"
        )
    target = decoder_config(model)
    config = replace(decoder_config(files), num_layers=1)
    if config.hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"{files.where}: hidden_size is {config.hidden_size}; the model's is "
            f"{target.hidden_size}"
        )
    n_features = files.shape("fc.weight")[1] // config.hidden_size if kind == "eagle3" else 1
    layers: tuple[int, ...] = (-1,)
    if kind == "eagle3":
        layers = _feature_layers(Fields(values, files.where), target.num_layers, n_features)
    has_own = files is not model and "lm_head.weight" in names
    vocab = target.vocab_size
    if has_own or "d2t" in names:
        vocab = files.shape("lm_head.weight" if has_own else "d2t")[0]
    token_ids = _token_ids(files, vocab, target.vocab_size) if "d2t" in names else None
    if token_ids is None and vocab != target.vocab_size:
        raise ModelLoadError(
            f"{files.where}: lm_head has {vocab} rows for {target.vocab_size} tokens, and no d2t"
        )
    config = replace(config, vocab_size=vocab, sliding_window=None, window_layers=())
    head = DraftHeadFiles(kind, config, files, model, n_features, layers, token_ids)
    _check_shapes(head)
    return head


def _is(kind: str, names: set[str]) -> bool:
    fuse = f"{MTP_PREFIX}input_proj.weight" if kind == "mtp" else "fc.weight"
    return fuse in names and f"{_PREFIXES[kind]}self_attn.q_proj.weight" in names


def _feature_layers(fields: Fields, num_layers: int, n_features: int) -> tuple[int, ...]:
    """Layers whose inputs an EAGLE-3 head uses: from its config, else early, middle and late."""
    layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    if fields.has("eagle_config"):
        given = fields.section("eagle_config").values.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(given, list) and all(type(layer) is int for layer in given):
            layers = tuple(given)
    if len(layers) != n_features or not all(0 <= layer <= num_layers for layer in layers):
        raise fields.fail(
            "fc.weight", f"takes {n_features} hidden states; {list(layers)} of {num_layers} layers"
        )
    return layers


def _token_ids(files: Checkpoint, count: int, vocab: int) -> NDArray[np.int64]:
    """Target model ids; d2t stores the difference to the draft ids."""
    offsets = files.read_integers("d2t")
    if offsets.shape != (count,):
        raise ModelLoadError(f"{files.where}: d2t has shape {list(offsets.shape)}, not [{count}]")
    ids = offsets + np.arange(count)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        raise ModelLoadError(f"{files.where}: d2t has ids outside the {vocab} tokens of the model")
    return ids


def _check_shapes(head: DraftHeadFiles) -> None:
    """Check the head's tensors; the library checks the rest."""
    for _, name, shape, _ in head.own_weights():
        found = head.files.shape(name)
        if found != shape:
            raise ModelLoadError(
                f"{head.where}: tensor {name!r} has shape {list(found)}, the config requires "
                f"{list(shape)}"
            )


def _native_metas(
    checkpoint: DraftHeadFiles, options: AdapterOptions
) -> tuple[LlaisysDecoderMeta, LlaisysDraftHeadMeta]:
    """The second contains the first, which owns the arrays."""
    config = checkpoint.config
    layers = range(config.num_layers)
    decoder = decoder_meta(config, dtype_of(config, options), options.max_model_len, layers)
    return decoder, LlaisysDraftHeadMeta(
        decoder=decoder,
        in_voc=checkpoint.model.config.vocab_size,
        n_features=checkpoint.n_features,
        kind=DRAFT_HEAD_KINDS[checkpoint.kind],
    )


class DraftHeadAdapter(NativeAdapter):
    """`checkpoint` of the class methods: DraftHeadFiles."""

    token_ids: NDArray[np.int64] | None  # target model id of each draft id; None: the same

    @classmethod
    def kv_bytes_per_token(cls, checkpoint: DraftHeadFiles, options: AdapterOptions) -> int:
        config, dtype = checkpoint.config, options.kv_cache_dtype
        dtype = dtype_of(config, options) if dtype == "auto" else dtype
        return 2 * config.num_kv_heads * kv_head_bytes(dtype, config.head_dim)

    @classmethod
    def memory_needs(
        cls, checkpoint: DraftHeadFiles, options: AdapterOptions, max_num_seqs: int
    ) -> MemoryNeeds:
        config, size = checkpoint.config, DTYPE_BYTES[dtype_of(checkpoint.config, options)]
        hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
        layer = hidden * (
            (checkpoint.n_features + 2) * hidden
            + 2 * (heads + config.num_heads) * config.head_dim
            + 3 * config.intermediate_size
        )
        tables = (checkpoint.model.config.vocab_size + config.vocab_size) * hidden
        features = 2 * 4 * checkpoint.n_features * hidden  # captured by the model, and the input
        _decoder, meta = _native_metas(checkpoint, options)
        params = create_params("draft_head", meta, options)
        return MemoryNeeds(
            weights=size * (layer + tables),
            activations=scratch_bytes(params, max_num_seqs) + features * options.max_batch_tokens,
            logits=4 * config.vocab_size * max_num_seqs,
        )

    @classmethod
    def _create(cls, checkpoint: DraftHeadFiles, options: AdapterOptions) -> Self:
        decoder, meta = _native_metas(checkpoint, options)
        adapter = cls("draft_head", decoder, options, meta)
        adapter.token_ids = checkpoint.token_ids
        return adapter

    def _fill(
        self, checkpoint: DraftHeadFiles, options: AdapterOptions, check: Callable[[], None]
    ) -> None:
        """Load the weights. Beside a quantised target model the head is quantised too:
        tables as in the model or else in 8 bits, the layer in 4 bits."""
        dtype = dtype_of(checkpoint.config, options)
        is_quantised = keeps_blocks(options) and checkpoint.quantised_model
        with Stream(n_threads=options.n_threads) as stream:
            for field, read, is_vector in checkpoint.weights(dtype):
                check()
                blocks = checkpoint.shared_blocks(field) if is_quantised else None
                if blocks is not None:
                    blocks = device_blocks(blocks, options.device, field)
                    name = blocks.type_name.lower()
                    tensor = tensor_from_blocks(blocks.rows, blocks.shape, name)
                else:
                    tensor = tensor_from(read(), "f32" if is_vector else dtype)
                    choice = "int8" if field in ("in_embed", "out_embed") else "int4"
                    to = quantised_dtype(choice, field, tensor.shape) if is_quantised else None
                    if to is not None:
                        tensor = quantise(tensor, to, stream)
                with tensor:
                    self.native.replace_weight(field, 0, tensor)

    def forward_features(
        self, step: ModelStepInput, attention: AttentionMetadata, features: NDArray[np.float32]
    ) -> ForwardOutput:
        """Run a step over tokens with features [n, hidden or feature size]; its hidden states are
        `hidden_states` afterwards."""
        if features.ndim != 2 or len(features) != len(step.token_ids):
            rows = len(step.token_ids)
            raise invalid_value("features", list(features.shape), f"[{rows}, n], a row per token")
        self.native.step(self._filled_step(step, attention, features))
        return self.last_output()

    def hidden_states(self, num_tokens: int) -> NDArray[np.float32]:
        """Hidden states of the last step, [num_tokens, hidden_size]."""
        return self._hidden(num_tokens, self.hidden_size)
