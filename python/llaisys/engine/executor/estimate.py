"""What a model will take of the memory, before any of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.model_opening import OpenedModel, open_model
from llaisys.models.device import open_device

SLACK = 32 << 20  # what the interpreter and the allocator add while it runs


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """In bytes, all ranks together; beside what a process takes that has loaded nothing."""

    weights: int
    kv_cache: int
    scratch: int  # activations, logits, and some slack
    num_kv_blocks: int


def estimate_memory(config: EngineConfig) -> MemoryEstimate:
    """Opens the model's files (and fetches them, if need be) and closes them again. Raises what
    loading it would: ModelLoadError, InvalidInputError."""
    open_device(config.device)
    opened = open_model(config)
    try:
        ranks = config.parallel.tensor_parallel_size
        slots = opened.affordable_blocks * config.cache.block_size
        weights, scratch = _weights_and_scratch(opened, config)
        weights, scratch = ranks * weights, ranks * scratch
        kv_cache = slots * opened.kv_bytes_per_token * ranks
        if config.device == "cpu":  # elsewhere it is not the device's memory
            host_slots = opened.num_host_blocks * config.cache.block_size
            kv_cache += host_slots * opened.kv_bytes_per_token * ranks
        if opened.draft is not None:  # on one rank
            weights_beside, scratch_beside = _weights_and_scratch(opened.draft, config)
            weights, scratch = weights + weights_beside, scratch + scratch_beside
            kv_cache += slots * opened.draft.kv_bytes_per_token
        return MemoryEstimate(weights, kv_cache, scratch + SLACK, opened.affordable_blocks)
    finally:
        opened.close()


def _weights_and_scratch(opened: OpenedModel, config: EngineConfig) -> tuple[int, int]:
    """Of one rank."""
    needs = opened.memory_needs(config.scheduler.max_num_seqs)
    return needs.weights, needs.activations + needs.logits
