"""Estimates the memory of a model before it is loaded."""

from dataclasses import dataclass, replace

from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.engine.worker.model_opening import OpenedModel, open_model
from llaisys.models.device import is_gpu, open_device

SLACK = 32 << 20  # growth of interpreter and allocator


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of all ranks, in addition to a process without a model."""

    weights: int
    kv_cache: int
    scratch: int  # activations, logits, slack
    num_kv_blocks: int


def estimate_memory(config: EngineConfig) -> MemoryEstimate:
    """Open and close the model's files, downloading them if needed. Raises ModelLoadError and
    InvalidInputError as loading does."""
    config = resolve_device(config)
    open_device(config.device)
    opened = open_model(config)
    try:
        ranks = config.parallel.world_size
        slots = opened.affordable_blocks * config.cache.block_size
        weights, scratch = map(sum, zip(*_needs_of_ranks(opened, config), strict=True))
        kv_cache = slots * opened.kv_bytes_per_token * ranks
        if not is_gpu(config.device):  # host blocks are in device memory
            host_slots = opened.num_host_blocks * config.cache.block_size
            kv_cache += host_slots * opened.kv_bytes_per_token * ranks
        if opened.draft is not None:  # on one rank
            draft_weights, draft_scratch = _weights_and_scratch(opened.draft, config)
            weights, scratch = weights + draft_weights, scratch + draft_scratch
            kv_cache += slots * opened.draft.kv_bytes_per_token
        return MemoryEstimate(weights, kv_cache, scratch + SLACK, opened.affordable_blocks)
    finally:
        opened.close()


def _needs_of_ranks(opened: OpenedModel, config: EngineConfig) -> list[tuple[int, int]]:
    """Return `_weights_and_scratch` of every rank."""
    parallel = opened.options.parallel
    of_rank = [replace(parallel, rank=rank) for rank in range(parallel.world_size)]
    options = [replace(opened.options, parallel=own) for own in of_rank]
    return [_weights_and_scratch(replace(opened, options=own), config) for own in options]


def _weights_and_scratch(opened: OpenedModel, config: EngineConfig) -> tuple[int, int]:
    """Return the bytes of one rank."""
    needs = opened.memory_needs(config.scheduler.max_num_seqs)
    return needs.weights, needs.activations + needs.logits
