"""The engine's heart: scheduler and executor. It knows token ids, never text."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from llaisys.common.types import (
    ModelInfo,
    Request,
    RequestStatus,
    SchedulerOutputs,
    StepRecord,
    TokenUpdate,
)
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor import Executor
from llaisys.engine.scheduler import RequestScheduler

logger = logging.getLogger("llaisys.engine")

STEP_HISTORY = 1024


class EngineCore:
    """Owns the executor it is given and closes it."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        self.model_info: ModelInfo = executor.model_info
        self.scheduler = RequestScheduler(
            config.scheduler,
            BlockManager(
                self.model_info.num_blocks,
                self.model_info.block_size,
                config.cache.enable_prefix_caching,
                config.cache.prefix_cache_min_match,
            ),
            self.model_info.max_model_len,
        )
        self.steps: deque[StepRecord] = deque(maxlen=STEP_HISTORY)  # the latest ones
        self.num_steps = 0
        self._checked_idle = True
        self._undelivered: list[TokenUpdate] = []  # of a step that was interrupted

    def step(self) -> list[TokenUpdate]:
        """Plan, run, apply. A fault ends the requests of the step and nothing else."""
        if self._undelivered:
            updates, self._undelivered = self._undelivered, []
            return updates
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan.batch_size:
            if self.scheduler.has_unfinished():
                raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
            return []
        self._checked_idle = False
        try:
            self.executor.execute_model(plan)
            output = self.executor.sample_tokens()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            return self._checked(self.scheduler.fail_step(plan.step_id, str(error)))
        except BaseException:  # KeyboardInterrupt: the step is lost, the engine is not
            self._undelivered = self.scheduler.fail_step(
                plan.step_id, "interrupted", RequestStatus.FINISHED_ABORTED
            )
            raise
        updates = self.scheduler.update_from_output(output)
        self._record(plan, time.perf_counter() - start)
        return self._checked(updates)

    def add_request(self, request: Request) -> None:
        """Queue a request; raises InvalidInputError when it can never fit."""
        self.scheduler.add(request)

    def finish_request(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> TokenUpdate | None:
        """End a request from outside; None when it has finished already."""
        for index, update in enumerate(self._undelivered):
            if update.request_id == request_id:
                return self._undelivered.pop(index)
        finished = self.scheduler.finish(request_id, status)
        self._check_idle()
        return finished

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self._undelivered)

    def stats(self) -> dict[str, Any]:
        """Numbers for logs and metrics."""
        scheduler, prefix = self.scheduler.stats(), self.scheduler.block_manager.stats
        executor = self.executor.stats
        return {
            "num_steps": self.num_steps,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_preemptions": scheduler.num_preemptions,
            "kv_blocks": scheduler.num_blocks,
            "kv_blocks_used": scheduler.num_used_blocks,
            "kv_blocks_cached": scheduler.num_cached_blocks,
            "prefix_cache_queries": prefix.queries,
            "prefix_cache_hits": prefix.hits,
            "prefix_cache_hit_rate": prefix.hit_rate,
            "prefix_cache_evictions": prefix.evictions,
            "worker_errors": executor.worker_errors,
            "executor_timeouts": executor.timeouts,
        }

    def close(self) -> None:
        self.executor.shutdown()

    def _record(self, plan: SchedulerOutputs, seconds: float) -> None:
        self.num_steps += 1
        record = StepRecord(
            plan.step_id,
            plan.batch_size,
            plan.num_prefill_tokens,
            plan.num_decode_tokens,
            seconds,
        )
        self.steps.append(record)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", record)

    def _checked(self, updates: list[TokenUpdate]) -> list[TokenUpdate]:
        self._check_idle()
        return updates

    def _check_idle(self) -> None:
        """Count the blocks whenever the engine runs empty."""
        if not self._checked_idle and not self.scheduler.has_unfinished():
            self.scheduler.check_integrity()
            self._checked_idle = True
