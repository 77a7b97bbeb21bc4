"""The adapter of draft heads: one layer over tokens and hidden states of the target model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput
from llaisys.common.validation import invalid_value
from llaisys.libllaisys.draft_head import DRAFT_HEAD_KINDS, LlaisysDraftHeadMeta
from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.types import DTYPE_BYTES
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import dtype_of, keeps_blocks
from llaisys.models.decoder_meta import decoder_meta
from llaisys.models.device import MemoryNeeds
from llaisys.models.draft_head_files import DraftHeadFiles
from llaisys.models.load_quantization import quantise, quantised_dtype
from llaisys.models.native import NativeAdapter, kv_head_bytes
from llaisys.models.tensors import tensor_from, tensor_from_blocks


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
        row = 4 * (4 * hidden + 2 * heads * config.head_dim + 2 * config.intermediate_size)
        row += 2 * 4 * checkpoint.n_features * hidden  # captured by the model, and the input
        return MemoryNeeds(
            weights=size * (layer + tables),
            activations=row * options.max_batch_tokens,
            logits=2 * 4 * config.vocab_size * max_num_seqs,
        )

    @classmethod
    def _create(cls, checkpoint: DraftHeadFiles, options: AdapterOptions) -> Self:
        config = checkpoint.config
        layers = range(config.num_layers)
        decoder = decoder_meta(config, dtype_of(config, options), options.max_model_len, layers)
        meta = LlaisysDraftHeadMeta(
            decoder=decoder,
            in_voc=checkpoint.model.config.vocab_size,
            n_features=checkpoint.n_features,
            kind=DRAFT_HEAD_KINDS[checkpoint.kind],
        )
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
