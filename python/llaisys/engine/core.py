"""The engine's heart: scheduler and executor. It knows token ids, never text.

What an engine does whatever stands around it is here: requests are taken all or none, wait no
longer than their deadline, end when their time is over, and a step that raises ends its own
requests and is counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import SchedulerOutputs, StepOutput, StepRecord, TokenUpdate
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.context_window import context_length
from llaisys.engine.executor import Executor, WorkerLostError
from llaisys.engine.scheduler import RequestScheduler
from llaisys.engine.speculative import SpeculativeStats, make_speculator
from llaisys.engine.structured.requests import StructuredRequests

logger = logging.getLogger("llaisys.engine")

STEP_HISTORY = 1024
MAX_IN_FLIGHT = 2  # one runs, the other is ready to
# Devices on which "auto" schedules asynchronously (docs/internals/measurements/).
AUTO_ASYNC_DEVICES = frozenset({"cuda"})

T = TypeVar("T")


class EngineCore:
    """Owns the executor it is given and closes it."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
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
                config.cache.enable_prefix_caching,
                config.cache.prefix_cache_min_match,
                context_len=context_len,
                num_host_blocks=info.num_host_blocks,
            ),
            info.max_model_len,
        )
        self.speculator = make_speculator(config.speculative, info.vocab_size, executor.draft)
        self.structured = StructuredRequests(self.model_info, config.scheduler.max_num_seqs)
        self.is_async = self._can_schedule_async(config)
        self.scheduler.builder.max_in_flight_tokens = int(self.is_async)
        self._in_flight: deque[tuple[SchedulerOutputs, float]] = deque()  # with start times
        self._last_finish = 0.0
        self.steps: deque[StepRecord] = deque(maxlen=STEP_HISTORY)  # the latest ones
        self.num_steps = 0
        self.failed_steps = 0  # in a row
        self._checked_idle = True
        self._undelivered: list[TokenUpdate] = []  # of a step that was interrupted
        # Heaps of (deadline, a number that rises, the choices of one prompt): to be started, and to
        # be finished.
        self._deadlines: list[tuple[float, int, list[str]]] = []
        self._timeouts: list[tuple[float, int, list[str]]] = []

    def _can_schedule_async(self, config: EngineConfig) -> bool:
        wanted = config.async_scheduling
        if wanted == "off" or (wanted == "auto" and config.device not in AUTO_ASYNC_DEVICES):
            return False
        if self.executor.can_launch:
            return True
        logger.log(
            logging.WARNING if wanted == "on" else logging.INFO,
            "async_scheduling is off: it needs one rank, no step_timeout and a model that can be "
            "launched",
        )
        return False

    def step(self) -> list[TokenUpdate]:
        """Plan, run, apply; or, with steps ahead, plan and launch, then apply what an earlier one
        drew. A fault ends the requests of its step and nothing else; when the worker is lost
        WorkerLostError is raised, and no step can follow."""
        if self._undelivered:
            updates, self._undelivered = self._undelivered, []
            return updates
        ended = self._time_out()
        if ended:
            return self._checked(ended)
        if self.is_async:
            return self._checked(self._step_async())
        start = time.perf_counter()
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        plan = self._plan()
        return [] if plan is None else self._checked(self._run(plan, start))

    def _plan(self) -> SchedulerOutputs | None:
        """None: nothing can be done now."""
        plan = self.scheduler.schedule()
        if plan.batch_size:
            self._checked_idle = False
            return plan
        if self.scheduler.has_unfinished() and not self._in_flight:
            raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
        return None

    def _run(self, plan: SchedulerOutputs, start: float) -> list[TokenUpdate]:
        """A step from its beginning to its end."""

        def execute() -> StepOutput:
            masks = self.structured.begin(plan)
            args = (plan,) if masks is None else (plan, masks.result)
            return self.executor.execute_step(*args)

        output, failed = self._attempt(plan, execute)
        if output is None:
            return failed
        if self.speculator is not None:
            self.speculator.observe(plan, output, time.perf_counter() - start)
        return self._applied(plan, output, start)

    def _attempt(
        self, plan: SchedulerOutputs, run: Callable[[], T]
    ) -> tuple[T | None, list[TokenUpdate]]:
        """What `run` returns; or None, and the ends of the step's requests."""
        try:
            return run(), []
        except WorkerLostError:
            raise
        except Exception as error:
            self.failed_steps += 1
            logger.exception("step %d failed; its requests: %s", plan.step_id, plan.request_ids)
            return None, self.scheduler.fail_step(plan.step_id, str(error))
        except BaseException:  # KeyboardInterrupt: the step is lost, the engine is not
            self._undelivered += self.scheduler.fail_step(
                plan.step_id, "interrupted", RequestStatus.FINISHED_ABORTED
            )
            raise

    def _applied(
        self, plan: SchedulerOutputs, output: StepOutput, start: float
    ) -> list[TokenUpdate]:
        self.failed_steps = 0
        updates = self.scheduler.update_from_output(output)
        self._record(plan, time.perf_counter() - start)
        return updates

    # ---- steps ahead ---------------------------------------------------------------------------

    def _step_async(self) -> list[TokenUpdate]:
        """Launch until two steps are out, then wait for the older one. Behind one with drafts,
        which is out alone, the next is begun at once: what was drawn is told while that one runs.
        """
        ended = self._launch_steps()
        if ended or not self._in_flight:
            return ended
        has_drafts = bool(self._in_flight[0][0].draft_token_ids)
        updates = self._finish_oldest()
        if has_drafts:
            with self._keeping(updates):
                updates += self._launch_steps()
        return updates

    def _launch_steps(self) -> list[TokenUpdate]:
        """A step that is bound to the results of those before it waits for all of them and runs
        alone; so does one with drafts, which are asked for when nothing is out. The updates are of
        steps that failed, or that could not but be waited for."""
        running, speculator = self.scheduler.running, self.speculator
        while len(self._in_flight) < MAX_IN_FLIGHT:
            start = time.perf_counter()
            if speculator is not None:
                if not self._in_flight:
                    speculator.propose(running)
                elif self._in_flight[-1][0].draft_token_ids or speculator.waits(running):
                    break
            plan = self._plan()
            if plan is None:
                break
            if self._needs_sync(plan):
                updates, failed = self._attempt(plan, self._finish_all)
                if updates is None:
                    return failed
                with self._keeping(updates):
                    return updates + self._run(plan, max(start, self._last_finish))
            launch = self._begin if plan.draft_token_ids else self._launch
            _, failed = self._attempt(plan, partial(launch, plan, start))
            if failed:
                return failed
        return []

    def _needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether a step can only run when all others are done, and be waited for."""
        if self.scheduler.needs_sync(plan):
            return True
        if plan.draft_token_ids:
            return bool(self._in_flight)
        return self.speculator is not None and self.speculator.looks_on(plan)

    def _launch(self, plan: SchedulerOutputs, start: float) -> None:
        self.executor.launch_step(plan)
        self.scheduler.note_launched(plan)
        self._in_flight.append((plan, start))

    def _begin(self, plan: SchedulerOutputs, start: float) -> None:
        """Its draws, which may be many for a sequence, are made when it is waited for."""
        self.executor.execute_model(plan)
        self.scheduler.note_launched(plan)
        self._in_flight.append((plan, start))

    def _finish_oldest(self) -> list[TokenUpdate]:
        plan, start = self._in_flight.popleft()
        has_drafts = bool(plan.draft_token_ids)
        finish = partial(self.executor.finish_step, plan.step_id)
        output, failed = self._attempt(plan, self.executor.sample_tokens if has_drafts else finish)
        if output is None:
            return failed
        # The time of one that was launched behind another is that since the other was done.
        is_timed = has_drafts or start < self._last_finish
        start = max(start, self._last_finish)
        if self.speculator is not None:
            took = time.perf_counter() - start if is_timed else None
            self.speculator.observe(plan, output, took)
        updates = self._applied(plan, output, start)
        self._last_finish = time.perf_counter()
        return updates

    def _finish_all(self) -> list[TokenUpdate]:
        updates: list[TokenUpdate] = []
        with self._keeping(updates):
            while self._in_flight:
                updates += self._finish_oldest()
        return updates

    @contextmanager
    def _keeping(self, updates: list[TokenUpdate]) -> Iterator[None]:
        """What is known is delivered, although what follows was interrupted."""
        try:
            yield
        except BaseException:
            self._undelivered[:0] = updates
            raise

    def add_requests(self, requests: Sequence[Request], deadline: float | None = None) -> None:
        """Queue the choices of a prompt, all of them or none; InvalidInputError when one can never
        fit. `deadline`: time.monotonic() at which one of them must have been started. Answers that
        must have a form are held until that is understood: see `poll`."""
        if requests[0].sampling.structured_outputs is not None:
            self.scheduler.check(requests)
            self.structured.hold(requests, deadline)
        else:
            self._queue(requests, deadline)

    def poll(self, timeout: float = 0.0) -> list[tuple[Sequence[Request], Exception]]:
        """Queue what was held and can run now; those that never can, and why. Waits at most
        `timeout` seconds for news."""
        ready, refused = self.structured.poll(timeout)
        refusals: list[tuple[Sequence[Request], Exception]] = []
        for held in ready:
            try:
                self._queue(held.requests, held.deadline)
                self.structured.start(held)
            except InvalidInputError as error:
                self.structured.drop(held)
                refusals.append((held.requests, error))
        return refusals + [(held.requests, error) for held, error in refused]

    def settle(self, requests: Sequence[Request]) -> None:
        """Wait until `requests` are queued; raises why they cannot be."""
        while self.structured.is_held(requests[0]):
            for refused, error in self.poll(timeout=1.0):
                if refused[0] is requests[0]:
                    raise error

    def _queue(self, requests: Sequence[Request], deadline: float | None) -> None:
        self.scheduler.add(requests)
        first, names = requests[0], [request.request_id for request in requests]
        if deadline is not None:
            heappush(self._deadlines, (deadline, first.seq_id, names))
        if first.sampling.timeout is not None:
            until = first.arrival_time + first.sampling.timeout
            heappush(self._timeouts, (until, first.seq_id, names))
            self._forget_timeouts()

    def expire(self) -> list[list[Request]]:
        """End the prompts of which nothing was started before the deadline; those prompts."""
        now = time.monotonic()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            names = heappop(self._deadlines)[2]
            requests = [r for name in names if (r := self.scheduler.requests.get(name)) is not None]
            if requests and all(r.status is RequestStatus.WAITING for r in requests):
                expired.append(requests)
                for request in requests:
                    self.finish_request(request.request_id)
        return expired

    def _time_out(self) -> list[TokenUpdate]:
        """End the requests whose `timeout` is over, waiting or running; their last updates."""
        found = []
        while self._timeouts and self._timeouts[0][0] <= time.monotonic():
            names = heappop(self._timeouts)[2]
            found += [self.scheduler.finish(n, RequestStatus.FINISHED_TIMED_OUT) for n in names]
        return [update for update in found if update is not None]

    def _forget_timeouts(self) -> None:
        """Those of finished requests, when they are most of them."""
        living = self.scheduler.requests
        if len(self._timeouts) > 64 + 2 * len(living):
            kept = [entry for entry in self._timeouts if any(n in living for n in entry[2])]
            self._timeouts = kept
            heapify(kept)

    def finish_request(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> TokenUpdate | None:
        """End a request from outside; None when it has finished already."""
        for index, update in enumerate(self._undelivered):
            if update.request_id == request_id:
                return self._undelivered.pop(index)
        held = self.structured.cancel(request_id)
        if held is not None:
            held.set_status(RequestStatus.FINISHED_ABORTED)
            return TokenUpdate(request_id, [], RequestStatus.FINISHED_ABORTED)
        finished = self.scheduler.finish(request_id, status)
        self._check_idle()
        return finished

    def has_unfinished(self) -> bool:
        return self.can_step or bool(self.structured.num_held)

    @property
    def can_step(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self._undelivered or self._in_flight)

    def stats(self) -> dict[str, Any]:
        """Numbers for logs and metrics."""
        prefix = self.scheduler.block_manager.stats
        executor = self.executor.stats
        drafts = SpeculativeStats() if self.speculator is None else self.speculator.stats
        scheduler = self.scheduler.stats()
        scheduler["num_waiting"] += self.structured.num_held
        return {
            "num_steps": self.num_steps,
            **scheduler,
            "kv_cache_bytes": self.model_info.kv_cache_bytes,
            "kv_host_bytes": self.model_info.kv_host_bytes,
            "prefix_cache_queries": prefix.queries,
            "prefix_cache_hits": prefix.hits,
            "prefix_cache_host_hits": prefix.host_hits,
            "prefix_cache_hit_rate": prefix.hit_rate,
            "prefix_cache_evictions": prefix.evictions,
            "spec_decode_num_drafts": drafts.num_drafts,
            "spec_decode_num_draft_tokens": drafts.num_draft_tokens,
            "spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
            "spec_decode_accepted_per_position": list(drafts.accepted_per_position),
            "spec_decode_mean_accepted_length": drafts.mean_accepted_length,
            "worker_errors": executor.worker_errors,
            "executor_timeouts": executor.timeouts,
        }

    def close(self) -> None:
        self.structured.close()
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
        """Whenever the engine runs empty: nothing may be left behind."""
        if not self._checked_idle and not self.scheduler.has_unfinished():
            self.structured.forget_finished()
            self.scheduler.check_idle()
            self._checked_idle = True
