"""The requests of a step, from scheduling until its result is applied."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llaisys.common.lora import LoraLoad
from llaisys.common.request import Request
from llaisys.common.types import BlockCopy, NewSequence, SchedulerOutputs


@dataclass(slots=True)
class ScheduledBatch:
    """The lists run in parallel to those of the plan."""

    plan: SchedulerOutputs
    requests: list[Request] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)  # of each request when scheduled
    ends: list[int] = field(default_factory=list)  # computed tokens of each after the step
    chunks: dict[Request, int] = field(default_factory=dict)  # prefill or recomputed tokens
    num_logprob_tokens: int = 0  # prompt tokens whose logprobs are requested
    is_copied: bool = False  # the plan's block copies are done

    def add(self, request: Request, count: int) -> None:
        """Schedule the next `count` tokens of a request."""
        self.requests.append(request)
        self.plan.starts.append(request.position)
        self.plan.counts.append(count)
        request.num_computed_tokens += count

    def add_sequence(self, request: Request, blocks: list[int]) -> None:
        """Send a new sequence and its first blocks to the worker."""
        self.plan.new_blocks[request.seq_id] = blocks
        self.plan.new_seqs.append(
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
                dry_breakers=request.dry_breakers,
                thinking=request.thinking,
                lora_slot=request.lora_slot,
            )
        )

    def remove(self, request: Request) -> bool:
        """Remove a request if present; return whether its sequence was new in this step."""
        plan = self.plan
        if request in self.requests:
            index = self.requests.index(request)
            del self.requests[index], plan.starts[index], plan.counts[index]
        self.chunks.pop(request, None)
        plan.shifts = [shift for shift in plan.shifts if shift.seq_id != request.seq_id]
        plan.new_blocks.pop(request.seq_id, None)
        plan.draft_token_ids.pop(request.seq_id, None)
        others = [seq for seq in plan.new_seqs if seq.seq_id != request.seq_id]
        was_new = len(others) < len(plan.new_seqs)
        plan.new_seqs = others
        return was_new

    def finalize(
        self,
        released_seq_ids: list[int],
        block_copies: list[BlockCopy],
        lora_loads: list[LoraLoad],
    ) -> None:
        """Fill in the derived fields of the plan. No request is added or removed after this."""
        plan, requests = self.plan, self.requests
        plan.seq_ids = [request.seq_id for request in requests]
        plan.request_ids = [request.request_id for request in requests]
        self.preemptions = [request.num_preemptions for request in requests]
        self.ends = [request.num_computed_tokens for request in requests]
        plan.samples = [True] * len(requests)
        if self.chunks:
            plan.samples = [
                request.num_computed_tokens >= request.num_tokens and request.generates
                for request in requests
            ]
        plan.num_prefill_tokens = total = sum(self.chunks.values())
        if total:
            twice = sum(n * (2 * request.position - n) for request, n in self.chunks.items())
            plan.prefill_position = twice // (2 * total)
        plan.num_decode_tokens = sum(plan.counts) - plan.num_prefill_tokens
        plan.released_seq_ids = released_seq_ids
        plan.block_copies = block_copies
        plan.lora_loads = lora_loads

    def rows(self) -> Iterator[tuple[Request, int, int, int, bool]]:
        """Yield (request, preemptions when scheduled, computed tokens after the step, tokens in the
        step, whether it samples) per request."""
        plan = self.plan
        return zip(
            self.requests, self.preemptions, self.ends, plan.counts, plan.samples, strict=True
        )
