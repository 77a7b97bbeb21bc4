"""Warm-up steps before the first request: touch memory, capture CUDA graphs, tune GEMMs.

A CUDA device captures a decode step the first time it runs a bucket of rows (`graph_rows` in C++).
All buckets are captured here, the largest first: a buffer that grows later would invalidate
earlier graphs. A step with the whole token budget runs before them, so that the GEMMs of long
prompts are tuned.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata
from llaisys.common.types import GpuUsage, ModelInfo
from llaisys.engine.config import EngineConfig
from llaisys.models.base import ModelAdapter
from llaisys.models.device import padded_rows

logger = logging.getLogger("llaisys.engine")


def graph_rows(most: int, has_drafts: bool = False) -> list[int]:
    """Return the row counts of captured steps up to `most` rows, descending; a step of `most` rows
    is one of them, unless it is too large."""
    padded = {padded_rows(rows, has_drafts) for rows in range(1, most + 1)} - {0}
    return sorted({min(rows, most) for rows in padded}, reverse=True)


def _verification_rows(config: EngineConfig, info: ModelInfo) -> list[int]:
    """Return the row buckets of captured verification steps; empty: no drafts."""
    drafts = config.speculative
    if drafts is None:
        return []
    seqs = min(config.scheduler.max_num_seqs, drafts.disable_by_batch_size - 1)
    room = min(info.max_model_len, info.num_blocks * info.block_size)
    most = min(room, max(1, seqs) * (1 + drafts.num_speculative_tokens))
    return graph_rows(most, has_drafts=True)[:-1]  # one row has no drafts


def _full_step(config: EngineConfig, info: ModelInfo) -> tuple[int, int] | None:
    """Return (sequences, tokens of each) of a step with the whole token budget; None: the budget is
    small, or equal prompts do not fit."""
    budget = config.scheduler.token_budget
    num_seqs = -(-budget // info.max_model_len)
    length = budget // num_seqs
    fits = num_seqs * -(-length // info.block_size) <= info.num_blocks
    is_usable = padded_rows(budget) == 0 and num_seqs * length == budget and fits
    return (num_seqs, length) if is_usable else None


def warm_up(
    adapter: ModelAdapter,
    config: EngineConfig,
    info: ModelInfo,
    gpu_usage: Callable[[], GpuUsage | None],
    samples: bool = True,
) -> None:
    """Run one token on a CPU; on a GPU capture a greedy decode step per bucket and a verification
    step of one sequence per bucket, with LoRA slots also with them. No request may own a block.
    `samples`: False in a pipeline stage without logits."""
    before, start = gpu_usage(), time.perf_counter()
    run = partial(run_step, adapter, info.block_size, samples=samples)
    has_loras = info.max_loras > 0
    steps = [(1, 1)]  # (tokens, tokens of a sequence)
    if before is not None:
        full = _full_step(config, info)
        if full is not None:
            run(*full, are_prompts=True, with_loras=has_loras)
        if adapter.is_encoder:
            return  # its steps are not captured
        most = min(config.scheduler.max_num_seqs, info.num_blocks)
        steps = [(count, 1) for count in graph_rows(most)]
        steps += [(count, count) for count in _verification_rows(config, info)]
    for done, (count, length) in enumerate(sorted(steps, reverse=True)):
        report("warming up", done, len(steps))
        for with_loras in (True, False) if has_loras else (False,):
            run(count // length, length, with_loras=with_loras)
    after = gpu_usage()
    if before is not None and after is not None:
        logger.info(
            "captured %d decode steps of up to %d rows in %.1f s, %.1f MiB",
            len(steps),
            max(steps)[0],
            time.perf_counter() - start,
            (after.memory_used - before.memory_used) / (1 << 20),
        )


def run_step(
    adapter: ModelAdapter,
    block_size: int,
    num_seqs: int,
    length: int,
    are_prompts: bool = False,
    with_loras: bool = False,
    samples: bool = True,
) -> None:
    """Compute the first `length` tokens of `num_seqs` sequences and sample after every token, or
    after the last ones of prompts; an encoder pools instead. `with_loras`: with LoRA slot 0, which
    may be empty."""
    count = num_seqs * length
    width = -(-length // block_size)
    seq_ids, positions = np.divmod(np.arange(count, dtype=np.int64), length)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    blocks = tables[seq_ids, positions // block_size].astype(np.int64)
    logits_mask = np.ones(count, dtype=np.int8)
    if are_prompts:
        logits_mask[positions < length - 1] = 0
    step = ModelStepInput(np.zeros(count, dtype=np.int64), positions, seq_ids, logits_mask)
    if with_loras:
        step.lora_slots = np.zeros(count, dtype=np.int32)
    attention = AttentionMetadata(
        slot_mapping=(blocks * block_size + positions % block_size).astype(np.int32),
        batch_seq_ids=np.arange(num_seqs, dtype=np.int64),
        context_lens=np.full(num_seqs, length, dtype=np.int32),
        block_tables=tables,
    )
    if adapter.is_encoder:
        logits_mask[:] = 0
        step.pooling = (positions == 0).astype(np.uint8)
    adapter.forward(step, attention)
    if adapter.is_encoder:
        for seq_id in range(num_seqs):
            adapter.pool_forget(seq_id)
        return
    if not samples:
        return
    num_sampled = int(logits_mask.sum())
    greedy = {"temperature": np.zeros(num_sampled)}
    adapter.sample(SamplingMetadata(np.arange(num_sampled, dtype=np.int32), numbers=greedy))
