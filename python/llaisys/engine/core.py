"""The engine core: schedules steps, executes them and applies their results. Token ids only.

Requests are added all or none, expire at their deadline and end at their timeout. A step that
raises ends its own requests and is counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeVar

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import SchedulerOutputs, StepRecord, TokenUpdate
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.context_window import context_length
from llaisys.engine.executor import Executor, WorkerLostError
from llaisys.engine.kv_transfer.transfer import KvTransfer, TransferStats
from llaisys.engine.lora_registry import LoraRegistry
from llaisys.engine.scheduler import RequestScheduler
from llaisys.engine.speculative import SpeculativeStats, make_speculator
from llaisys.engine.structured.requests import MaskFuture, StructuredRequests

logger = logging.getLogger("llaisys.engine")

STEP_HISTORY = 1024
MAX_IN_FLIGHT = 2  # steps with asynchronous scheduling: one runs, one is queued
# Tokens that a step restores beside other requests, with kv_transfer: at most a fifth of its time.
MAX_RESTORED_TOKENS = {"cpu": 256, "cuda": 384}
LORA_POLL_SECONDS = 0.001  # while a LoRA adapter is read and nothing else can run
# Devices on which "auto" schedules asynchronously (docs/internals/measurements/).
AUTO_ASYNC_DEVICES = frozenset({"cuda"})

T = TypeVar("T")


class _LaunchedStep(NamedTuple):
    plan: SchedulerOutputs
    start: float  # time.perf_counter() before it was scheduled
    queued: bool  # another step may be launched before it is collected
    masks: MaskFuture | None  # of structured output


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
            config.lora, executor, self._used_lora_ids, self.scheduler.queues.loras.drop
        )
        self.speculator = make_speculator(config.speculative, info.vocab_size, executor.draft)
        self.structured = StructuredRequests(self.model_info, config.scheduler.max_num_seqs)
        self.kv_transfer: KvTransfer | None = None  # see start_kv_transfer
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
        self._undelivered: list[TokenUpdate] = []  # of an interrupted step
        # Heaps of (deadline, sequence id, request ids of one prompt): to start, and to finish.
        self._deadlines: list[tuple[float, int, list[str]]] = []
        self._timeouts: list[tuple[float, int, list[str]]] = []

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

    def step(self) -> list[TokenUpdate]:
        """Schedule and launch, then collect and apply the oldest step in flight. With asynchronous
        scheduling one more step stays in flight, in a pipeline one per other stage. A failed step
        ends its requests only. WorkerLostError: no step can follow."""
        if self._undelivered:
            updates, self._undelivered = self._undelivered, []
            return updates
        ended = self._end_timed_out()
        if ended:
            return self._checked(ended)
        return self._checked(self._launch_and_collect())

    def _launch_and_collect(self) -> list[TokenUpdate]:
        """Launch up to the limit, then collect the oldest step. Behind a step with drafts, which is
        in flight alone, the next one is launched before the result is returned."""
        ended = self._launch_steps()
        if ended or not self._in_flight:
            return ended
        has_drafts = bool(self._in_flight[0].plan.draft_token_ids)
        updates = self._collect_oldest()
        if self.is_async and has_drafts:
            with self._deliver_if_interrupted(updates):
                updates += self._launch_steps()
        return updates

    def _schedule(self) -> SchedulerOutputs | None:
        """Return the next plan; None when no request can run."""
        plan = self.scheduler.schedule()
        if plan.batch_size:
            self._checked_idle = False
            return plan
        if self.scheduler.has_unfinished() and not self._in_flight:
            raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
        return None

    def _guarded(
        self, plan: SchedulerOutputs, run: Callable[[], T]
    ) -> tuple[T | None, list[TokenUpdate]]:
        """Return the result of `run`, or None and the final updates of the step's requests."""
        try:
            return run(), []
        except WorkerLostError:
            raise
        except Exception as error:
            self.failed_steps += 1
            logger.exception("step %d failed; its requests: %s", plan.step_id, plan.request_ids)
            return None, self.scheduler.fail_step(plan.step_id, str(error))
        except BaseException:  # KeyboardInterrupt: only the step is lost
            self._undelivered += self.scheduler.fail_step(
                plan.step_id, "interrupted", RequestStatus.FINISHED_ABORTED
            )
            raise

    # ---- launch and collect --------------------------------------------------------------------

    def _launch_steps(self) -> list[TokenUpdate]:
        """Launch steps up to the limit. Drafts are proposed when nothing is in flight, and nothing
        is launched behind them. Returns the updates of steps that failed or needed sync."""
        running, speculator = self.scheduler.running, self.speculator
        overlaps = self._max_in_flight > 1
        while len(self._in_flight) < self._max_in_flight:
            start = time.perf_counter()
            if speculator is not None:
                if not self._in_flight:
                    speculator.propose(running)
                elif self._in_flight[-1].plan.draft_token_ids or speculator.should_wait(running):
                    break
            plan = self._schedule()
            if plan is None:
                break
            if overlaps and self._needs_sync(plan):
                return self._run_alone(plan, start)
            queued = overlaps and not plan.draft_token_ids
            _, failed = self._guarded(plan, partial(self._launch, plan, start, queued))
            if failed:
                return failed
        return []

    def _needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether a step must run when no other step is in flight, and to its end."""
        if not self.is_async:  # stages: steps in flight share no sampling request, but grammars
            return self.structured.has_grammar(plan)
        if self.scheduler.needs_sync(plan):
            return True
        if plan.draft_token_ids:
            return bool(self._in_flight)
        return self.speculator is not None and self.speculator.needs_sync(plan)

    def _run_alone(self, plan: SchedulerOutputs, start: float) -> list[TokenUpdate]:
        """Collect all steps in flight, then launch and collect this one."""
        updates, failed = self._guarded(plan, self._collect_all)
        if updates is None:
            return failed
        with self._deliver_if_interrupted(updates):
            start = max(start, self._last_collected)
            is_launched, failed = self._guarded(plan, partial(self._launch, plan, start, False))
            return updates + (self._collect_oldest() if is_launched else failed)

    def _launch(self, plan: SchedulerOutputs, start: float, queued: bool) -> bool:
        """`queued`: another step may be launched before this one is collected."""
        masks = self.structured.request_masks(plan)
        self.executor.execute_model(plan, queued)
        if self._max_in_flight > 1:
            self.scheduler.note_launched(plan)
        self._in_flight.append(_LaunchedStep(plan, start, queued, masks))
        return True

    def _collect_oldest(self) -> list[TokenUpdate]:
        launched = self._in_flight.popleft()
        plan = launched.plan
        masks = None if launched.masks is None else launched.masks.result
        collect = partial(self.executor.sample_tokens, plan.step_id, masks)
        output, failed = self._guarded(plan, collect)
        if output is None:
            return failed
        # The time of a queued step counts from the end of the step before it.
        is_timed = not launched.queued or launched.start < self._last_collected
        start = max(launched.start, self._last_collected)
        if self.speculator is not None:
            took = time.perf_counter() - start if is_timed else None
            self.speculator.observe(plan, output, took)
        self.failed_steps = 0
        updates = self.scheduler.update_from_output(output)
        self._publish_prompts()
        seconds = time.perf_counter() - start
        if is_timed:
            self.scheduler.builder.step_time.observe(
                plan.num_prefill_tokens, plan.prefill_position, seconds
            )
        self._record(plan, seconds)
        self._last_collected = time.perf_counter()
        return updates

    def start_kv_transfer(self, address: str, token: bytes) -> str:
        """Exchange KV blocks with other engines that know the token; return the address with its
        port. Needs `kv_transfer`."""
        executor, blocks = self.executor, self.scheduler.block_manager
        self.kv_transfer = KvTransfer(
            *(self.config, self.model_info, blocks, executor.host_files(), executor.copy_blocks),
            *(address, token),
        )
        return self.kv_transfer.address

    def _publish_prompts(self) -> None:
        exported, self.scheduler.exported = self.scheduler.exported, []
        if self.kv_transfer is not None:
            for request in exported:
                self.kv_transfer.publish(request)

    def _collect_all(self) -> list[TokenUpdate]:
        updates: list[TokenUpdate] = []
        with self._deliver_if_interrupted(updates):
            while self._in_flight:
                updates += self._collect_oldest()
        return updates

    @contextmanager
    def _deliver_if_interrupted(self, updates: list[TokenUpdate]) -> Iterator[None]:
        """Deliver `updates` with the next step when the block is interrupted."""
        try:
            yield
        except BaseException:
            self._undelivered[:0] = updates
            raise

    def add_requests(self, requests: Sequence[Request], deadline: float | None = None) -> None:
        """Queue the choices of a prompt, all or none; InvalidInputError when one can never fit.
        `deadline`: time.monotonic() before which one of them must start. Requests are pending until
        their LoRA adapter is in host memory and their grammar is compiled: see `poll`."""
        adapter = self.loras.assign(requests)
        if adapter is not None and not self.loras.is_ready(adapter):
            self.scheduler.check(requests)
            self.loras.add(requests, deadline, adapter)
        else:
            self._add(requests, deadline)

    def _fetch(self, requests: Sequence[Request], deadline: float | None) -> bool:
        """Start to receive the KV blocks of requests from another engine, if there is one."""
        if self.kv_transfer is None or not requests[0].kv_source:
            return False
        self.scheduler.check(requests)
        return self.kv_transfer.add(requests, deadline)

    def _add(self, requests: Sequence[Request], deadline: float | None) -> None:
        """Queue requests whose adapter is in host memory."""
        if not self._fetch(requests, deadline):
            self._compile(requests, deadline)

    def _compile(self, requests: Sequence[Request], deadline: float | None) -> None:
        """Queue requests whose KV blocks are received."""
        if requests[0].sampling.structured_outputs is not None:
            self.scheduler.check(requests)
            self.structured.add(requests, deadline)
        else:
            self._queue(requests, deadline)

    def poll(self, timeout: float = 0.0) -> list[tuple[Sequence[Request], Exception]]:
        """Queue pending requests whose adapters and grammars are ready; return the rejected ones
        with their errors. Waits at most `timeout` seconds for a grammar."""
        rejected = self._poll_loras() + self._poll_kv_transfer()
        ready, failed = self.structured.poll(timeout)
        for pending in ready:
            try:
                self._queue(pending.requests, pending.deadline)
                self.structured.start(pending)
            except InvalidInputError as error:
                self.structured.discard(pending)
                rejected.append((pending.requests, error))
        return rejected + [(pending.requests, error) for pending, error in failed]

    def _poll_loras(self) -> list[tuple[Sequence[Request], Exception]]:
        ready, failed = self.loras.poll()
        rejected: list[tuple[Sequence[Request], Exception]] = []
        for waiting in ready:
            try:
                self._add(waiting.requests, waiting.deadline)
            except InvalidInputError as error:
                rejected.append((waiting.requests, error))
        for waiting, reason in failed:
            text = f"the LoRA adapter {waiting.adapter.name!r} cannot be read"
            logger.error("%s: %s", text, reason)
            rejected.append((waiting.requests, InvalidInputError(text, field="lora")))
        return rejected

    def _poll_kv_transfer(self) -> list[tuple[Sequence[Request], Exception]]:
        rejected: list[tuple[Sequence[Request], Exception]] = []
        for received in self.kv_transfer.poll() if self.kv_transfer is not None else ():
            try:
                self._compile(received.requests, received.deadline)
            except InvalidInputError as error:
                rejected.append((received.requests, error))
        return rejected

    def _used_lora_ids(self) -> set[int]:
        """The adapters of unfinished requests."""
        used = {request.lora_id for request in self.scheduler.requests.values()}
        if self.kv_transfer is not None:
            used |= {request.lora_id for request in self.kv_transfer.pending_requests()}
        return used | {request.lora_id for request in self.structured.pending_requests()}

    def wait_until_queued(self, requests: Sequence[Request]) -> None:
        """Wait until the grammar of `requests` is compiled; raises the error when they are
        rejected. No step runs meanwhile, so grammars of queued requests stay in use: their number
        has no limit."""
        self.structured.lift_process_limit()
        while self.structured.is_pending(requests[0]):
            for rejected, error in self.poll(timeout=1.0):
                if rejected[0] is requests[0]:
                    raise error
                failed = RequestStatus.FINISHED_ERROR  # another one, whose adapter is unreadable
                self._undelivered += [
                    TokenUpdate(r.request_id, [], failed, error=str(error)) for r in rejected
                ]

    def _queue(self, requests: Sequence[Request], deadline: float | None) -> None:
        self.scheduler.add(requests)
        first, names = requests[0], [request.request_id for request in requests]
        if deadline is not None:
            heappush(self._deadlines, (deadline, first.seq_id, names))
        if first.sampling.timeout is not None:
            until = first.arrival_time + first.sampling.timeout
            heappush(self._timeouts, (until, first.seq_id, names))
            self._prune_timeouts()

    def expire(self) -> list[list[Request]]:
        """End and return the prompts of which no choice started before the deadline."""
        now = time.monotonic()
        expired = []
        for requests in (
            *(pending.requests for pending in self.loras.expire(now)),
            *(pending.requests for pending in self.structured.expire(now)),
            *(p.requests for p in (self.kv_transfer.expire(now) if self.kv_transfer else ())),
        ):
            expired.append(list(requests))
            for request in requests:
                request.set_status(RequestStatus.FINISHED_ABORTED)
        while self._deadlines and self._deadlines[0][0] <= now:
            names = heappop(self._deadlines)[2]
            queued = [r for name in names if (r := self.scheduler.requests.get(name)) is not None]
            if queued and all(r.status is RequestStatus.WAITING for r in queued):
                expired.append(queued)
                for request in queued:
                    self.finish_request(request.request_id)
        return expired

    def _end_timed_out(self) -> list[TokenUpdate]:
        """End the requests whose `timeout` has passed; return their last updates."""
        found = []
        while self._timeouts and self._timeouts[0][0] <= time.monotonic():
            names = heappop(self._timeouts)[2]
            found += [self.scheduler.finish(n, RequestStatus.FINISHED_TIMED_OUT) for n in names]
        return [update for update in found if update is not None]

    def _prune_timeouts(self) -> None:
        """Remove the entries of finished requests when they are the majority."""
        unfinished = self.scheduler.requests
        if len(self._timeouts) > 64 + 2 * len(unfinished):
            self._timeouts = [e for e in self._timeouts if any(n in unfinished for n in e[2])]
            heapify(self._timeouts)

    def finish_request(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> TokenUpdate | None:
        """End a request; None when it has already finished."""
        for index, update in enumerate(self._undelivered):
            if update.request_id == request_id:
                return self._undelivered.pop(index)
        pending = self.loras.cancel(request_id) or self.structured.cancel(request_id)
        if pending is None and self.kv_transfer is not None:
            pending = self.kv_transfer.cancel(request_id)
        if pending is not None:
            pending.set_status(RequestStatus.FINISHED_ABORTED)
            return TokenUpdate(request_id, [], RequestStatus.FINISHED_ABORTED)
        finished = self.scheduler.finish(request_id, status)
        self._check_idle()
        return finished

    def has_unfinished(self) -> bool:
        return self.can_step or self.has_pending

    @property
    def has_pending(self) -> bool:
        """Whether `poll` should be called soon."""
        is_receiving = self.kv_transfer is not None and self.kv_transfer.is_busy
        return bool(self.structured.num_pending) or self.loras.is_busy or is_receiving

    @property
    def can_step(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self._undelivered or self._in_flight)

    def stats(self) -> dict[str, Any]:
        """Counters for logs and metrics, by name."""
        prefix = self.scheduler.block_manager.stats
        executor = self.executor.stats
        drafts = SpeculativeStats() if self.speculator is None else self.speculator.stats
        scheduler = self.scheduler.stats()
        scheduler["num_waiting"] += self.structured.num_pending + self.loras.num_pending
        transfer = TransferStats()
        if self.kv_transfer is not None:
            transfer = self.kv_transfer.stats
            scheduler["num_waiting"] += self.kv_transfer.num_pending
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
            "kv_transfer_sent_blocks": transfer.sent_blocks,
            "kv_transfer_received_blocks": transfer.received_blocks,
            "kv_transfer_received_bytes": transfer.received_bytes,
            "kv_transfer_seconds": transfer.seconds,
            "kv_transfer_failures": transfer.failures,
            "spec_decode_num_drafts": drafts.num_drafts,
            "spec_decode_num_draft_tokens": drafts.num_draft_tokens,
            "spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
            "spec_decode_accepted_per_position": list(drafts.accepted_per_position),
            "spec_decode_mean_accepted_length": drafts.mean_accepted_length,
            "loras": len(self.loras.names),
            "loras_in_host": self.loras.num_host,
            "lora_reads": self.loras.num_reads,
            "lora_failures": self.loras.num_failures,
            "worker_errors": executor.worker_errors,
            "executor_timeouts": executor.timeouts,
        }

    def close(self) -> None:
        self.structured.close()
        if self.kv_transfer is not None:
            self.kv_transfer.close()
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
            logger.debug("%s of %s", record, plan.request_ids)

    def _checked(self, updates: list[TokenUpdate]) -> list[TokenUpdate]:
        self._check_idle()
        return updates

    def _check_idle(self) -> None:
        """Check for leaked blocks when the last request ends; free unloaded adapters."""
        self.loras.drop_retired()
        if not self._checked_idle and not self.scheduler.has_unfinished():
            self.structured.release_finished()
            self.scheduler.check_idle()
            self._checked_idle = True
