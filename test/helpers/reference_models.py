"""Tiny random transformers models, the same models in this engine, and steps over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from llaisys.common.model_registry import get_adapter_class
from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.native import NativeAdapter

BLOCK = 16


@dataclass(frozen=True)
class Tiny:
    """Odd sizes: none is a multiple of a vector or tile size."""

    kind: str = "qwen2"
    hidden: int = 60
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 10
    intermediate: int = 101
    vocab: int = 313
    tied: bool = False
    window: int = 0
    full_layers: int = 0  # first layers without a window
    context: int = 4096  # max_position_embeddings
    rope: dict[str, Any] | None = None  # rope_parameters


def make_reference(tiny: Tiny, seed: int = 0) -> Any:
    """A transformers model in f32 with weights large enough for clearly different logits."""
    common: dict[str, Any] = {
        "hidden_size": tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.intermediate,
        "vocab_size": tiny.vocab,
        "tie_word_embeddings": tiny.tied,
        "max_position_embeddings": tiny.context,
        "attn_implementation": "eager",
    }
    if tiny.window:
        common |= {"use_sliding_window": True, "sliding_window": tiny.window}
        common |= {"max_window_layers": tiny.full_layers}
    if tiny.rope is not None:
        common["rope_parameters"] = {"rope_theta": 10000.0, **tiny.rope}
    torch.manual_seed(seed)
    model_class, config_class = {
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    }[tiny.kind]
    model = model_class(config_class(**common))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                scale = 0.1 if name.endswith("bias") else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
    return model.eval()


def save(model: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model in this dtype without changing the model."""
    import copy

    copy.deepcopy(model).to(dtype).save_pretrained(directory, safe_serialization=True)
    return directory


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[NativeAdapter]:
    """The adapter of a model directory or file."""
    with open_checkpoint(path) as checkpoint:
        adapter_class = get_adapter_class(checkpoint.config.model_type)
        adapter = adapter_class.load(checkpoint, AdapterOptions(**options))
    assert isinstance(adapter, NativeAdapter)
    try:
        yield adapter
    finally:
        adapter.close()


@dataclass
class Piece:
    """Tokens of one sequence in a step, from position `start` on; sequences share no blocks."""

    seq_id: int
    tokens: Sequence[int]
    start: int = 0


def run_slot(
    adapter: NativeAdapter, pieces: Sequence[Piece], asked: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """One SLOT step with all logits, [tokens, vocab], or those of the tokens `asked`."""
    step = _step(pieces)
    if asked is not None:
        step.logits_mask[:] = 0
        step.logits_mask[asked] = 1
    adapter.forward(step, None)
    return adapter.logits()


def run_block(
    adapter: NativeAdapter, pieces: Sequence[Piece], blocks: dict[int, list[int]]
) -> NDArray[np.float32]:
    """One BLOCK step with all logits; `blocks` maps each sequence to its block numbers."""
    step = _step(pieces)
    width = max(len(blocks[piece.seq_id]) for piece in pieces)
    tables = np.full((len(pieces), width), -1, np.int32)
    for row, piece in enumerate(pieces):
        tables[row, : len(blocks[piece.seq_id])] = blocks[piece.seq_id]
    slots = [
        blocks[piece.seq_id][p // BLOCK] * BLOCK + p % BLOCK
        for piece in pieces
        for p in range(piece.start, piece.start + len(piece.tokens))
    ]
    metadata = AttentionMetadata(
        slot_mapping=np.array(slots, np.int32),
        batch_seq_ids=np.array([piece.seq_id for piece in pieces], np.int64),
        context_lens=np.array([p.start + len(p.tokens) for p in pieces], np.int32),
        block_tables=tables,
    )
    adapter.forward(step, metadata)
    return adapter.logits()


def _step(pieces: Sequence[Piece]) -> ModelStepInput:
    tokens = [token for piece in pieces for token in piece.tokens]
    positions = [p for piece in pieces for p in range(piece.start, piece.start + len(piece.tokens))]
    seq_ids = [piece.seq_id for piece in pieces for _ in piece.tokens]
    return ModelStepInput(
        token_ids=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        seq_ids=np.array(seq_ids, np.int64),
        logits_mask=np.ones(len(tokens), np.int8),
    )


def reference_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[tokens, vocab] of transformers, as f32."""
    with torch.no_grad():
        logits: NDArray[np.float32] = (
            model(torch.tensor([list(tokens)])).logits[0].to(torch.float32).numpy()
        )
    return logits


def reference_hidden(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[tokens, hidden size] after the last norm, of transformers, as f32."""
    with torch.no_grad():
        states = model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        found: NDArray[np.float32] = states.to(torch.float32).numpy()
    return found


def random_tokens(n: int, vocab: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, n).tolist()
    return tokens
