"""A scheduler without an engine, with fabricated results."""

from __future__ import annotations

from typing import Any

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.scheduled_batch import ScheduledBatch
from llaisys.engine.scheduler import RequestScheduler


def make_scheduler(
    blocks: int = 64,
    size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    limit: int = 200,
    max_in_flight_tokens: int = 0,
    **other: Any,
) -> RequestScheduler:
    config = SchedulerConfig(max_num_seqs, budget, min_prefill_chunk=4)
    return RequestScheduler(
        config, BlockManager(blocks, size, **other), limit, max_in_flight_tokens
    )


def add(
    scheduler: RequestScheduler, name: str, prompt: int | list[int], max_tokens: int | None = 8
) -> Request:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    request = Request(name, tokens, SamplingParams(max_tokens=max_tokens))
    scheduler.add([request])
    return request


def answer(plan: SchedulerOutputs, token: int = 7) -> StepOutput:
    sampled = {s: [token] for s, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples}
    return StepOutput(plan.step_id, sampled)


def step(scheduler: RequestScheduler) -> SchedulerOutputs:
    plan = scheduler.schedule()
    if plan.batch_size:
        scheduler.update_from_output(answer(plan))
    return plan


def preempt_latest(scheduler: RequestScheduler) -> None:
    victim = scheduler.queues.waiting.largest(scheduler.running)
    scheduler.builder.preempt(ScheduledBatch(SchedulerOutputs(99)), victim)


def given_tokens(plan: SchedulerOutputs) -> dict[str, int]:
    return dict(zip(plan.request_ids, plan.counts, strict=True))
