"""Requests with structured output: their grammars and the masks of their steps.

The state of a matcher follows from the tokens of its request, also after a preemption, with drafts
or with late results. The grammar process is sent the tokens that it has not seen.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request
from llaisys.common.step import TokenMasks
from llaisys.common.structured import FIELD, StructuredOutputs
from llaisys.common.types import ModelInfo, SchedulerOutputs
from llaisys.engine.structured.messages import Masks, Row
from llaisys.engine.structured.service import Grammar, GrammarService

MASK_WAIT = 0.02  # seconds that a step waits for masks after the forward pass
ALONE_MASK_WAIT = 1.0  # when every sampling sequence of the step needs a mask
MASK_TIMEOUT = 20.0  # seconds for the masks of one step; a process has tighter limits


class GrammarFaultError(RuntimeError):
    """The grammar processes failed; the request is not at fault."""


@dataclass(slots=True)
class _GrammarUse:
    """A request and its grammar."""

    request: Request
    grammar: Grammar
    num_sent: int = 0  # tokens of the answer that the process has
    # Masks that missed their step, and the drafts of that step.
    late: tuple[list[int], np.ndarray] | None = None


class StructuredRequests:
    """A stage of `Admission`. Only `poll` with a timeout and `MaskFuture.result` block."""

    def __init__(self, info: ModelInfo, max_seqs: int) -> None:
        self._service = GrammarService(info, max_seqs)
        self._uses: dict[int, _GrammarUse] = {}  # by seq id

    # ---- before a request runs -----------------------------------------------------------------

    def begin(self, requests: Sequence[Request]) -> Grammar | None:
        return self._grammar(requests[0])

    def _grammar(self, request: Request) -> Grammar | None:
        """Return the grammar of a request, which becomes a user of it; None: it has none."""
        spec = request.sampling.structured_outputs
        if spec is None:
            return None
        assert isinstance(spec, StructuredOutputs)
        return self._service.get(spec, request.owner)

    def lift_process_limit(self) -> None:
        """Compile every pending grammar, however many are in use."""
        self._service.has_process_limit = False

    def poll(self, timeout: float) -> None:
        self._service.poll(timeout)

    def is_ready(self, grammar: Grammar) -> bool:
        """InvalidInputError: the grammar is rejected. GrammarFaultError."""
        if grammar.error is None:
            return grammar.is_ready
        if grammar.is_fault:
            raise GrammarFaultError(grammar.error)
        name = f"{FIELD}.{grammar.spec.constraint}"
        text = f"{name} cannot be used: {grammar.error}"
        raise InvalidInputError(text, field=name, code="invalid_grammar", limit=grammar.error)

    def end(self, grammar: Grammar) -> None:
        self._service.release(grammar)

    def start(self, requests: Sequence[Request]) -> None:
        """The requests are queued and have sequence ids."""
        for request in requests:
            grammar = self._grammar(request)
            if grammar is not None:
                self._uses[request.seq_id] = _GrammarUse(request, grammar)

    # ---- while it runs -------------------------------------------------------------------------

    def release_finished(self) -> None:
        for seq_id, use in tuple(self._uses.items()):
            if use.request.finished:
                del self._uses[seq_id]
                use.grammar.released.append(seq_id)
                self._service.release(use.grammar)

    def has_grammar(self, plan: SchedulerOutputs) -> bool:
        """Whether a request of the step has a grammar."""
        return not self._uses.keys().isdisjoint(plan.seq_ids)

    def request_masks(self, plan: SchedulerOutputs) -> Callable[[], TokenMasks] | None:
        """Request the masks of a step; return a function that waits for them, or None when the step
        needs none."""
        if not self._uses:
            return None
        self.release_finished()
        constrained = [
            self._uses[seq_id]
            for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True)
            if samples and seq_id in self._uses
        ]
        if not constrained:
            return None
        future = MaskFuture(self._service.words, len(constrained) == sum(plan.samples))
        by_grammar: dict[Grammar, list[_GrammarUse]] = {}
        for use in constrained:
            by_grammar.setdefault(use.grammar, []).append(use)
        for grammar, uses in by_grammar.items():
            self._request(grammar, uses, plan, future)
        return future.result

    def _request(
        self, grammar: Grammar, uses: list[_GrammarUse], plan: SchedulerOutputs, future: MaskFuture
    ) -> None:
        self._collect_late(grammar)
        rows = []
        for use in uses:
            request = use.request
            seq_id, drafts = request.seq_id, plan.draft_token_ids.get(request.seq_id, [])
            length, new_tokens = _answer(request, use.num_sent)
            if length < 0:  # still reasoning
                if request.constrain_after in drafts:  # the grammar applies in the next step
                    count = drafts.index(request.constrain_after) + 1
                    every = np.full((count, self._service.words), ~np.uint32(0))
                    future.parts.append((seq_id, every))
                continue
            if use.late is not None and length == use.num_sent:
                future.parts.append((seq_id, _matching(use.late, drafts)))
                use.late = None
            elif grammar.pending is None:
                rows.append(Row(seq_id, new_tokens, drafts))
                use.num_sent, use.late = length, None
            else:
                future.late.add(seq_id)
        if rows and grammar.error is None:
            grammar.request_masks(rows)
            future.grammars.append(grammar)
        if grammar.error is not None:
            future.failed.update({use.request.seq_id: grammar.error for use in uses})

    def _collect_late(self, grammar: Grammar) -> None:
        """Store the masks that missed an earlier step."""
        rows = grammar.pending
        if rows is None:
            return
        reply = grammar.poll_masks()
        if reply is None:
            if grammar.error is None and time.monotonic() - grammar.sent_at > MASK_TIMEOUT:
                grammar.fail("its process does not answer")
            return
        for row, masks in _rows_of(grammar, rows, reply):
            use = self._uses.get(row.matcher)
            if use is not None and row.matcher not in reply.failed and len(masks):
                use.late = (row.drafts, masks.copy())

    def close(self) -> None:
        self._uses = {}
        self._service.close()


@dataclass(slots=True)
class MaskFuture:
    """The masks of a step in flight. `result` returns the same masks to every rank; the first call
    waits."""

    words: int
    alone: bool  # every sampling sequence of the step needs a mask
    late: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    parts: list[tuple[int, np.ndarray]] = field(default_factory=list)  # seq id, masks
    grammars: list[Grammar] = field(default_factory=list)  # whose replies are awaited
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _result: TokenMasks | None = None

    def result(self) -> TokenMasks:
        with self._lock:
            if self._result is None:
                self._collect()
                self._result = self._concatenate()
            return self._result

    def _collect(self) -> None:
        deadline = time.monotonic() + (ALONE_MASK_WAIT if self.alone else MASK_WAIT)
        pending = [grammar for grammar in self.grammars if grammar.error is None]
        while pending:
            for grammar in tuple(pending):
                rows = grammar.pending or []
                reply = grammar.poll_masks()
                if reply is not None:
                    self._add_reply(grammar, rows, reply)
                elif grammar.error is not None:
                    self.failed.update({row.matcher: grammar.error for row in rows})
                else:
                    continue
                pending.remove(grammar)
            left = deadline - time.monotonic()
            if not pending or left <= 0:
                break
            select.select(pending, [], [], left)
        for grammar in pending:
            self.late.update(row.matcher for row in grammar.pending or [])

    def _add_reply(self, grammar: Grammar, rows: list[Row], reply: Masks) -> None:
        self.failed.update(reply.failed)
        for row, masks in _rows_of(grammar, rows, reply):
            if len(masks):
                self.parts.append((row.matcher, masks))
            elif row.matcher not in reply.failed:
                self.late.add(row.matcher)  # no room in the shared memory

    def _concatenate(self) -> TokenMasks:
        first, counts, index = {}, {}, 0
        for seq_id, masks in self.parts:
            first[seq_id], counts[seq_id] = index, len(masks)
            index += len(masks)
        parts = [masks for _, masks in self.parts]
        empty = np.zeros((0, self.words), dtype=np.uint32)
        masks = np.concatenate(parts) if parts else empty
        return TokenMasks(first, counts, masks, frozenset(self.late), self.failed)


def _rows_of(grammar: Grammar, rows: list[Row], reply: Masks) -> list[tuple[Row, np.ndarray]]:
    found, index = [], 0
    for row, count in zip(rows, reply.counts, strict=True):
        found.append((row, grammar.masks[index : index + count]))
        index += count
    return found


def _answer(request: Request, num_sent: int) -> tuple[int, list[int]]:
    """Return (length of the constrained output, its tokens from `num_sent` on); the length is -1
    during reasoning."""
    if request.constrain_after < 0:
        return request.num_output_tokens, request.token_ids[request.num_prompt_tokens + num_sent :]
    output = request.output_token_ids
    if request.constrain_after not in output:
        return -1, []
    answer = output[output.index(request.constrain_after) + 1 :]
    forced = list(request.thinking[2:])  # tokens that thinking_budget forces after the end
    if forced and answer[: len(forced)] == forced[: len(answer)]:
        answer = answer[len(forced) :]
    return len(answer), answer[num_sent:]


def _matching(late: tuple[list[int], np.ndarray], drafts: list[int]) -> np.ndarray:
    """Return the masks of earlier drafts that are valid for `drafts`."""
    known, masks = late
    same = 0
    while same < min(len(known), len(drafts)) and known[same] == drafts[same]:
        same += 1
    return masks[: same + 1]
