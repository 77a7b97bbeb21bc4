"""Which requests wait for a grammar, and what those that run may draw next.

The owner of a matcher's place is the request itself: its tokens say where its answer stands,
however it came there (preempted, with drafts, a result that came late). The grammar's process is
told of the tokens that it has not seen.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request
from llaisys.common.step import TokenMasks
from llaisys.common.structured import FIELD, StructuredOutputs
from llaisys.common.types import ModelInfo, SchedulerOutputs
from llaisys.engine.structured.messages import Masks, Row
from llaisys.engine.structured.service import Grammar, GrammarService

logger = logging.getLogger("llaisys.engine")

PATIENCE = 0.02  # seconds after the forward pass that others of the step wait for a mask, once
ALONE_PATIENCE = 1.0  # when nobody else is in the step
GIVE_UP_SECONDS = 20.0  # for masks of one step; a process has tighter limits of its own


class GrammarFaultError(RuntimeError):
    """The processes of grammars do not work; not the request's fault."""


@dataclass(slots=True)
class _Use:
    """A request's use of a grammar."""

    request: Request
    grammar: Grammar
    told: int = 0  # tokens of the answer that the process knows
    # What came too late for the step that had asked: the drafts then, and the masks.
    late: tuple[list[int], np.ndarray] | None = None


@dataclass(slots=True)
class _Held:
    """The choices of a prompt, until their grammar is ready."""

    requests: Sequence[Request]
    deadline: float | None
    grammar: Grammar


class StructuredRequests:
    """Belongs to one engine core. Nothing here waits but `settle`, and the promise of `begin`."""

    def __init__(self, info: ModelInfo, max_seqs: int) -> None:
        self._service = GrammarService(info, max_seqs)
        self._held: list[_Held] = []
        self._uses: dict[int, _Use] = {}  # by seq id

    # ---- before a request runs -----------------------------------------------------------------

    def hold(self, requests: Sequence[Request], deadline: float | None) -> None:
        wanted = requests[0].sampling.structured_outputs
        assert isinstance(wanted, StructuredOutputs)
        self._held.append(_Held(requests, deadline, self._service.get(wanted)))

    @property
    def num_held(self) -> int:
        return sum(len(held.requests) for held in self._held)

    def is_held(self, request: Request) -> bool:
        return any(request in held.requests for held in self._held)

    def poll(self, timeout: float = 0.0) -> tuple[list[_Held], list[tuple[_Held, Exception]]]:
        """(what can be queued now, what is refused and why); waits `timeout` at most for news."""
        ready, refused = [], []
        if self._held:
            self._service.poll(timeout)
        for held in tuple(self._held):
            grammar = held.grammar
            if grammar.is_ready:
                ready.append(held)
            elif grammar.error is not None:
                refused.append((held, _refusal(grammar)))
                if grammar.is_fault:
                    names = [request.request_id for request in held.requests]
                    logger.error("requests %s: structured output: %s", names, grammar.error)
                self._service.release(grammar)
            else:
                continue
            self._held.remove(held)
        return ready, refused

    def start(self, held: _Held) -> None:
        """Its requests have been queued, and have their sequence ids."""
        for request in held.requests:
            held.grammar.users += 1
            self._uses[request.seq_id] = _Use(request, held.grammar)
        self._service.release(held.grammar)

    def drop(self, held: _Held) -> None:
        """Its requests could not be queued."""
        self._service.release(held.grammar)

    def cancel(self, request_id: str) -> Request | None:
        """Take one that is held out; None when it is not."""
        for held in tuple(self._held):
            for request in held.requests:
                if request.request_id == request_id:
                    held.requests = [r for r in held.requests if r is not request]
                    if not held.requests:
                        self._held.remove(held)
                        self._service.release(held.grammar)
                    return request
        return None

    # ---- while it runs -------------------------------------------------------------------------

    def forget_finished(self) -> None:
        for seq_id, use in tuple(self._uses.items()):
            if use.request.finished:
                del self._uses[seq_id]
                use.grammar.released.append(seq_id)
                self._service.release(use.grammar)

    def begin(self, plan: SchedulerOutputs) -> MaskPromise | None:
        """Ask for the masks of a step; None when nobody in it needs any."""
        if not self._uses:
            return None
        self.forget_finished()
        wanted = [
            self._uses[seq_id]
            for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True)
            if samples and seq_id in self._uses
        ]
        if not wanted:
            return None
        promise = MaskPromise(self._service.words, len(wanted) == sum(plan.samples))
        by_grammar: dict[Grammar, list[_Use]] = {}
        for use in wanted:
            by_grammar.setdefault(use.grammar, []).append(use)
        for grammar, uses in by_grammar.items():
            self._ask(grammar, uses, plan, promise)
        return promise

    def _ask(
        self, grammar: Grammar, uses: list[_Use], plan: SchedulerOutputs, promise: MaskPromise
    ) -> None:
        self._take_late(grammar)
        rows = []
        for use in uses:
            request = use.request
            seq_id, drafts = request.seq_id, plan.draft_token_ids.get(request.seq_id, [])
            length, news = _answer(request, use.told)
            if length < 0:  # still reasoning, as far as is known
                end = (
                    drafts.index(request.constrain_after)
                    if request.constrain_after in drafts
                    else -1
                )
                if end >= 0:  # no draw behind it in this step
                    promise.have(seq_id, np.full((end + 1, self._service.words), ~np.uint32(0)))
                continue
            if use.late is not None and length == use.told:
                promise.have(seq_id, _matching(use.late, drafts))
                use.late = None
            elif grammar.asked is None:
                rows.append(Row(seq_id, news, drafts))
                use.told, use.late = length, None
            else:
                promise.late.add(seq_id)
        if rows and grammar.error is None:
            grammar.ask(rows)
            promise.wait_for(grammar)
        if grammar.error is not None:
            promise.failed.update({use.request.seq_id: grammar.error for use in uses})

    def _take_late(self, grammar: Grammar) -> None:
        """The answer that a former step could not wait for."""
        rows = grammar.asked
        if rows is None:
            return
        answer = grammar.answer()
        if answer is None:
            if grammar.error is None and time.monotonic() - grammar.asked_at > GIVE_UP_SECONDS:
                grammar.fail("its process does not answer")
            return
        for row, masks in _rows_of(grammar, rows, answer):
            use = self._uses.get(row.matcher)
            if use is not None and row.matcher not in answer.failed and len(masks):
                use.late = (row.drafts, masks.copy())

    def close(self) -> None:
        self._held, self._uses = [], {}
        self._service.close()


