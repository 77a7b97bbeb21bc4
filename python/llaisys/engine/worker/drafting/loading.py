"""From opened files to a source of drafts."""

from __future__ import annotations

from dataclasses import replace

from llaisys.common.errors import InvalidInputError
from llaisys.engine.worker.drafting.draft_model import DraftModel
from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.drafting.head import DraftHead
from llaisys.engine.worker.model_opening import OpenedModel
from llaisys.models.base import ModelAdapter
from llaisys.models.draft_head import DraftHeadAdapter


def load_drafter(
    opened: OpenedModel,
    model: ModelAdapter,
    num_blocks: int,
    max_step_tokens: int,
    too_many: int,  # running sequences from which on nobody is to draft
) -> Drafter:
    """With as many KV blocks as the model has; a head has the model keep its hidden states. Raises
    InvalidInputError when a draft model's vocabulary is not the model's: as far as files tell, that
    was seen before."""
    block_size = opened.options.kv_cache_block_size
    options = replace(opened.options, kv_cache_capacity_tokens=num_blocks * block_size)
    adapter = opened.adapter_class.load(opened.checkpoint, options)
    try:
        if isinstance(adapter, DraftHeadAdapter):
            model.capture_hidden_states(opened.checkpoint.layers)
            return DraftHead(adapter, block_size, too_many)
        if adapter.vocab_size != model.vocab_size and not opened.has_checked_vocabulary:
            raise InvalidInputError(
                f"speculative_config.model has a vocabulary of {adapter.vocab_size} tokens; it "
                f"must be the model's, {model.vocab_size}",
                field="speculative_config",
                value=adapter.vocab_size,
                limit=f"{model.vocab_size} tokens",
            )
        return DraftModel(adapter, block_size, max_step_tokens)
    except BaseException:
        adapter.close()
        raise
