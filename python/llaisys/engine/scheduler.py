"""Which requests get how many tokens in the next step.

There are no phases: a request has computed tokens that catch up with its tokens, and a step hands
out one budget of tokens. Every running request keeps one token of it (decoding never stalls), the
rest goes to longer pieces in order of admission, then to new requests in the order of `FairQueue`.
While another prompt waits, a prompt gets at most half of what is left of the budget, so that a long
one cannot keep short ones out.

When a running request finds no block, the latest arrival of whoever has the most is preempted: it
gives its blocks back and later computes its tokens anew. So it is when another waits for a seat or
for blocks and has less. The oldest running request can always go on, because `add` refuses what
does not fit into an empty pool, so there is no deadlock.

Results may come late: `schedule` may be called again before `update_from_output` was called for
the steps before, whose results then follow in their order. A request whose drawn token is not known
yet is left out, or, with `steps_ahead`, is planned as if it were: the worker knows the token. A
result may be several tokens (drafts that were accepted), and takes back what was computed for
drafts that were not.

A request that fills its context goes on when contexts are shifted: `ContextWindow` says what is
dropped, the block manager which blocks that changes, and the plan tells the worker.

No numpy, no text; the clock is read once a request, when it starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import ContextShift, SchedulerOutputs, StepOutput, TokenUpdate
from llaisys.common.validation import refuse
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.context_window import ContextWindow
from llaisys.engine.fair_queue import FairQueue
from llaisys.engine.planned_step import PlannedStep
from llaisys.engine.prefix_nodes import PrefixMatch
from llaisys.engine.request_limits import total_tokens_limit

logger = logging.getLogger("llaisys.engine")


class RequestScheduler:
    """Owner of the queues. `requests` holds every request that has not finished."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        max_model_len: int,
        steps_ahead: int = 0,
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self.steps_ahead = steps_ahead  # tokens of a request that may be drawn and not known yet
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self.num_context_shifts = 0
        length = block_manager.context_len if config.context_shift else None
        self.window = ContextWindow(length, block_manager.block_size)
        self.queue = FairQueue()
        self._released: list[int] = []  # sequences that the worker may forget
        self._steps: dict[int, PlannedStep] = {}  # handed out, result not in yet
        self._next_step_id = 0
        self._next_seq_id = 0
        self._watermark = max(1, block_manager.num_blocks // 100)

    # ---- taking requests -----------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all of them or none: InvalidInputError has the numbers of the first that
        can never fit, and nothing was changed."""
        limits = self.check(requests)
        kept = [self.window.kept_tokens(request) for request in requests]
        for request, limit, num_kept in zip(requests, limits, kept, strict=True):
            request.max_total_tokens = limit
            request.num_kept_tokens = num_kept
            request.seq_id = self._next_seq_id
            self._next_seq_id += 1
            self.requests[request.request_id] = request
            self.queue.add(request)

    def check(self, requests: Sequence[Request]) -> list[int]:
        """How long each may become, or InvalidInputError as in `add`; changes nothing."""
        names: set[str] = set()
        for request in requests:
            if request.request_id in self.requests or request.request_id in names:
                raise refuse("request_id", request.request_id, "one that is not in use")
            names.add(request.request_id)
        blocks = self.block_manager
        return [
            total_tokens_limit(
                request,
                self.max_model_len,
                blocks.num_blocks,
                blocks.block_size,
                self.window.is_shifted,
            )
            for request in requests
        ]

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def stats(self) -> dict[str, int]:
        """Numbers for logs and metrics, under the names that these show."""
        blocks = self.block_manager
        return {
            "num_running": len(self.running),
            "num_waiting": self.num_waiting,
            "num_preemptions": self.num_preemptions,
            "num_context_shifts": self.num_context_shifts,
            "kv_blocks": blocks.num_blocks,
            "kv_blocks_used": blocks.num_used_blocks,
            "kv_blocks_cached": blocks.num_cached_blocks,
        }

    def check_integrity(self) -> None:
        """For when nothing runs: no block may be held, and the numbers must add up."""
        self.block_manager.check_integrity()
        if not self.running and self.block_manager.num_used_blocks:
            raise RuntimeError(
                f"{self.block_manager.num_used_blocks} blocks are held and nothing runs"
            )

    # ---- planning a step -----------------------------------------------------------------------

    def schedule(self) -> SchedulerOutputs:
        """Plan the next step. An empty plan (batch_size 0) means that nothing can be done now."""
        plan = SchedulerOutputs(step_id=self._next_step_id)
        step = PlannedStep(plan)
        self._continue_running(step)
        self._admit(step)
        if step.requests:
            self._hand_out(step)
        return plan

    def _continue_running(self, step: PlannedStep) -> None:
        """Give every running request what it can compute now, and the blocks for it."""
        block_size = self.block_manager.block_size
        requests, starts, counts = step.requests, step.plan.starts, step.plan.counts
        for request in tuple(self.running):
            start = request.num_computed_tokens
            count = len(request.token_ids) - start
            if count != 1 or request.draft_token_ids or not request.draws:
                count = self._count(step, request, count)
                if not count:
                    continue
            if -start % block_size < count and not self._extend(step, request, start + count):
                continue
            requests.append(request)  # step.add, without a call for every request that decodes
            starts.append(start - request.num_dropped_tokens)
            counts.append(count)
            request.num_computed_tokens = start + count

    def _count(self, step: PlannedStep, request: Request, missing: int) -> int:
        """Tokens for a running request that is not simply one token behind; `missing` of its known
        tokens are not computed."""
        if request.status is not RequestStatus.RUNNING:
            return 0  # preempted just now
        if missing < 1:
            # Its next token is drawn by a step that is out. The last token of all is not computed.
            is_last = request.num_computed_tokens + 1 >= request.max_total_tokens
            is_known_soon = -missing < self.steps_ahead and not self._is_draft_out(request)
            return int(is_known_soon and request.draws and not is_last)
        behind = self.running[self.running.index(request) + 1 :]
        budget = self._budget_left(step) - len(behind)  # each of them keeps one token
        if missing > 1 or not request.draws:
            others = bool(self.num_waiting) or any(
                len(r.token_ids) - r.num_computed_tokens > 1 for r in behind
            )
            return self._chunk(step, request, budget, others)
        # Drafts take no block that another request may need in this step.
        slots = self.block_manager.slots_left(request, spare=len(self.running))
        left = min(request.max_total_tokens - request.num_tokens, self.window.room(request))
        room = min(budget, left, slots) - 1
        draft, request.draft_token_ids = request.draft_token_ids[: max(0, room)], []
        if draft:
            step.plan.draft_token_ids[request.seq_id] = draft
        return 1 + len(draft)

    def _budget_left(self, step: PlannedStep) -> int:
        return self.config.max_num_batched_tokens - sum(step.plan.counts)

    def _is_draft_out(self, request: Request) -> bool:
        """Whether it is open how many tokens a step that is out will bring."""
        return any(request.seq_id in step.plan.draft_token_ids for step in self._steps.values())

    def _extend(self, step: PlannedStep, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` in all, taken from the latest arrivals if need be; False when the
        request itself is or was one of those."""
        added = None
        while request.status is RequestStatus.RUNNING:
            if not self.window.is_full(request, num_tokens) or self._shift(step, request):
                held = num_tokens - request.num_dropped_tokens
                added = self.block_manager.append_slot(request, held)
            if added is not None:
                break
            self._preempt(step, self.queue.largest(self.running))
        if added:
            step.plan.new_blocks[request.seq_id] = added
        return added is not None

    def _shift(self, step: PlannedStep, request: Request) -> bool:
        """Make room in a full context; False when there are not enough blocks for it."""
        kept, dropped = request.num_kept_tokens, self.window.num_dropped(request)
        blocks = self.block_manager.shift(request, kept, dropped)
        if blocks is None:
            return False
        start = request.num_computed_tokens
        following = request.token_ids[start : start + dropped]
        step.plan.shifts.append(ContextShift(request.seq_id, kept, dropped, blocks, following))
        request.num_dropped_tokens += dropped
        self.num_context_shifts += 1
        return True

    def _admit(self, step: PlannedStep) -> None:
        """Start waiting requests until the budget, the seats or the blocks run out. At most a few
        seats' worth is looked at, so that a long queue behind one prefix costs no more than a short
        one."""
        manager, seats = self.block_manager, self.config.max_num_seqs
        if not self.queue or (len(self.running) >= seats and not self.queue.is_shared):
            return
        budget = self._budget_left(step)
        for request in self.queue.candidates(2 * seats):
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
            self._start(request, match.num_tokens)
            step.introduce(request, blocks)
            count = self._chunk(step, request, budget, others=bool(self.num_waiting))
            step.add(request, count)
            budget -= count

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        manager = self.block_manager
        if manager.can_allocate(request, match, self._watermark if self.running else 0):
            return True
        if not self.running:
            raise RuntimeError(
                f"request {request.request_id} needs {manager.first_blocks(request)} "
                f"blocks, {manager.num_free_blocks} of {manager.num_blocks} are free, nothing runs"
            )
        return False

    def _make_room(self, step: PlannedStep, request: Request) -> bool:
        """Preempt a request of somebody who has more than the one that waits; False: nobody has."""
        victim = self.queue.gives_way(request, self.running)
        if victim is None:
            return False
        self._preempt(step, victim)
        return True

    def _start(self, request: Request, num_cached: int) -> None:
        """Out of the queue and among the running ones; `num_cached` tokens are a known prefix."""
        self.queue.start(request)
        request.set_status(RequestStatus.RUNNING)
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            request.scheduled_time = time.monotonic()
        self.running.append(request)

    def _chunk(self, step: PlannedStep, request: Request, budget: int, others: bool) -> int:
        """A piece of what the request has not computed."""
        missing = request.num_tokens - request.num_computed_tokens
        missing = min(missing, self.window.room(request))
        if others:
            budget = min(budget, max(budget // 2, self.config.min_prefill_chunk))
        if request.scores_prompt:
            budget = min(budget, self.config.max_scored_tokens - step.num_scored)
        count = max(0, min(missing, budget))
        if count:
            step.pieces[request] = count
            step.num_scored += count if request.scores_prompt else 0
        return count

    def _may_score(self, step: PlannedStep, request: Request) -> bool:
        """Whether the step has room for logits of this request's prompt, if it wants them."""
        return not request.scores_prompt or step.num_scored < self.config.max_scored_tokens

    def _hand_out(self, step: PlannedStep) -> None:
        step.complete(self._released)
        self._released = []
        self._steps[step.plan.step_id] = step
        self._next_step_id += 1

    def is_bound(self, plan: SchedulerOutputs) -> bool:
        """Whether a plan that was handed out needs more of the steps before it than that they run
        before it: what they draw decides what its sequences may draw, or where they lie."""
        requests = self._steps[plan.step_id].requests
        is_plain = not plan.draft_token_ids and not plan.shifts
        return not is_plain or any(request.is_bound for request in requests)

    def _preempt(self, step: PlannedStep, victim: Request) -> None:
        """Take a running request's blocks, and its place in the step that is being planned."""
        self._leave(victim)
        if step.drop(victim):
            self._released.remove(victim.seq_id)  # the worker never knew it
        self.queue.preempt(victim)
        victim.set_status(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = victim.num_dropped_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        logger.debug("request %s preempted", victim.request_id)

    def _leave(self, request: Request) -> None:
        """Out of the running ones: blocks back, and the worker may forget the sequence."""
        self.running.remove(request)
        self.block_manager.free(request)
        self._released.append(request.seq_id)

    # ---- results -------------------------------------------------------------------------------

    def update_from_output(self, output: StepOutput) -> list[TokenUpdate]:
        """Apply the result of one step. Requests that have finished meanwhile, or that compute
        their tokens anew after a preemption, drop theirs."""
        updates = []
        block_size, commit = self.block_manager.block_size, self.block_manager.commit
        sampled, logprobs, failed = output.sampled, output.logprobs, output.failed
        scores = output.prompt_logprobs
        step = self._steps.pop(output.step_id)
        drafts, running = step.plan.draft_token_ids, RequestStatus.RUNNING
        for request, preemptions, end, count, samples in step.rows():
            if request.status is running:
                if request.num_preemptions != preemptions:
                    continue
                if drafts and request.seq_id in drafts:
                    end -= len(drafts[request.seq_id])  # where the new tokens begin
                    accepted = len(sampled.get(request.seq_id, (0,))) - 1
                    request.num_computed_tokens = end + accepted
                elif end % block_size < count:
                    commit(request, end)  # a block was filled
            elif request.finished:
                continue
            else:  # preempted, and not begun anew: the token is still good
                end -= len(drafts.get(request.seq_id, ()))
            if not samples and (scores or not request.draws or request.tells_progress):
                updates += self._prompt_update(request, end, output)
            if not samples or end != len(request.token_ids):
                continue
            if failed and request.seq_id in failed:
                error = failed[request.seq_id]
                updates.append(self._end(request, RequestStatus.FINISHED_ERROR, error))
                continue
            tokens = sampled[request.seq_id]
            if not tokens:  # nothing could be drawn yet: its last token is computed once more
                if request.status is running:
                    request.num_computed_tokens = end - 1
                if scores:
                    updates += self._prompt_update(request, end, output)
                continue
            for token in tokens:
                ending = request.append_token(token)
                if ending is not None:
                    tokens = request.token_ids[end:]
                    if request.seq_id in logprobs:
                        del logprobs[request.seq_id][len(tokens) :]
                    break
            if drafts and request.seq_id in drafts and request.status is running:
                commit(request, min(request.num_computed_tokens, request.num_tokens))
            if ending is not None:
                self._finish(request, ending)
            found = logprobs.get(request.seq_id) if logprobs else None
            update = TokenUpdate.of(request, tokens, found)
            if scores:
                update.prompt_logprobs = scores.get(request.seq_id)
            updates.append(update)
        return updates

    def _prompt_update(self, request: Request, end: int, output: StepOutput) -> list[TokenUpdate]:
        """What to say of a request for which nothing was drawn: logprobs of its prompt, how much of
        it is done, and its end when that was all, with its vector if it is pooled."""
        scores = output.prompt_logprobs.get(request.seq_id)
        if request.status is not RequestStatus.RUNNING:
            return []  # preempted: it computes its prompt anew
        if request.draws or end < request.num_prompt_tokens:
            if scores is None and not request.tells_progress:
                return []
            update = TokenUpdate.of(request, [])
            if request.tells_progress:
                update.num_prompt_done = min(end, request.num_prompt_tokens)
        else:
            update = self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            update.pooled = output.pooled.get(request.seq_id)
        update.prompt_logprobs = scores
        return [update]

    def fail_step(
        self, step_id: int, error: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
    ) -> list[TokenUpdate]:
        """End the requests of a step that raised; all others go on."""
        step = self._steps.pop(step_id)
        # The worker may not have had this plan; to be told twice is harmless, unless a later step
        # has brought the sequence back.
        back = {seq.seq_id for later in self._steps.values() for seq in later.plan.new_seqs}
        self._released[:0] = [s for s in step.plan.released_seq_ids if s not in back]
        return [self._end(r, status, error) for r in step.requests if not r.finished]

    def finish(self, request_id: str, status: RequestStatus) -> TokenUpdate | None:
        """End a request from outside (cancelled, stop string found) and release what it holds.
        None when it is not there (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if status is RequestStatus.FINISHED_STOPPED and request.status is RequestStatus.WAITING:
            status = RequestStatus.FINISHED_ABORTED
        return self._end(request, status)

    def _end(
        self, request: Request, status: RequestStatus, error: str | None = None
    ) -> TokenUpdate:
        """Finish a request without new tokens; its last update."""
        request.error = error
        self._finish(request, status)
        return TokenUpdate.of(request, [])

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self.queue.remove(request)
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.block_manager.forget_waiting(request)
        request.set_status(status)
        del self.requests[request.request_id]
