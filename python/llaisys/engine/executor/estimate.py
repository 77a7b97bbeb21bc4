"""What a model will take of the memory, before any of it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.opening import open_model
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
        needs = opened.adapter_class.memory_needs(
            opened.checkpoint, opened.options, config.scheduler.max_num_seqs
        )
        blocks = opened.affordable_blocks
        slots = blocks * config.cache.block_size
        weights = needs.weights
        if config.dtype == "auto" and config.device == "cpu" and os.path.isfile(opened.path):
            weights = min(weights, os.path.getsize(opened.path))  # quantised weights stay so
        return MemoryEstimate(
            weights=weights,
            kv_cache=slots * opened.kv_bytes_per_token * ranks,
            scratch=ranks * (needs.activations + needs.logits) + SLACK,
            num_kv_blocks=blocks,
        )
    finally:
        opened.close()
