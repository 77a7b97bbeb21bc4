"""Which requests get how many tokens in the next step.

There are no phases: a request has computed tokens that catch up with its tokens, and a step hands
out one budget of tokens. Requests that decode come first (they need one token each and would stall
otherwise), then prompts that are under way, then new requests, first come first served. While
another prompt waits, a prompt gets at most half of what is left of the budget, so that a long one
cannot keep short ones out.

When a running request finds no block, the latest arrival among the running ones is preempted: it
gives its blocks back and later computes its tokens anew. The oldest request can always go on,
because `add` refuses what does not fit into an empty pool, so there is no deadlock.

Results may come late: `schedule` may be called again before `update_from_output` was called for
the step before. A request whose drawn token is not known yet is left out; everything else goes on.

No numpy, no clock but the caller's, no text.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED, InvalidInputError
from llaisys.common.types import (
    NewSequence,
    Request,
    RequestStatus,
    SchedulerOutputs,
    StepOutput,
    TokenUpdate,
)
from llaisys.common.validation import refuse, refuse_count
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig

logger = logging.getLogger("llaisys.engine")


@dataclass(slots=True)
class _Step:
    """A step that was handed out; the lists run in parallel to those of the plan."""

    plan: SchedulerOutputs
    requests: list[Request]
    preemptions: list[int]  # of each request when the step was planned


@dataclass(slots=True)
class SchedulerStats:
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_blocks: int = 0


class RequestScheduler:
    """Owner of the queues. `requests` holds every request that has not finished."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, max_model_len: int
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # in order of arrival
        self._preempted: dict[str, Request] = {}  # go before the waiting
        self._released: list[int] = []  # sequences that the worker may forget
        self._steps: dict[int, _Step] = {}  # handed out, result not in yet
        self._next_step_id = 0
        self._next_seq_id = 0
        self._watermark = max(1, block_manager.num_blocks // 100)

    # ---- taking requests -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidInputError with the numbers if it can never fit."""
        if request.request_id in self.requests:
            raise refuse("request_id", request.request_id, "one that is not in use")
        request.max_total_tokens = self.total_tokens_limit(
            request.num_prompt_tokens, request.sampling.max_tokens
        )
        request.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def total_tokens_limit(self, num_prompt: int, max_tokens: int | None) -> int:
        """Prompt and output tokens that such a request may have.

        max_tokens beyond the context is cut to it (finish reason `length`); a prompt that leaves no
        room for one token, or a total that the whole KV cache cannot hold, is refused.
        """
        pool = self.block_manager.num_blocks * self.block_manager.block_size
        # The last token drawn is never computed, so it needs no slot.
        limit = min(self.max_model_len, pool + 1)
        if num_prompt < 1:
            raise refuse_count("prompt", 0, "tokens", "at least 1")
        if num_prompt >= limit:
            what = "max_model_len" if limit == self.max_model_len else "the KV cache"
            raise InvalidInputError(
                f"prompt has {num_prompt} tokens; {what} allows at most {limit - 1} "
                f"and one new token",
                field="prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
                value=num_prompt,
                limit=f"at most {limit - 1}",
            )
        if max_tokens is None:
            return limit
        total = min(num_prompt + max_tokens, self.max_model_len)
        if total > limit:
            raise InvalidInputError(
                f"prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
                f"{total - 1} token slots are needed, the KV cache has {pool} "
                f"({self.block_manager.num_blocks} blocks of {self.block_manager.block_size}); "
                f"lower max_tokens or raise kv_cache_memory",
                field="max_tokens",
                value=max_tokens,
            )
        return total

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def stats(self) -> SchedulerStats:
        blocks = self.block_manager
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=self.num_waiting,
            num_preemptions=self.num_preemptions,
            num_used_blocks=blocks.num_used_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_blocks=blocks.num_blocks,
        )

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
        requests = self._schedule_decodes(plan)
        budget = self.config.max_num_batched_tokens - len(requests)
        budget = self._schedule_prefills(plan, requests, budget)
        self._admit(plan, requests, budget)
        if requests:
            self._next_step_id += 1
            preemptions = [request.num_preemptions for request in requests]
            self._steps[plan.step_id] = _Step(plan, requests, preemptions)
            plan.released_seq_ids, self._released = self._released, []
        return plan

    def _schedule_decodes(self, plan: SchedulerOutputs) -> list[Request]:
        """One token for each request that lacks one; those requests, in the plan's order.

        In a full engine this is nearly all of a step: whole lists, no call per request.
        """
        ready = [r for r in self.running if len(r.token_ids) - r.num_computed_tokens == 1]
        if self._extend_tables(plan, ready):
            ready = [r for r in ready if r.status is RequestStatus.RUNNING]
        plan.seq_ids = [r.seq_id for r in ready]
        plan.request_ids = [r.request_id for r in ready]
        plan.starts = [r.num_computed_tokens for r in ready]
        plan.counts = [1] * len(ready)
        plan.samples = [True] * len(ready)
        num_decoding = 0  # the others compute the last token of their prompt
        for request in ready:
            num_decoding += request.num_computed_tokens >= request.num_prompt_tokens
            request.num_computed_tokens += 1
        plan.num_decode_tokens = num_decoding
        plan.num_prefill_tokens = len(ready) - num_decoding
        return ready

    def _extend_tables(self, plan: SchedulerOutputs, ready: list[Request]) -> bool:
        """A block for each request that begins one; whether requests were preempted for it, from
        the end on."""
        append_slot, block_size = self.block_manager.append_slot, self.block_manager.block_size
        preempted = self.num_preemptions
        for request in [r for r in ready if r.num_computed_tokens % block_size == 0]:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted just now
            total = request.num_tokens
            added = append_slot(request, total)
            while added is None and self._preempt_latest(plan) is not request:
                added = append_slot(request, total)
            if added:
                plan.new_blocks[request.seq_id] = added
        return self.num_preemptions != preempted

    def _schedule_prefills(
        self, plan: SchedulerOutputs, requests: list[Request], budget: int
    ) -> int:
        """Further pieces of prompts under way; their blocks were taken at admission."""
        if len(requests) == len(self.running):
            return budget
        waiting = [r for r in self.running if len(r.token_ids) - r.num_computed_tokens > 1]
        for index, request in enumerate(waiting):
            if budget <= 0:
                break
            others = index + 1 < len(waiting) or bool(self.num_waiting)
            count = self._chunk(request, budget, others)
            self._hand_out(plan, requests, request, count)
            budget -= count
        return budget

    def _admit(self, plan: SchedulerOutputs, requests: list[Request], budget: int) -> None:
        """Start requests in order of arrival until the budget, the seats or the blocks run out."""
        if not self._waiting and not self._preempted:
            return
        manager = self.block_manager
        for request in self._candidates():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if manager.is_waiting_for_prefix(request):
                continue
            match = manager.match_prefix(request)
            if match.pending:
                continue  # a running request is computing this prefix
            if not manager.can_allocate(request, match, self._watermark if self.running else 0):
                if not self.running:
                    raise RuntimeError(
                        f"request {request.request_id} needs "
                        f"{manager.blocks_for(request.num_tokens)} blocks, "
                        f"{manager.num_free_blocks} of {manager.num_blocks} are free, nothing runs"
                    )
                return
            self._start(plan, request, match.num_tokens, manager.allocate(request, match))
            count = self._chunk(request, budget, others=bool(self.num_waiting))
            self._hand_out(plan, requests, request, count)
            budget -= count

    def _candidates(self) -> Iterator[Request]:
        """Preempted requests, then waiting ones. At most a few seats' worth is looked at, so that
        a long queue behind one prefix costs no more than a short one."""
        limit = 2 * self.config.max_num_seqs
        yield from sorted(self._preempted.values(), key=lambda request: request.seq_id)
        names = []
        for name in self._waiting:
            names.append(name)
            if len(names) >= limit:
                break
        for name in names:
            yield self._waiting[name]

    def _start(
        self, plan: SchedulerOutputs, request: Request, num_cached: int, blocks: list[int]
    ) -> None:
        self._waiting.pop(request.request_id, None)
        self._preempted.pop(request.request_id, None)
        request.set_status(RequestStatus.RUNNING)
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            request.scheduled_time = time.monotonic()
        self.running.append(request)
        plan.new_blocks[request.seq_id] = blocks
        plan.new_seqs.append(
            NewSequence(
                seq_id=request.seq_id,
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                seed=request.seed,
                choice=request.choice,
                stop_token_ids=request.stop_token_ids,
                bad_words=request.bad_words,
            )
        )

    def _chunk(self, request: Request, budget: int, others: bool) -> int:
        wanted = request.num_tokens - request.num_computed_tokens
        if others:
            budget = min(budget, max(budget // 2, self.config.min_prefill_chunk))
        return min(wanted, budget)

    def _hand_out(
        self, plan: SchedulerOutputs, requests: list[Request], request: Request, count: int
    ) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens = start + count
        requests.append(request)
        plan.seq_ids.append(request.seq_id)
        plan.request_ids.append(request.request_id)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(start + count == request.num_tokens)
        if count == 1 and start >= request.num_prompt_tokens:
            plan.num_decode_tokens += 1
        else:
            plan.num_prefill_tokens += count

    def _preempt_latest(self, plan: SchedulerOutputs) -> Request:
        """Take the latest arrival's blocks, those of this plan included."""
        victim = max(self.running, key=lambda request: request.seq_id)
        plan.new_blocks.pop(victim.seq_id, None)
        self._leave(victim)
        victim.set_status(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted[victim.request_id] = victim
        logger.debug("request %s preempted: out of KV blocks", victim.request_id)
        return victim

    def _leave(self, request: Request) -> None:
        """Out of the running ones: blocks back, and the worker may forget the sequence."""
        self.running.remove(request)
        self.block_manager.free(request)
        self._released.append(request.seq_id)

    # ---- results -------------------------------------------------------------------------------

    def update_from_output(self, output: StepOutput) -> list[TokenUpdate]:
        """Apply the result of one step, in any later order. Requests that have finished or were
        cancelled meanwhile drop their tokens."""
        updates = []
        block_size = self.block_manager.block_size
        sampled, logprobs = output.sampled, output.logprobs
        step = self._steps.pop(output.step_id)
        for request, preemptions, start, count, samples in zip(
            step.requests,
            step.preemptions,
            step.plan.starts,
            step.plan.counts,
            step.plan.samples,
            strict=True,
        ):
            if request.status.finished:
                continue
            end = start + count
            if end % block_size < count and request.num_preemptions == preemptions:
                self.block_manager.commit(request, end)  # a block was filled
            if not samples or end != len(request.token_ids):
                continue  # a preempted request may draw a token again that came late
            if request.seq_id in output.failed:
                ended = self.finish(
                    request.request_id,
                    RequestStatus.FINISHED_ERROR,
                    output.failed[request.seq_id],
                )
                updates += [ended] if ended is not None else []
                continue
            tokens = sampled[request.seq_id]
            for token in tokens:
                status = request.append_token(token)
                if status is not None:
                    tokens = request.token_ids[end:]
                    self._finish(request, status)
                    break
            updates.append(
                TokenUpdate(
                    request.request_id,
                    tokens,
                    request.status,
                    logprobs.get(request.seq_id) if logprobs else None,
                    request.stop_reason,
                    request.num_cached_tokens,
                    request.scheduled_time,
                )
            )
        return updates

    def fail_step(
        self, step_id: int, error: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
    ) -> list[TokenUpdate]:
        """End the requests of a step that raised; all others go on."""
        updates = []
        step = self._steps.pop(step_id)
        # The worker may never have seen this plan; to be told twice is harmless.
        self._released[:0] = step.plan.released_seq_ids
        for request in step.requests:
            if not request.finished:
                updates.append(self.finish(request.request_id, status, error))
        return [update for update in updates if update is not None]

    def finish(
        self, request_id: str, status: RequestStatus, error: str | None = None
    ) -> TokenUpdate | None:
        """End a request from outside (cancelled, stop string found, failed) and release what it
        holds. None when it is not there (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if status is RequestStatus.FINISHED_STOPPED and request.status is RequestStatus.WAITING:
            status = RequestStatus.FINISHED_ABORTED
        request.error = error
        self._finish(request, status)
        return TokenUpdate(
            request_id,
            [],
            status,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            scheduled_time=request.scheduled_time,
            error=error,
        )

    def _finish(self, request: Request, status: RequestStatus) -> None:
        running = request.status is RequestStatus.RUNNING
        request.set_status(status)
        if running:
            self._leave(request)
        else:
            self._waiting.pop(request.request_id, None)
            self._preempted.pop(request.request_id, None)
            self.block_manager.forget_waiting(request)
        del self.requests[request.request_id]
