"""Decides which requests run in the next step and how many tokens each computes.

There is no prefill or decode phase: `num_computed_tokens` of a request catches up with its tokens.
A step has one token budget. Each running request gets one token of it, so decoding never stalls.
The rest goes to prefill chunks in order of admission, then to new requests in `FairQueue` order.
While other prompts wait, a prompt gets at most half of the remaining budget (chunked prefill).
In a server the prefill tokens of a step are also bounded by its measured time (`StepTimeBound`).

When a running request finds no free block, or a waiting request is entitled to run, the latest
arrival of the largest owner is preempted: its blocks are freed and it is recomputed later. `add`
rejects requests that do not fit into an empty pool, so the oldest running request can always
continue and there is no deadlock.

`schedule` may be called before the results of earlier steps were applied; results are applied in
the order of their steps. A request whose sampled token is in flight is skipped, or, up to
`max_in_flight_tokens`, scheduled behind it: the worker has the token. A result has several tokens
when drafts were accepted; computed tokens of rejected drafts are rolled back.

With context shift a request continues when its context is full: `ContextWindow` chooses the tokens
to discard, the block manager updates the blocks, and the plan carries the shift to the worker.

No numpy, no text.
"""

from collections.abc import Sequence

from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED, InvalidInputError
from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenUpdate
from llaisys.common.validation import invalid_count, invalid_value
from llaisys.engine.batch_builder import BatchBuilder
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.context_window import ContextWindow
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
        num_lora_slots: int = 0,
    ) -> None:
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.queues = RequestQueues(block_manager, num_lora_slots)
        length = block_manager.context_len if config.context_shift else None
        self.window = ContextWindow(length, block_manager.block_size)
        self._in_flight: dict[int, ScheduledBatch] = {}  # by step id
        self.builder = BatchBuilder(
            config, self.queues, self.window, self._in_flight, max_in_flight_tokens
        )
        self.exported: list[Request] = []  # ended prompts with kv_export, for the KV transfer
        self._next_step_id = 0
        self._next_seq_id = 0

    # ---- requests ------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. InvalidInputError: one can never fit; nothing changes."""
        limits = self.check(requests)
        keep = [self.window.num_keep(request) for request in requests]
        for request, limit, num_keep in zip(requests, limits, keep, strict=True):
            request.max_total_tokens = limit
            request.num_keep_tokens = num_keep
            request.seq_id = self._next_seq_id
            self._next_seq_id += 1
            self.requests[request.request_id] = request
            self.queues.waiting.add(request)

    def check(self, requests: Sequence[Request]) -> list[int]:
        """Return the maximum length of each request; InvalidInputError as in `add`."""
        names: set[str] = set()
        for request in requests:
            if request.request_id in self.requests or request.request_id in names:
                raise invalid_value("request_id", request.request_id, "one that is not in use")
            names.add(request.request_id)
        return [self._total_tokens_limit(request) for request in requests]

    def _total_tokens_limit(self, request: Request) -> int:
        """Return the maximum number of prompt and output tokens.

        max_tokens is capped by the context (finish reason `length`). InvalidInputError: the prompt
        leaves no room for one token, or the whole KV cache is too small for the total. With context
        shift the output has up to max_tokens tokens, or one context without max_tokens.
        """
        num_prompt, sampling = request.num_prompt_tokens, request.sampling
        max_model_len, max_tokens = self.max_model_len, sampling.max_tokens
        blocks = self.block_manager
        pool = blocks.num_blocks * blocks.block_size
        # The last sampled token is never computed, so it needs no slot.
        limit = min(max_model_len, pool + 1)
        if not sampling.generates:
            limit = min(max_model_len, pool) + 1
        if num_prompt < 1:
            raise invalid_count("prompt", 0, "tokens", "at least 1")
        if num_prompt >= limit:
            what = "max_model_len" if max_model_len <= limit else "the KV cache"
            more = " beside a new token" if sampling.generates else ""
            length = min(max_model_len, pool)
            most = (
                f"at most {limit - 1}, as {what} holds{more}: the maximum context length is "
                f"{length} tokens"
            )
            raise invalid_count("prompt", num_prompt, "tokens", most, code=CONTEXT_LENGTH_EXCEEDED)
        if self.window.is_shifted:
            return num_prompt + (max_model_len if max_tokens is None else max_tokens)
        if max_tokens is None:
            return limit
        total = min(num_prompt + max_tokens, max_model_len)
        if total > limit:
            raise InvalidInputError(
                f"prompt has {num_prompt} tokens and max_tokens is {max_tokens}: {total - 1} token "
                f"slots are needed, the KV cache has {pool} ({blocks.num_blocks} blocks of "
                f"{blocks.block_size}); lower max_tokens or raise kv_cache_memory_bytes",
                field="max_tokens",
                value=max_tokens,
                limit=f"at most {limit - num_prompt}",
            )
        return total

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
        """Counters for logs and metrics, by name."""
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
            "kv_blocks_restored": blocks.host.num_restored,
            "lora_slots_used": self.queues.loras.num_used,
            "lora_slot_loads": self.queues.loras.num_loads,
        }

    def debug_state(self) -> dict[str, int]:
        """Counts of what unfinished requests hold; 0 without one."""
        return {
            "requests": len(self.requests),
            "running": len(self.running),
            "owners": self.queues.waiting.num_owners,
            "unapplied_steps": len(self._in_flight),
            **self.block_manager.debug_state(),
        }

    def check_integrity(self) -> None:
        """Recount every block; for tests: it takes tens of milliseconds on a GPU."""
        self.block_manager.check_integrity()
        self.check_idle()

    def check_idle(self) -> None:
        """Raise RuntimeError when nothing runs and blocks are in use."""
        if not self.running and not self._in_flight and self.block_manager.num_used_blocks:
            raise RuntimeError(
                f"{self.block_manager.num_used_blocks} blocks are in use and nothing runs"
            )

    # ---- scheduling ----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutputs:
        """Plan the next step; the plan is empty (batch_size 0) when no request can run."""
        plan = SchedulerOutputs(step_id=self._next_step_id)
        batch = ScheduledBatch(plan)
        self.builder.build(batch)
        if batch.requests:
            copies = self.block_manager.host.take_copies()
            batch.finalize(self.queues.take_released(), copies, self.queues.loras.take_loads())
            self._in_flight[plan.step_id] = batch
            self._next_step_id += 1
        return plan

    def needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether a scheduled step depends on the sampled tokens of earlier steps on the host."""
        requests = self._in_flight[plan.step_id].requests
        return bool(plan.shifts) or any(request.needs_sync for request in requests)

    def note_launched(self, plan: SchedulerOutputs) -> None:
        """Record that the worker has copied the plan's blocks: the next step may be scheduled."""
        self._in_flight[plan.step_id].is_copied = True

    # ---- results -------------------------------------------------------------------------------

    def update_from_output(self, output: StepOutput) -> list[TokenUpdate]:
        """Apply the result of one step. Tokens of requests that have finished or were preempted and
        restarted since are discarded."""
        updates = []
        block_size, commit = self.block_manager.block_size, self.block_manager.commit
        sampled, logprobs, failed = output.sampled, output.logprobs, output.failed
        scores = output.prompt_logprobs
        batch = self._in_flight.pop(output.step_id)
        drafts, running = batch.plan.draft_token_ids, RequestStatus.RUNNING
        has_copies = bool(batch.plan.block_copies)
        if has_copies:
            self.block_manager.end_restores(batch.plan.block_copies, is_done=True)
        for request, preemptions, end, count, samples in batch.rows():
            if request.status is running:
                if request.num_preemptions != preemptions:
                    continue
                if drafts and request.seq_id in drafts:
                    end -= len(drafts[request.seq_id])  # position of the first new token
                    accepted = len(sampled.get(request.seq_id, (0,))) - 1
                    request.num_computed_tokens = end + accepted
                elif end % block_size < count or has_copies:
                    commit(request, end)  # a block was filled or restored
            elif request.finished:
                continue
            else:  # preempted and still waiting: the token is valid
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
            if not tokens:  # its mask was late: compute the last token again
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
        """Return the update of a request that sampled no token: prompt logprobs, prompt progress,
        and its end with the pooled embedding when it generates none."""
        scores = output.prompt_logprobs.get(request.seq_id)
        if request.status is not RequestStatus.RUNNING:
            return []  # preempted: its prompt is recomputed
        if request.generates or end < request.num_prompt_tokens:
            if scores is None and not request.reports_progress:
                return []
            update = TokenUpdate.of(request, [])
            if request.reports_progress:
                update.num_computed_prompt_tokens = min(end, request.num_prompt_tokens)
        else:
            if request.kv_export:
                self.block_manager.save_tail(request)
                self.exported.append(request)
            update = self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            update.pooled = output.pooled.get(request.seq_id)
        update.prompt_logprobs = scores
        return [update]

    def fail_step(
        self, step_id: int, error: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
    ) -> list[TokenUpdate]:
        """End the requests of a failed step; other requests continue."""
        batch = self._in_flight.pop(step_id)
        self.block_manager.end_restores(batch.plan.block_copies, is_done=False)
        if not batch.is_copied:
            self.block_manager.undo_copies(batch.plan.block_copies)
        # The worker may not have received this plan. Releasing a sequence twice is harmless, unless
        # a later step has restarted it.
        back = {seq.seq_id for later in self._in_flight.values() for seq in later.plan.new_seqs}
        self.queues.released[:0] = [s for s in batch.plan.released_seq_ids if s not in back]
        ended = [self._end(r, status, error) for r in batch.requests if not r.finished]
        self.queues.loras.undo(batch.plan.lora_loads)
        return ended

    def finish(self, request_id: str, status: RequestStatus) -> TokenUpdate | None:
        """End a request (cancelled, stop string found) and free its blocks; None when unknown."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if status is RequestStatus.FINISHED_STOPPED and request.status is RequestStatus.WAITING:
            status = RequestStatus.FINISHED_ABORTED
        return self._end(request, status)

    def _end(
        self, request: Request, status: RequestStatus, error: str | None = None
    ) -> TokenUpdate:
        """Finish a request without new tokens and return its last update."""
        request.error = error
        self._finish(request, status)
        return TokenUpdate.of(request, [])

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self.queues.finish(request, status)
        del self.requests[request.request_id]
