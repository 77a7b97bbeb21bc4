"""Builds the batch of a step: divides the token budget among running, then waiting requests
(continuous batching, chunked prefill).

Requests start and are preempted through `RequestQueues`; `FairQueue` decides their order.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import ContextShift
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.context_window import ContextWindow
from llaisys.engine.prefix_nodes import PrefixMatch
from llaisys.engine.request_queues import RequestQueues
from llaisys.engine.scheduled_batch import ScheduledBatch
from llaisys.engine.step_time import StepTimeBound

logger = logging.getLogger("llaisys.engine")

PEEKED_PROMPTS = 8  # waiting requests that longer prompts leave tokens for


class BatchBuilder:
    """Owns no request. `in_flight`: batches whose results have not arrived, by step id."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        window: ContextWindow,
        in_flight: Mapping[int, ScheduledBatch],
        max_in_flight_tokens: int,
    ) -> None:
        self.config = config
        self.queues = queues
        self.running = queues.running
        self.waiting = queues.waiting
        self.blocks = queues.blocks
        self.window = window
        self.max_in_flight_tokens = max_in_flight_tokens  # sampled tokens of one request
        self.whole_prompts = False  # a prompt is computed in one step, by an encoder
        self.max_restored_tokens: int | None = None  # of a step with other requests; None: no limit
        self.num_batches = 1  # steps in flight of a pipeline, which divide the running requests
        self.num_context_shifts = 0
        self.step_time = StepTimeBound(config.max_step_time or 0.0)
        self._next_prompts: dict[Request, int] = {}  # first waiting requests -> their tokens
        self._in_flight = in_flight
        self._watermark = max(1, self.blocks.num_blocks // 100)

    def build(self, batch: ScheduledBatch) -> None:
        """Schedule all requests that can run; the batch stays empty when none can."""
        running = self.running
        prompts = [n for r in running if (n := len(r.token_ids)) - r.num_computed_tokens > 1]
        num_streams = len(self.running) - len(prompts)
        num_startable = min(len(self.waiting), self.config.max_num_seqs - len(self.running))
        self._next_prompts = {}
        if num_startable > 0:
            self._next_prompts = {r: r.num_tokens for r in self.waiting.candidates(PEEKED_PROMPTS)}
        # The batches of a pipeline divide the tokens, too.
        max_tokens = -(-self.config.token_budget // self.num_batches)
        prompts += list(self._next_prompts.values())[: max(0, num_startable)]
        prompts += [0] * (num_startable - len(self._next_prompts))
        self.step_time.open_step(num_streams, prompts, max_tokens)
        num_requests = len(self.running) + len(self.waiting)
        self._schedule_running(batch)
        parts: list[Request] = []
        self._schedule_waiting(batch, -(-num_requests // self.num_batches), parts)
        self._restore_part(batch, parts)

    def _schedule_running(self, batch: ScheduledBatch) -> None:
        """Schedule each running request and allocate its blocks."""
        block_size = self.blocks.block_size
        requests, starts, counts = batch.requests, batch.plan.starts, batch.plan.counts
        has_drafts = any(other.plan.draft_token_ids for other in self._in_flight.values())
        is_async = self.max_in_flight_tokens > 0 and not has_drafts
        most = -(-len(self.running) // self.num_batches)
        for request in tuple(self.running):
            if len(requests) == most:
                break
            start = request.num_computed_tokens
            count = len(request.token_ids) - start
            is_last = start + 1 >= request.max_total_tokens
            if count == 0 and is_async and request.generates and not is_last:
                count = 1  # see _count: its token is in flight
            elif count != 1 or request.draft_token_ids or not request.generates:
                count = self._count(batch, request, count)
                if not count:
                    continue
            if -start % block_size < count and not self._extend(batch, request, start + count):
                continue
            requests.append(request)  # batch.add, inlined for decoding requests
            starts.append(start - request.num_discarded_tokens)
            counts.append(count)
            request.num_computed_tokens = start + count

    def _count(self, batch: ScheduledBatch, request: Request, missing: int) -> int:
        """Return the tokens to schedule for a running request; `missing` of its known tokens are
        not computed."""
        if request.status is not RequestStatus.RUNNING:
            return 0  # preempted in this step
        if missing < 1:
            # A step in flight samples its next token. The last token of a request is not computed.
            is_last = request.num_computed_tokens + 1 >= request.max_total_tokens
            is_allowed = -missing < self.max_in_flight_tokens and not self._has_drafts(request)
            return int(is_allowed and request.generates and not is_last)
        later = self.running[self.running.index(request) + 1 :]
        budget = self._budget_left(batch) - len(later)  # one token is reserved for each of them
        if missing > 1 or not request.generates:
            prompts = [n for r in later if (n := len(r.token_ids) - r.num_computed_tokens) > 1]
            return self._chunk(batch, request, budget, prompts)
        # Drafts use no block that another request may need in this step.
        slots = self.blocks.slots_left(request, spare=len(self.running))
        left = min(request.max_total_tokens - request.num_tokens, self.window.room(request))
        room = min(budget, left, slots) - 1
        draft, request.draft_token_ids = request.draft_token_ids[: max(0, room)], []
        if draft:
            batch.plan.draft_token_ids[request.seq_id] = draft
        return 1 + len(draft)

    def _budget_left(self, batch: ScheduledBatch) -> int:
        return self.config.token_budget - sum(batch.plan.counts)

    def _has_drafts(self, request: Request) -> bool:
        """Whether a step in flight verifies drafts of the request, so its length is unknown."""
        return any(request.seq_id in b.plan.draft_token_ids for b in self._in_flight.values())

    def _extend(self, batch: ScheduledBatch, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens in all, preempting other requests if needed;
        return False when the request itself was preempted."""
        added = None
        while request.status is RequestStatus.RUNNING:
            if not self.window.is_full(request, num_tokens) or self._shift(batch, request):
                in_cache = num_tokens - request.num_discarded_tokens
                added = self.blocks.append_slot(request, in_cache)
            if added is not None:
                break
            self.preempt(batch, self.waiting.largest(self.running))
        if added:
            batch.plan.new_blocks[request.seq_id] = added
        return added is not None

    def _shift(self, batch: ScheduledBatch, request: Request) -> bool:
        """Shift a full context; return False when there are not enough blocks for the copies."""
        keep, discard = request.num_keep_tokens, self.window.num_discard(request)
        blocks = self.blocks.shift(request, keep, discard)
        if blocks is None:
            return False
        start = request.num_computed_tokens
        following = request.token_ids[start : start + discard]
        num_copies = self.blocks.host.num_planned
        shift = ContextShift(request.seq_id, keep, discard, blocks, following, num_copies)
        batch.plan.shifts.append(shift)
        request.num_discarded_tokens += discard
        self.num_context_shifts += 1
        return True

    def _schedule_waiting(self, batch: ScheduledBatch, most: int, parts: list[Request]) -> None:
        """Start waiting requests until the batch has `most` requests or the budget, max_num_seqs or
        the blocks run out. At most 2 * max_num_seqs candidates are examined, so a long queue costs
        no more than a short one. Those that would restore too many tokens are added to `parts`."""
        max_seqs = self.config.max_num_seqs
        if not self.waiting or (len(self.running) >= max_seqs and not self.waiting.can_preempt):
            return
        with closing(self.waiting.candidates(2 * max_seqs)) as candidates:
            self._start(batch, candidates, most, parts)

    def _start(
        self,
        batch: ScheduledBatch,
        candidates: Iterable[Request],
        most: int,
        parts: list[Request],
    ) -> None:
        """Start requests in the order of `candidates`; see `_schedule_waiting`."""
        manager, max_seqs = self.blocks, self.config.max_num_seqs
        budget = self._budget_left(batch)
        loras = self.queues.loras
        blocked: list[Request] = []  # wait for a LoRA slot
        for request in candidates:
            if budget <= 0 or (self.whole_prompts and request.num_tokens > budget):
                return
            if len(batch.requests) >= most:
                return
            if request.lora_id and not loras.can_start(request, blocked):
                blocked.append(request)
                continue
            if manager.is_waiting_for_prefix(request) or not self._has_logprob_room(batch, request):
                continue
            match = manager.match_prefix(request)
            if match.pending:
                continue  # a running request computes this prefix
            if self._restores_too_much(batch, request, match):
                parts.append(request)
                continue
            if not self.whole_prompts and self.step_time.fitting_tokens(match.num_tokens) == 0:
                return
            while len(self.running) >= max_seqs or not self._fits(request, match):
                if not self._make_room(batch, request):
                    return
                match = manager.match_prefix(request)
            blocks = manager.allocate(request, match)
            if blocked:
                loras.count_pass(request, blocked)
            self._next_prompts.pop(request, None)
            self.queues.start(request, match.num_tokens, match.num_host_tokens)
            batch.add_sequence(request, blocks)
            count = self._chunk(batch, request, budget, ())
            batch.add(request, count)
            budget -= count

    def _restores_too_much(
        self, batch: ScheduledBatch, request: Request, match: PrefixMatch
    ) -> bool:
        """Whether restoring the whole match would delay the other requests of the step."""
        limit = self.max_restored_tokens
        if limit is None or not batch.requests or match.num_host_tokens <= limit:
            return False
        return self.blocks.can_restore_part(request, match)

    def _restore_part(self, batch: ScheduledBatch, parts: list[Request]) -> None:
        """Restore a part of the first prefix of `parts` with this step."""
        if not parts or not batch.requests or self.max_restored_tokens is None:
            return
        match = self.blocks.match_prefix(parts[0])  # again: others have started
        if not match.pending and self._fits(parts[0], match):
            count = max(1, self.max_restored_tokens // self.blocks.block_size)
            self.blocks.restore_part(parts[0], match, count)

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        manager = self.blocks
        if manager.can_allocate(request, match, self._watermark if self.running else 0):
            return True
        if not self.running:
            raise RuntimeError(
                f"request {request.request_id} needs {manager.first_blocks(request)} "
                f"blocks, {manager.num_free_blocks} of {manager.num_blocks} are free, nothing runs"
            )
        return False

    def _make_room(self, batch: ScheduledBatch, request: Request) -> bool:
        """Preempt a request for a waiting one; return False when fairness allows none."""
        victim = self.waiting.victim_for(request, self.running)
        if victim is None:
            return False
        self.preempt(batch, victim)
        return True

    def _chunk(
        self, batch: ScheduledBatch, request: Request, budget: int, later: Sequence[int]
    ) -> int:
        """Return the size of the next prefill chunk. `later`: missing tokens of running prompts
        that are scheduled after this one. Shorter prompts get their tokens first."""
        missing = request.num_tokens - request.num_computed_tokens
        if self.whole_prompts:
            batch.chunks[request] = missing
            return missing
        missing = min(missing, self.window.room(request))
        start, smallest = request.position, self.config.min_prefill_chunk
        fitting = self.step_time.fitting_tokens(start)
        budget = min(budget, fitting)
        if self.step_time.max_seconds:
            smallest = min(smallest, max(1, fitting // 4))
        shorter = [n for n in (*later, *self._next_prompts.values()) if n < missing]
        budget = min(budget, max(budget - sum(shorter), budget // 4, 1))
        if missing > 2 * budget and len(shorter) < len(later) + len(self.waiting):
            budget = min(budget, max(budget // 2, smallest))
        if request.needs_prompt_logprobs:
            budget = min(budget, self.config.max_prompt_logprob_tokens - batch.num_logprob_tokens)
        count = max(0, min(missing, budget))
        if count:
            batch.chunks[request] = count
            self.step_time.spend(start, count)
            batch.num_logprob_tokens += count if request.needs_prompt_logprobs else 0
        return count

    def _has_logprob_room(self, batch: ScheduledBatch, request: Request) -> bool:
        """Whether the step has room for the request's prompt logprobs, if requested."""
        limit = self.config.max_prompt_logprob_tokens
        return not request.needs_prompt_logprobs or batch.num_logprob_tokens < limit

    def preempt(self, batch: ScheduledBatch, victim: Request) -> None:
        self.queues.preempt(victim)
        if batch.remove(victim):
            self.queues.released.remove(victim.seq_id)  # the worker does not have it
        logger.debug("request %s preempted", victim.request_id)
