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
the steps before, whose results then follow in their order. A request whose sampled token is in
flight is left out, or, up to `max_in_flight_tokens`, scheduled behind it: the worker has the token.
A result may be several tokens (drafts that were accepted), and takes back what was computed for
drafts that were not.

A request that fills its context goes on when contexts are shifted: `ContextWindow` says what is
dropped, the block manager which blocks that changes, and the plan tells the worker.

`BatchBuilder` divides the budget, `RequestQueues` moves requests between waiting and running;
requests and results come in here. No numpy, no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenUpdate
from llaisys.common.validation import invalid_value
from llaisys.engine.batch_builder import BatchBuilder
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.context_window import ContextWindow
from llaisys.engine.request_limits import total_tokens_limit
from llaisys.engine.request_queues import RequestQueues
from llaisys.engine.scheduled_batch import ScheduledBatch


class RequestScheduler:
    """`requests` holds every request that has not finished."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        max_model_len: int,
        max_in_flight_tokens: int = 0,
    ) -> None:
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.queues = RequestQueues(block_manager)
        length = block_manager.context_len if config.context_shift else None
        self.window = ContextWindow(length, block_manager.block_size)
        self._steps: dict[int, ScheduledBatch] = {}  # handed out, result not in yet
        self.builder = BatchBuilder(
            config, self.queues, self.window, self._steps, max_in_flight_tokens
        )
        self._next_step_id = 0
        self._next_seq_id = 0

    # ---- taking requests -----------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all of them or none: InvalidInputError has the numbers of the first that
        can never fit, and nothing was changed."""
        limits = self.check(requests)
        kept = [self.window.kept_tokens(request) for request in requests]
        for request, limit, num_kept in zip(requests, limits, kept, strict=True):
            request.max_total_tokens = limit
            request.num_keep_tokens = num_kept
            request.seq_id = self._next_seq_id
            self._next_seq_id += 1
            self.requests[request.request_id] = request
            self.queues.waiting.add(request)

    def check(self, requests: Sequence[Request]) -> list[int]:
        """How long each may become, or InvalidInputError as in `add`; changes nothing."""
        names: set[str] = set()
        for request in requests:
            if request.request_id in self.requests or request.request_id in names:
                raise invalid_value("request_id", request.request_id, "one that is not in use")
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
    def running(self) -> list[Request]:
        """In order of admission."""
        return self.queues.running

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def stats(self) -> dict[str, int]:
        """Numbers for logs and metrics, under the names that these show."""
        blocks = self.block_manager
        return {
            "num_running": len(self.running),
            "num_waiting": self.num_waiting,
            "num_preemptions": self.queues.num_preemptions,
            "num_context_shifts": self.builder.num_context_shifts,
            "kv_blocks": blocks.num_blocks,
            "kv_blocks_used": blocks.num_used_blocks,
            "kv_blocks_cached": blocks.num_cached_blocks,
            "kv_host_blocks": blocks.host.num_slots,
            "kv_host_blocks_used": blocks.host.num_used,
            "kv_blocks_saved": blocks.host.num_saved,
            "kv_blocks_brought_back": blocks.host.num_brought_back,
        }

    def check_integrity(self) -> None:
        """Every block is counted anew, which takes tens of milliseconds for a GPU's: for tests."""
        self.block_manager.check_integrity()
        self.check_idle()

    def check_idle(self) -> None:
        """When nothing runs, no block may be held."""
        if not self.running and self.block_manager.num_used_blocks:
            raise RuntimeError(
                f"{self.block_manager.num_used_blocks} blocks are held and nothing runs"
            )

    # ---- planning a step -----------------------------------------------------------------------

    def schedule(self) -> SchedulerOutputs:
        """Plan the next step. An empty plan (batch_size 0) means that nothing can be done now."""
        plan = SchedulerOutputs(step_id=self._next_step_id)
        step = ScheduledBatch(plan)
        self.builder.build(step)
        if step.requests:
            self._hand_out(step)
        return plan

    def _hand_out(self, step: ScheduledBatch) -> None:
        step.complete(self.queues.hand_over_released(), self.block_manager.host.take_copies())
        self._steps[step.plan.step_id] = step
        self._next_step_id += 1

    def needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether a plan that was handed out needs more of the steps before it than that they run
        before it: what they draw decides what its sequences may draw, or where they lie."""
        requests = self._steps[plan.step_id].requests
        return bool(plan.shifts) or any(request.needs_sync for request in requests)

    def note_launched(self, plan: SchedulerOutputs) -> None:
        """The worker has the plan and has moved the blocks that it names, whatever becomes of the
        step: the next one may be planned."""
        self._steps[plan.step_id].is_copied = True

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
        has_copies = bool(step.plan.block_copies)
        for request, preemptions, end, count, samples in step.rows():
            if request.status is running:
                if request.num_preemptions != preemptions:
                    continue
                if drafts and request.seq_id in drafts:
                    end -= len(drafts[request.seq_id])  # where the new tokens begin
                    accepted = len(sampled.get(request.seq_id, (0,))) - 1
                    request.num_computed_tokens = end + accepted
                elif end % block_size < count or has_copies:
                    commit(request, end)  # a block was filled, or brought back
            elif request.finished:
                continue
            else:  # preempted, and not begun anew: the token is still good
                end -= len(drafts.get(request.seq_id, ()))
            if not samples and (scores or not request.generates or request.reports_progress):
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
        if request.generates or end < request.num_prompt_tokens:
            if scores is None and not request.reports_progress:
                return []
            update = TokenUpdate.of(request, [])
            if request.reports_progress:
                update.num_computed_prompt_tokens = min(end, request.num_prompt_tokens)
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
        if not step.is_copied:
            self.block_manager.undo_copies(step.plan.block_copies)
        # The worker may not have had this plan; to be told twice is harmless, unless a later step
        # has brought the sequence back.
        back = {seq.seq_id for later in self._steps.values() for seq in later.plan.new_seqs}
        self.queues.released[:0] = [s for s in step.plan.released_seq_ids if s not in back]
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
        self.queues.finish(request, status)
        del self.requests[request.request_id]
