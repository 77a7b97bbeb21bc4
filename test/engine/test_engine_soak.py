"""Requests of every kind on the native mock model: memory stays constant and no state is
left. LLAISYS_TEST_REQUESTS sets their number, 12,000 by default."""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from engine_fakes import FakeTokenizer, held_by, run_all

from llaisys.common.sampling import SamplingParams
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.engine.llm_engine import LLMEngine

COUNT = int(os.environ.get("LLAISYS_TEST_REQUESTS", "12000"))
VOCAB = 64  # of the mock model
TOGETHER = 96  # requests in the engine at a time; more than max_num_seqs
MAX_GROWTH = 4 << 20  # bytes, over the last 80 % of the requests
MAX_OBJECTS = COUNT // 20  # more in the second half: an object that every eighth request leaves

KINDS = (
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=4, n=2, seed=1),
    SamplingParams(max_tokens=8, stop_token_ids=list(range(0, VOCAB, 4))),
    SamplingParams(max_tokens=8, stop=["0", "12", "/5"], top_p=0.9),
    SamplingParams(max_tokens=4, presence_penalty=0.5, logit_bias={7: 2.0}),
    SamplingParams(max_tokens=3, min_tokens=2, logprobs=2, bad_words=["9"]),
)
CANCELLED = SamplingParams(max_tokens=200)  # long enough to be alive when the cancel comes


def make_engine() -> LLMEngine:
    """Few blocks, so that cached ones are evicted and running requests preempted."""
    return LLMEngine(
        EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            n_threads=1,
            seed=1,
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            cache=CacheConfig(block_size=16, num_kv_blocks=56),
        )
    )


def prompts() -> Iterator[list[int]]:
    """Short prompts; every third starts with one of a few long prefixes."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(VOCAB), k=32) for _ in range(4)]
    while True:
        for prefix in (prefixes[rng.randrange(4)], [], []):
            yield prefix + rng.choices(range(VOCAB), k=rng.randint(1, 20))


def run_requests(engine: LLMEngine, count: int, at_tenth: list[tuple[int, int]]) -> None:
    """Keep the engine full until `count` requests have ended, one in eight cancelled; return the
    memory after every tenth."""
    source = prompts()
    submitted = finished = 0
    to_cancel: list[str] = []
    while finished < count:
        while submitted < count and submitted - finished < TOGETHER:
            cancelled = submitted % 8 == 7
            params = CANCELLED if cancelled else KINDS[submitted % len(KINDS)]
            name = engine.submit(next(source), params, stream=submitted % 5 == 0)
            if cancelled:
                to_cancel.append(name)
            submitted += 1
        parts = engine.step()
        if len(to_cancel) > 20 or submitted == count:
            parts += [part for name in to_cancel for part in engine.cancel(name)]
            to_cancel.clear()
        finished += sum(part.output is not None for part in parts)
        if finished >= (len(at_tenth) + 1) * count // 10:
            gc.collect()
            at_tenth.append((resident_bytes(), sys.getallocatedblocks()))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_many_requests_leave_no_state() -> None:
    engine = make_engine()
    engine.core.steps = deque(maxlen=16)  # full at once: its growth is no leak
    levels: list[tuple[int, int]] = []
    run_requests(engine, COUNT, levels)
    assert not engine.has_unfinished()
    resident, objects = zip(*levels, strict=True)
    assert max(resident[2:]) - resident[1] < MAX_GROWTH, resident
    assert max(objects[5:9]) < max(objects[1:5]) + MAX_OBJECTS, objects
    stats = engine.stats()
    assert stats["prefix_cache_hits"] > COUNT and stats["prefix_cache_evictions"] > 0
    assert stats["num_preemptions"] > 0
    assert stats["kv_blocks_used"] == stats["num_running"] == stats["num_waiting"] == 0
    assert stats["worker_errors"] == 0
    engine.submit([1], SamplingParams(max_tokens=1))  # releases the sequences on the worker
    run_all(engine)
    scheduler = engine.core.scheduler
    blocks = scheduler.block_manager
    scheduler.check_integrity()
    assert blocks.num_free_blocks == blocks.num_blocks
    assert len(list(blocks.nodes)) == blocks.num_cached_blocks > 0
    assert held_by(engine) == {}
    state = engine.debug_state()
    assert state["worker_sequences"] == 1  # the last one, until the next step
    assert state["worker_sampling_rules"] == 0
    engine.close()