@dataclass(slots=True)
class MaskPromise:
    """The masks of a step, which are being made. `result` is what every rank of the step gets: it
    waits once, for whoever asks first."""

    words: int
    alone: bool  # nobody else draws in the step
    late: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    _parts: list[tuple[int, np.ndarray]] = field(default_factory=list)  # seq id, masks
    _asked: list[Grammar] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _result: TokenMasks | None = None

    def have(self, seq_id: int, masks: np.ndarray) -> None:
        self._parts.append((seq_id, masks))

    def wait_for(self, grammar: Grammar) -> None:
        self._asked.append(grammar)

    def result(self) -> TokenMasks:
        with self._lock:
            if self._result is None:
                self._collect()
                self._result = self._put_together()
            return self._result

    def _collect(self) -> None:
        deadline = time.monotonic() + (ALONE_PATIENCE if self.alone else PATIENCE)
        pending = [grammar for grammar in self._asked if grammar.error is None]
        while pending:
            for grammar in tuple(pending):
                rows = grammar.asked or []
                answer = grammar.answer()
                if answer is not None:
                    self._take(grammar, rows, answer)
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
            self.late.update(row.matcher for row in grammar.asked or [])

    def _take(self, grammar: Grammar, rows: list[Row], answer: Masks) -> None:
        self.failed.update(answer.failed)
        for row, masks in _rows_of(grammar, rows, answer):
            if len(masks):
                self._parts.append((row.matcher, masks))
            elif row.matcher not in answer.failed:
                self.late.add(row.matcher)  # there was no room for it

    def _put_together(self) -> TokenMasks:
        first, counts, place = {}, {}, 0
        for seq_id, masks in self._parts:
            first[seq_id], counts[seq_id] = place, len(masks)
            place += len(masks)
        parts = [masks for _, masks in self._parts]
        empty = np.zeros((0, self.words), dtype=np.uint32)
        masks = np.concatenate(parts) if parts else empty
        return TokenMasks(first, counts, masks, frozenset(self.late), self.failed)


def _rows_of(grammar: Grammar, rows: list[Row], answer: Masks) -> list[tuple[Row, np.ndarray]]:
    found, place = [], 0
    for row, count in zip(rows, answer.counts, strict=True):
        found.append((row, grammar.masks[place : place + count]))
        place += count
    return found


def _answer(request: Request, told: int) -> tuple[int, list[int]]:
    """(tokens of what the form is about, those behind the first `told`): the output behind its
    reasoning; -1 while that goes on."""
    if request.constrain_after < 0:
        return request.num_output_tokens, request.token_ids[request.num_prompt_tokens + told :]
    output = request.output_token_ids
    if request.constrain_after not in output:
        return -1, []
    answer = output[output.index(request.constrain_after) + 1 :]
    forced = list(request.thinking[2:])  # what a thinking_budget writes behind the end
    if forced and answer[: len(forced)] == forced[: len(answer)]:
        answer = answer[len(forced) :]
    return len(answer), answer[told:]


def _matching(late: tuple[list[int], np.ndarray], drafts: list[int]) -> np.ndarray:
    """Of masks for other drafts, those that hold for these."""
    known, masks = late
    same = 0
    while same < min(len(known), len(drafts)) and known[same] == drafts[same]:
        same += 1
    return masks[: same + 1]


def _refusal(grammar: Grammar) -> Exception:
    wanted = grammar.wanted
    if grammar.is_fault:
        return GrammarFaultError(grammar.error or "")
    name = f"{FIELD}.{wanted.constraint}"
    text = f"{name} cannot be used: {grammar.error}"
    return InvalidInputError(text, field=name, code="invalid_grammar", limit=grammar.error)
