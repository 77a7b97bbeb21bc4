"""The engine core: schedules steps, executes them and applies their results. Token ids only.

Requests are added all or none, expire at their deadline and end at their timeout. A step that
raises ends its own requests and is counted.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from llaisys.common.request import FINISH_REASONS, Request, RequestStatus
from llaisys.common.step import TokenMasks
from llaisys.common.types import SchedulerOutputs, StepRecord, TokenUpdate
from llaisys.engine.admission import Admission, Rejected
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.context_window import context_length
from llaisys.engine.executor import Executor, WorkerLostError
from llaisys.engine.kv_transfer.transfer import KvTransfer, TransferStats
from llaisys.engine.lora_registry import LoraRegistry
from llaisys.engine.scheduler import RequestScheduler
from llaisys.engine.speculative import SpeculativeStats, make_speculator
from llaisys.engine.structured.requests import StructuredRequests

logger = logging.getLogger("llaisys.engine")

STEP_HISTORY = 1024
MAX_IN_FLIGHT = 2  # steps with asynchronous scheduling: one runs, one is queued
# Tokens that a step restores beside other requests, with kv_transfer: at most a fifth of its time.
MAX_RESTORED_TOKENS = {"cpu": 256, "cuda": 384}
LORA_POLL_SECONDS = 0.001  # while a LoRA adapter is read and nothing else can run
# Devices on which "auto" schedules asynchronously (docs/internals/measurements/).
AUTO_ASYNC_DEVICES = frozenset({"cuda"})


class _LaunchedStep(NamedTuple):
    plan: SchedulerOutputs
    start: float  # time.perf_counter() before it was scheduled
    queued: bool  # another step may be launched before it is collected
    masks: Callable[[], TokenMasks] | None  # of structured output


class EngineCore:
    """Owns its executor and closes it."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        self.model_info = info = executor.model_info
        context_len = None
        if config.scheduler.context_shift:
            context_len = context_length(info.max_model_len, info.num_blocks, info.block_size)
        self.scheduler = RequestScheduler(
            config.scheduler,
            BlockManager(
                info.num_blocks,
                info.block_size,
                config.cache.enable_prefix_caching and not info.is_encoder,
                config.cache.prefix_cache_min_match,
                context_len=context_len,
                num_host_blocks=info.num_host_blocks,
            ),
            info.max_model_len,
            num_lora_slots=info.max_loras,
        )
        self.loras = LoraRegistry(
            config.lora, executor.call_lora, self._used_lora_ids, self.scheduler.queues.loras.drop
        )
        self.speculator = make_speculator(config.speculative, info.vocab_size, executor.draft)
        self.structured = StructuredRequests(self.model_info, config.scheduler.max_num_seqs)
        self.kv_transfer: KvTransfer | None = None  # see start_kv_transfer
        self.admission = Admission(
            self.scheduler, [self.loras, self.structured], self.structured.start
        )
        self.is_async = self._can_schedule_async(config)
        stages = config.parallel.pipeline_parallel_size
        self._max_in_flight = MAX_IN_FLIGHT if self.is_async else stages
        self.scheduler.builder.max_in_flight_tokens = int(self.is_async)
        self.scheduler.builder.num_batches = stages
        self.scheduler.builder.whole_prompts = info.is_encoder
        if config.cache.kv_transfer != "off":
            self.scheduler.builder.max_restored_tokens = MAX_RESTORED_TOKENS[info.device]
        self._in_flight: deque[_LaunchedStep] = deque()
        self._last_collected = 0.0
        self.steps: deque[StepRecord] = deque(maxlen=STEP_HISTORY)  # latest
        self.num_steps = 0
        self.failed_steps = 0  # consecutive
        self._checked_idle = True
        self._updates: list[TokenUpdate] = []  # of this step, and of an interrupted one before it

    def _can_schedule_async(self, config: EngineConfig) -> bool:
        mode, stages = config.async_scheduling, config.parallel.pipeline_parallel_size
        if mode == "off" or (mode == "auto" and config.device not in AUTO_ASYNC_DEVICES):
            return False
        if stages > 1:
            logger.info("async_scheduling is off: a pipeline has %d steps in flight", stages)
            return False
        if self.executor.can_launch:
            return True
        logger.log(
            logging.WARNING if mode == "on" else logging.INFO,
            "async_scheduling is off: it needs a model with asynchronous launches and no "
            "step_timeout",
        )
        return False

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> list[TokenUpdate]:
        """Schedule and launch, then collect and apply the oldest step in flight. With asynchronous
        scheduling one more step stays in flight, in a pipeline one per other stage. A failed step
        ends its requests only. WorkerLostError: no step can follow."""
        if not self._updates:
            self._end_timed_out()
        if not self._updates:
            self._launch_steps()
            if self._in_flight:
                has_drafts = bool(self._in_flight[0].plan.draft_token_ids)
                self._collect_oldest()
                if has_drafts and self.is_async:  # they were in flight alone
                    self._launch_steps()
        self._check_idle()
        updates, self._updates = self._updates, []
        return updates

    def _launch_steps(self) -> None:
        """Launch steps up to the limit. Drafts are proposed when nothing is in flight, and nothing
        is launched behind them. A step that needs sync is also collected."""
        running, speculator = self.scheduler.running, self.speculator
        overlaps = self._max_in_flight > 1
        while len(self._in_flight) < self._max_in_flight:
            start = time.perf_counter()
            if speculator is not None:
                if not self._in_flight:
                    speculator.propose(running)
                elif self._in_flight[-1].plan.draft_token_ids or speculator.should_wait(running):
                    return
            plan = self._schedule()
            if plan is None:
                return
            is_alone = overlaps and self._needs_sync(plan)
            queued = overlaps and not is_alone and not plan.draft_token_ids
            if not self._launch(plan, start, queued):
                return
            if is_alone:
                self._collect_oldest()
                return

    def _schedule(self) -> SchedulerOutputs | None:
        """Return the next plan; None when no request can run."""
        plan = self.scheduler.schedule()
        if plan.batch_size:
            self._checked_idle = False
            return plan
        if self.scheduler.has_unfinished() and not self._in_flight:
            raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
        return None

    def _needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether a step must run when no other step is in flight, and to its end."""
        if not self.is_async:  # stages: steps in flight share no sampling request, but grammars
            return self.structured.has_grammar(plan)
        if self.scheduler.needs_sync(plan):
            return True
        if plan.draft_token_ids:
            return bool(self._in_flight)
        return self.speculator is not None and self.speculator.needs_sync(plan)

    def _launch(self, plan: SchedulerOutputs, start: float, queued: bool) -> bool:
        """Launch a step; False when it failed. `queued`: others may be in flight beside it;
        otherwise they are collected first."""
        try:
            while self._in_flight and not queued:
                self._collect_oldest()
            masks = self.structured.request_masks(plan)
            self.executor.execute_model(plan, queued)
        except BaseException as error:
            self._end_failed(plan, error)
            return False
        if self._max_in_flight > 1:
            self.scheduler.note_launched(plan)
        self._in_flight.append(_LaunchedStep(plan, start, queued, masks))
        return True

    def _collect_oldest(self) -> None:
        launched = self._in_flight.popleft()
        plan = launched.plan
        try:
            output = self.executor.sample_tokens(plan.step_id, launched.masks)
        except BaseException as error:
            self._end_failed(plan, error)
            return
        # The time of a queued step counts from the end of the step before it.
        is_timed = not launched.queued or launched.start < self._last_collected
        start = max(launched.start, self._last_collected)
        if self.speculator is not None:
            took = time.perf_counter() - start if is_timed else None
            self.speculator.observe(plan, output, took)
        self.failed_steps = 0
        self._updates += self.scheduler.update_from_output(output)
        self._publish_prompts()
        seconds = time.perf_counter() - start
        if is_timed:
            self.scheduler.builder.step_time.observe(
                plan.batch_size, plan.num_prefill_tokens, plan.prefill_position, seconds
            )
        self._record(plan, seconds)
        self._last_collected = time.perf_counter()

    def _end_failed(self, plan: SchedulerOutputs, error: BaseException) -> None:
        """End the requests of a step that raised. After an interrupt, which is raised again, only
        this step is lost; after a WorkerLostError nothing can follow."""
        if isinstance(error, WorkerLostError):
            raise error
        if not isinstance(error, Exception):
            aborted = RequestStatus.FINISHED_ABORTED
            self._updates += self.scheduler.fail_step(plan.step_id, "interrupted", aborted)
            raise error
        self.failed_steps += 1
        logger.exception("step %d failed; its requests: %s", plan.step_id, plan.request_ids)
        self._updates += self.scheduler.fail_step(plan.step_id, str(error))

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
            logger.debug("%s of %s", record, plan.request_ids)

    def _check_idle(self) -> None:
        """Check for leaked blocks when the last request ends; free unloaded adapters."""
        self.loras.drop_retired()
        if not self._checked_idle and not self.scheduler.has_unfinished():
            self.structured.release_finished()
            self.scheduler.check_idle()
            self._checked_idle = True

    # ---- KV transfer ---------------------------------------------------------------------------

    def start_kv_transfer(self, address: str, token: bytes) -> str:
        """Exchange KV blocks with other engines that know the token; return the address with its
        port. Needs `kv_transfer`."""
        executor, blocks = self.executor, self.scheduler.block_manager
        self.kv_transfer = KvTransfer(
            *(self.config, self.model_info, blocks, executor.host_files(), executor.copy_blocks),
            *(address, token),
        )
        self.admission.stages.insert(1, self.kv_transfer)
        return self.kv_transfer.address

    def _publish_prompts(self) -> None:
        exported, self.scheduler.exported = self.scheduler.exported, []
        if self.kv_transfer is not None:
            for request in exported:
                self.kv_transfer.publish(request)

    # ---- requests ------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[Request], deadline: float | None = None) -> None:
        """Queue the choices of a prompt, all or none; InvalidInputError when one can never fit.
        `deadline`: time.monotonic() before which one of them must start. Requests may be pending
        first: see `poll`."""
        self.admission.add(requests, deadline)

    def poll(self, timeout: float = 0.0) -> list[Rejected]:
        """Queue pending requests that are ready (see `Admission`); return the rejected ones with
        their errors. Waits at most `timeout` seconds for a grammar."""
        return self.admission.poll(timeout)

    def wait_until_queued(self, requests: Sequence[Request]) -> None:
        """Wait until the grammar of `requests` is compiled; raises the error when they are
        rejected. No step runs meanwhile, so grammars of queued requests stay in use: their number
        has no limit."""
        self.structured.lift_process_limit()
        while requests[0] in self.admission.pending(self.structured):
            for rejected, error in self.poll(timeout=1.0):
                if rejected[0] is requests[0]:
                    raise error
                failed = RequestStatus.FINISHED_ERROR  # another one, whose adapter is unreadable
                self._updates += [
                    TokenUpdate(r.request_id, [], failed, error=str(error)) for r in rejected
                ]

    def expire(self) -> list[list[Request]]:
        """End and return the prompts of which no choice started before the deadline."""
        expired = self.admission.expire()
        self._check_idle()
        return expired

    def _end_timed_out(self) -> None:
        """End the requests whose `timeout` has passed."""
        for name in self.admission.take_timed_out():
            update = self.scheduler.finish(name, RequestStatus.FINISHED_TIMED_OUT)
            if update is not None:
                self._updates.append(update)

    def finish_request(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> TokenUpdate | None:
        """End a request; None when it has already finished."""
        undelivered = [update for update in self._updates if update.request_id == request_id]
        for update in undelivered:
            self._updates.remove(update)
        if undelivered and undelivered[-1].status in FINISH_REASONS:
            return undelivered[-1]
        if self.admission.cancel(request_id):
            return TokenUpdate(request_id, [], RequestStatus.FINISHED_ABORTED)
        finished = self.scheduler.finish(request_id, status)
        self._check_idle()
        return finished

    def _used_lora_ids(self) -> set[int]:
        """The adapters of unfinished requests."""
        used = {request.lora_id for request in self.scheduler.requests.values()}
        return used | {request.lora_id for request in self.admission.pending()}

    def has_unfinished(self) -> bool:
        return self.can_step or self.has_pending

    @property
    def has_pending(self) -> bool:
        """Whether `poll` should be called soon."""
        is_receiving = self.kv_transfer is not None and self.kv_transfer.is_busy
        return self.admission.is_busy or self.loras.is_busy or is_receiving

    @property
    def can_step(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self._updates or self._in_flight)

    def stats(self) -> dict[str, Any]:
        """Counters for logs and metrics, by name."""
        prefix = self.scheduler.block_manager.stats
        executor = self.executor.stats
        drafts = SpeculativeStats() if self.speculator is None else self.speculator.stats
        scheduler = self.scheduler.stats()
        scheduler["num_waiting"] += len(list(self.admission.pending()))
        transfer = TransferStats() if self.kv_transfer is None else self.kv_transfer.stats
        return {
            "num_steps": self.num_steps,
            **scheduler,
            "kv_cache_bytes": self.model_info.kv_cache_bytes,
            "kv_cache_dtype": self.model_info.kv_cache_dtype,
            "kv_host_bytes": self.model_info.kv_host_bytes,
            "prefix_cache_queries": prefix.queries,
            "prefix_cache_hits": prefix.hits,
            "prefix_cache_host_hits": prefix.host_hits,
            "prefix_cache_hit_rate": prefix.hit_rate,
            "prefix_cache_evictions": prefix.evictions,
            **{f"kv_transfer_{name}": value for name, value in asdict(transfer).items()},
            **{f"spec_decode_{name}": value for name, value in asdict(drafts).items()},
            "spec_decode_mean_accepted_length": drafts.mean_accepted_length,
            "loras": len(self.loras.names),
            "loras_in_host": self.loras.num_host,
            "lora_reads": self.loras.num_reads,
            "lora_failures": self.loras.num_failures,
            "worker_errors": executor.worker_errors,
            "executor_timeouts": executor.timeouts,
        }

    def debug_state(self) -> dict[str, int]:
        """Counts of what unfinished requests hold, by name. Without one all are 0 but `timeouts`,
        which are pruned now and then, and those of the worker (`worker_*`), which releases
        sequences with its next plan."""
        return {
            "steps_in_flight": len(self._in_flight),
            "updates": len(self._updates),
            "timeouts": self.admission.num_timeouts,
            **self.scheduler.debug_state(),
            **{f"worker_{name}": n for name, n in self.executor.worker.debug_state().items()},
        }

    def close(self) -> None:
        self.structured.close()
        if self.kv_transfer is not None:
            self.kv_transfer.close()
        self.executor.shutdown()
