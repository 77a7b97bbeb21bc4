"""A native decoder with random weights, without a checkpoint, and LoRA adapters for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from native_helpers import Array, BlockRow, MockModel, Shape, block_step, create_params, tensor

from llaisys.libllaisys.handles import dtype_code
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import LlaisysDecoderMeta

TARGETS = (
    "attn_q_w", "attn_k_w", "attn_v_w", "attn_o_w", "mlp_gate_w", "mlp_up_w", "mlp_down_w",
)  # fmt: skip
ROW_PARALLEL = ("attn_o_w", "mlp_down_w")  # sharded by input


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a small decoder; odd where the operators allow it."""

    layers: int = 2
    hidden: int = 36
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 6
    inner: int = 50
    voc: int = 61
    maxseq: int = 256
    dtype: str = "f32"
    has_biases: bool = True
    has_head_norms: bool = False

    def sizes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear weight of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q_w": (q, self.hidden), "attn_k_w": (kv, self.hidden),
            "attn_v_w": (kv, self.hidden), "attn_o_w": (self.hidden, q),
            "mlp_gate_w": (self.inner, self.hidden), "mlp_up_w": (self.inner, self.hidden),
            "mlp_down_w": (self.hidden, self.inner),
        }  # fmt: skip

    def meta(self) -> LlaisysDecoderMeta:
        return LlaisysDecoderMeta(
            dtype=dtype_code(self.dtype), nlayer=self.layers, hs=self.hidden, nh=self.heads,
            nkvh=self.kv_heads, dh=self.head_dim, di=self.inner, maxseq=self.maxseq, voc=self.voc,
            epsilon=1e-6, theta=10000.0, end_token=-1,
        )  # fmt: skip

    def weights(self, seed: int = 0) -> dict[tuple[str, int], Array]:
        """(field, layer) -> values; layer 0 for global weights."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

        made = {
            ("in_embed", 0): 3 * normal(self.voc, self.hidden),
            ("out_embed", 0): 3 * normal(self.voc, self.hidden),
            ("out_norm_w", 0): 1 + normal(self.hidden),
        }
        sizes = self.sizes()
        for layer in range(self.layers):
            for name, (out, width) in sizes.items():
                made[name, layer] = normal(out, width)
            made["attn_norm_w", layer] = 1 + normal(self.hidden)
            made["mlp_norm_w", layer] = 1 + normal(self.hidden)
            for name in ("q", "k", "v") if self.has_biases else ():
                made[f"attn_{name}_b", layer] = normal(sizes[f"attn_{name}_w"][0])
            for name in ("q", "k") if self.has_head_norms else ():
                made[f"attn_{name}_norm_w", layer] = 1 + normal(self.head_dim)
        return made


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: (field, layer) -> A [rank, in] and B [out, rank]."""

    scale: float
    matrices: dict[tuple[str, int], tuple[Array, Array]] = field(default_factory=dict)

    @classmethod
    def random(
        cls, shape: DecoderShape, rank: int, seed: int, targets: Iterable[str] = TARGETS
    ) -> Adapter:
        rng = np.random.default_rng([seed, rank])
        matrices = {}
        for layer in range(shape.layers):
            for name in targets:
                out, width = shape.sizes()[name]
                a = rng.standard_normal((rank, width), np.float32) / np.float32(np.sqrt(width))
                b = rng.standard_normal((out, rank), np.float32) / np.float32(np.sqrt(rank))
                matrices[name, layer] = (a, b)
        return cls(0.75, matrices)

    def merge(self, weights: dict[tuple[str, int], Array]) -> dict[tuple[str, int], Array]:
        """The weights W + scale * B A."""
        merged = dict(weights)
        for key, (a, b) in self.matrices.items():
            delta = self.scale * (b.astype(np.float64) @ a.astype(np.float64))
            merged[key] = (weights[key].astype(np.float64) + delta).astype(np.float32)
        return merged


def shard(name: str, values: Array, rank: int, ranks: int) -> Array:
    """The part of a weight [out, in], or of a bias [out], that a tensor-parallel rank holds."""
    if not name.startswith(("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up",
                            "mlp_down")) or "norm" in name:  # fmt: skip
        return values
    axis = 1 if name in ROW_PARALLEL else 0
    return np.ascontiguousarray(np.split(values, ranks, axis)[rank])


class Decoder(MockModel):
    """A model handle of a decoder."""

    def __init__(
        self,
        shape: DecoderShape,
        weights: dict[tuple[str, int], Array],
        rank: int = 0,
        ranks: int = 1,
        **fields: Any,
    ) -> None:
        self.decoder, self._rank, self._ranks = shape, rank, ranks
        self.shape = Shape(voc=shape.voc)
        if ranks > 1:
            fields |= {"tensor_parallel_size": ranks, "world_size": ranks, "rank": rank}
        Model.__init__(self, create_params(shape.meta(), "decoder", **fields))
        for (name, layer), values in weights.items():
            part = shard(name, values, rank, ranks)
            self.replace_weight(name, layer, tensor(part, shape.dtype))

    def load_adapter(self, slot: int, adapter: Adapter, dtype: str = "f32") -> None:
        for (name, layer), (a, b) in adapter.matrices.items():
            if name in ROW_PARALLEL:
                a = np.ascontiguousarray(np.split(a, self._ranks, 1)[self._rank])
            else:
                b = np.ascontiguousarray(np.split(b, self._ranks, 0)[self._rank])
            with tensor(a, dtype) as a_tensor, tensor(b, dtype) as b_tensor:
                self.set_lora(slot, name, layer, a_tensor, b_tensor, adapter.scale)

    def run_tokens(
        self, tokens: Sequence[int], seq: int = 0, slot: int = -1, marks: bool = True
    ) -> Array:
        """Tokens of one sequence in the SLOT layout; the logits of all or of the last."""
        n = len(tokens)
        slots = {"lora_slots": [slot] * n} if slot >= 0 else {}
        wanted = [1] * n if marks else [0] * (n - 1) + [1]
        return self.run(tokens, [[seq]] * n, marks=wanted, **slots)

    def run_rows(
        self, rows: Sequence[BlockRow], slots: Sequence[int], marks: Sequence[int] | None = None
    ) -> Array:
        """A step of the BLOCK layout; slots: the LoRA slot of each row."""
        arguments = block_step(rows, self.params.kv_cache_block_size)
        counts = [len(row.tokens) for row in rows]
        return self.run(**arguments, marks=marks, lora_slots=np.repeat(slots, counts))
