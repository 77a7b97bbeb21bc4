"""Builds the batch of a step: divides the token budget among running, then waiting requests.

Requests start and are preempted through `RequestQueues`; `FairQueue` decides their order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import ContextShift
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.context_window import ContextWindow
from llaisys.engine.prefix_nodes import PrefixMatch
from llaisys.engine.request_queues import RequestQueues
from llaisys.engine.scheduled_batch import ScheduledBatch

logger = logging.getLogger("llaisys.engine")


class BatchBuilder:
    """Owns no request; `in_flight` are the steps whose results are not in yet."""

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
        self.max_in_flight_tokens = max_in_flight_tokens  # of one request
        self.num_context_shifts = 0
        self._in_flight = in_flight
        self._watermark = max(1, self.blocks.num_blocks // 100)

    def build(self, step: ScheduledBatch) -> None:
        """Plan all that can be done now; the step stays empty when that is nothing."""
        self._continue_running(step)
        self._admit(step)

    def _continue_running(self, step: ScheduledBatch) -> None:
        """Give every running request what it can compute now, and the blocks for it."""
        block_size = self.blocks.block_size
        requests, starts, counts = step.requests, step.plan.starts, step.plan.counts
        drafts_out = any(out.plan.draft_token_ids for out in self._in_flight.values())
        goes_ahead = self.max_in_flight_tokens > 0 and not drafts_out
        for request in tuple(self.running):
            start = request.num_computed_tokens
            count = len(request.token_ids) - start
            if (
                count == 0
                and goes_ahead
                and request.generates
                and start + 1 < request.max_total_tokens
            ):
                count = 1  # as _count says of a token that a step which is out will draw
            elif count != 1 or request.draft_token_ids or not request.generates:
                count = self._count(step, request, count)
                if not count:
                    continue
            if -start % block_size < count and not self._extend(step, request, start + count):
                continue
            requests.append(request)  # step.add, without a call for every request that decodes
            starts.append(start - request.num_discarded_tokens)
            counts.append(count)
            request.num_computed_tokens = start + count

    def _count(self, step: ScheduledBatch, request: Request, missing: int) -> int:
        """Tokens for a running request that is not simply one token behind; `missing` of its known
        tokens are not computed."""
        if request.status is not RequestStatus.RUNNING:
            return 0  # preempted just now
        if missing < 1:
            # Its next token is drawn by a step that is out. The last token of all is not computed.
            is_last = request.num_computed_tokens + 1 >= request.max_total_tokens
            is_known_soon = -missing < self.max_in_flight_tokens and not self._is_draft_out(request)
            return int(is_known_soon and request.generates and not is_last)
        behind = self.running[self.running.index(request) + 1 :]
        budget = self._budget_left(step) - len(behind)  # each of them keeps one token
        if missing > 1 or not request.generates:
            others = bool(self.waiting) or any(
                len(r.token_ids) - r.num_computed_tokens > 1 for r in behind
            )
            return self._chunk(step, request, budget, others)
        # Drafts take no block that another request may need in this step.
        slots = self.blocks.slots_left(request, spare=len(self.running))
        left = min(request.max_total_tokens - request.num_tokens, self.window.room(request))
        room = min(budget, left, slots) - 1
        draft, request.draft_token_ids = request.draft_token_ids[: max(0, room)], []
        if draft:
            step.plan.draft_token_ids[request.seq_id] = draft
        return 1 + len(draft)

    def _budget_left(self, step: ScheduledBatch) -> int:
        return self.config.max_num_batched_tokens - sum(step.plan.counts)

    def _is_draft_out(self, request: Request) -> bool:
        """Whether it is open how many tokens a step that is out will bring."""
        return any(request.seq_id in step.plan.draft_token_ids for step in self._in_flight.values())

    def _extend(self, step: ScheduledBatch, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` in all, taken from the latest arrivals if need be; False when the
        request itself is or was one of those."""
        added = None
        while request.status is RequestStatus.RUNNING:
            if not self.window.is_full(request, num_tokens) or self._shift(step, request):
                held = num_tokens - request.num_discarded_tokens
                added = self.blocks.append_slot(request, held)
            if added is not None:
                break
            self._preempt(step, self.waiting.largest(self.running))
        if added:
            step.plan.new_blocks[request.seq_id] = added
        return added is not None

    def _shift(self, step: ScheduledBatch, request: Request) -> bool:
        """Make room in a full context; False when there are not enough blocks for it."""
        kept, dropped = request.num_keep_tokens, self.window.num_dropped(request)
        blocks = self.blocks.shift(request, kept, dropped)
        if blocks is None:
            return False
        start = request.num_computed_tokens
        following = request.token_ids[start : start + dropped]
        num_copies = self.blocks.host.num_planned
        shift = ContextShift(request.seq_id, kept, dropped, blocks, following, num_copies)
        step.plan.shifts.append(shift)
        request.num_discarded_tokens += dropped
        self.num_context_shifts += 1
        return True

    def _admit(self, step: ScheduledBatch) -> None:
        """Start waiting requests until the budget, the seats or the blocks run out. At most a few
        seats' worth is looked at, so that a long queue behind one prefix costs no more than a short
        one."""
        manager, seats = self.blocks, self.config.max_num_seqs
        if not self.waiting or (len(self.running) >= seats and not self.waiting.is_shared):
            return
        budget = self._budget_left(step)
        for request in self.waiting.candidates(2 * seats):
            if budget <= 0:
                return
            if manager.is_waiting_for_prefix(request) or not self._may_score(step, request):
                continue
            match = manager.match_prefix(request)
            if match.pending:
                continue  # a running request is computing this prefix
            while len(self.running) >= seats or not self._fits(request, match):
                if not self._make_room(step, request):
                    return
                match = manager.match_prefix(request)
            blocks = manager.allocate(request, match)
            self.queues.start(request, match.num_tokens, match.num_host_tokens)
            step.introduce(request, blocks)
            count = self._chunk(step, request, budget, others=bool(self.waiting))
            step.add(request, count)
            budget -= count

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

    def _make_room(self, step: ScheduledBatch, request: Request) -> bool:
        """Preempt a request of somebody who has more than the one that waits; False: nobody has."""
        victim = self.waiting.gives_way(request, self.running)
        if victim is None:
            return False
        self._preempt(step, victim)
        return True

    def _chunk(self, step: ScheduledBatch, request: Request, budget: int, others: bool) -> int:
        """A piece of what the request has not computed."""
        missing = request.num_tokens - request.num_computed_tokens
        missing = min(missing, self.window.room(request))
        if others:
            budget = min(budget, max(budget // 2, self.config.min_prefill_chunk))
        if request.needs_prompt_logprobs:
            budget = min(budget, self.config.max_scored_tokens - step.num_scored)
        count = max(0, min(missing, budget))
        if count:
            step.pieces[request] = count
            step.num_scored += count if request.needs_prompt_logprobs else 0
        return count

    def _may_score(self, step: ScheduledBatch, request: Request) -> bool:
        """Whether the step has room for logits of this request's prompt, if it wants them."""
        return not request.needs_prompt_logprobs or step.num_scored < self.config.max_scored_tokens

    def _preempt(self, step: ScheduledBatch, victim: Request) -> None:
        """Take a running request's blocks, and its place in the step that is being planned."""
        self.queues.preempt(victim)
        if step.drop(victim):
            self.queues.released.remove(victim.seq_id)  # the worker never knew it
        logger.debug("request %s preempted", victim.request_id)
