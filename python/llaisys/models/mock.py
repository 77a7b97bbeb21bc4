"""A tiny model without files for tests and benchmarks: one attention layer, random embedding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llaisys.libllaisys.handles import dtype_code
from llaisys.libllaisys.types import LlaisysDecoderMeta
from llaisys.models.base import AdapterOptions
from llaisys.models.native import NativeAdapter, kv_head_bytes
from llaisys.models.tensors import tensor_from


@dataclass(frozen=True, slots=True)
class MockShape:
    """Sizes of a mock model; hidden size = heads * head_dim."""

    vocab_size: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    max_positions: int = 4096
    theta: float = 10000.0
    seed: int = 0

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim

    def table(self) -> NDArray[np.float32]:
        """The only weight, [vocab_size, hidden_size]."""
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((self.vocab_size, self.hidden_size), np.float32)


class MockAdapter(NativeAdapter):
    @classmethod
    def kv_bytes_per_token(cls, checkpoint: Any, options: AdapterOptions) -> int:
        shape = _shape(checkpoint)
        dtype = next((d for d in (options.kv_cache_dtype, options.dtype) if d != "auto"), "f32")
        return 2 * shape.kv_heads * kv_head_bytes(dtype, shape.head_dim)

    @classmethod
    def _create(cls, checkpoint: Any, options: AdapterOptions) -> Self:
        """`checkpoint`: a MockShape, or None for the default one."""
        shape = _shape(checkpoint)
        dtype = "f32" if options.dtype == "auto" else options.dtype
        meta = LlaisysDecoderMeta(
            dtype=dtype_code(dtype),
            nlayer=1,
            hs=shape.hidden_size,
            nh=shape.heads,
            nkvh=shape.kv_heads,
            dh=shape.head_dim,
            di=1,
            maxseq=shape.max_positions,
            voc=shape.vocab_size,
            epsilon=1e-6,
            theta=shape.theta,
            end_token=-1,
        )
        return cls("mock", meta, options)

    def _fill(self, checkpoint: Any, options: AdapterOptions, check: Callable[[], None]) -> None:
        with tensor_from(_shape(checkpoint).table(), "f32") as tensor:
            self.native.replace_weight("in_embed", 0, tensor)


def _shape(checkpoint: Any) -> MockShape:
    return checkpoint if isinstance(checkpoint, MockShape) else MockShape()
