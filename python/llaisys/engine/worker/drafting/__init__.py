"""Draft models and draft heads, with their own KV caches."""

from dataclasses import replace

from llaisys.common.closing import closed_on_error
from llaisys.common.errors import InvalidInputError
from llaisys.engine.worker.drafting.draft_model import DraftModel
from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.drafting.head import DraftHead
from llaisys.engine.worker.model_opening import OpenedModel
from llaisys.models.base import ModelAdapter
from llaisys.models.draft_head import DraftHeadAdapter

__all__ = ["Drafter", "load_drafter"]


def load_drafter(
    opened: OpenedModel,
    model: ModelAdapter,
    num_blocks: int,
    max_step_tokens: int,
    max_batch: int,  # sequences from which on no drafts are made
) -> Drafter:
    """Load with as many KV blocks as the model; for a head the model retains its hidden states.
    InvalidInputError: the vocabulary differs from the model's."""
    block_size = opened.options.kv_cache_block_size
    options = replace(opened.options, kv_cache_capacity_tokens=num_blocks * block_size)
    adapter = opened.adapter_class.load(opened.checkpoint, options)
    with closed_on_error(adapter):
        if isinstance(adapter, DraftHeadAdapter):
            model.capture_hidden_states(opened.checkpoint.layers)
            return DraftHead(adapter, block_size, max_batch)
        if adapter.vocab_size != model.vocab_size and not opened.has_checked_vocabulary:
            raise InvalidInputError(
                f"speculative_config.model has a vocabulary of {adapter.vocab_size} tokens; it "
                f"must be the model's, {model.vocab_size}",
                field="speculative_config",
                value=adapter.vocab_size,
                limit=f"{model.vocab_size} tokens",
            )
        return DraftModel(adapter, block_size, max_step_tokens)
