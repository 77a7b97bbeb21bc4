"""Which tensors a decoder of this family needs, and whether a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.config import ModelConfig


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that the model needs, in forward order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, hidden)
            if config.attention_bias:
                yield f"{prefix}.self_attn.{name}.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        if config.output_bias:
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def check_coverage(checkpoint: Checkpoint, where: str) -> None:
    """Raise `ModelLoadError` naming the first missing, misshaped or unreadable tensor.

    Tensors that the model does not need are left alone.
    """
    present = set(checkpoint.names())
    for name, shape in expected_tensors(checkpoint.config):
        if name not in present:
            raise ModelLoadError(f"{where}: tensor {name!r} is missing")
        found = checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(
                f"{where}: tensor {name!r} has shape {list(found)}, the config asks for "
                f"{list(shape)}"
            )
        checkpoint.record(name)  # raises for an element type that cannot be read
