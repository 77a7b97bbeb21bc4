"""A grammar process, forked by the tokenizer process: compiles one grammar, then computes masks
until the engine closes the socket."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from llaisys.common.structured import StructuredOutputs
from llaisys.engine.structured.lowering import GrammarError
from llaisys.engine.structured.matching import (
    check_grammar,
    compile_grammar,
    end_mask,
    limit_memory,
    mask_of,
    shorten,
)
from llaisys.engine.structured.messages import (
    Compile,
    Compiled,
    MaskRequest,
    Masks,
    Row,
    receive,
    send,
)


def run(tokenizer: LLTokenizer, request: Compile, engine: socket.socket, memory: int) -> None:
    """Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for the process of its check
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.freeze()
        _serve(tokenizer, request, engine, memory)
    except (EOFError, OSError):
        pass  # the engine has closed the socket
    finally:
        os._exit(0)


def _serve(tokenizer: LLTokenizer, request: Compile, engine: socket.socket, memory: int) -> None:
    spec = StructuredOutputs(**request.structured)
    error = check_grammar(tokenizer, spec, engine)
    if error:
        send(engine, Compiled(error, cpu_seconds()))
        return
    limit_memory()
    masks = GrammarMasks(tokenizer, compile_grammar(tokenizer, spec), memory, request.max_masks)
    send(engine, Compiled(cpu_seconds=cpu_seconds()))
    while True:
        step, _ = receive(engine, MaskRequest)
        send(engine, masks.compute(step))


def cpu_seconds() -> float:
    """CPU time of this process and of its check."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


class GrammarMasks:
    """The matchers of a grammar, one per sequence, and the shared memory of their masks."""

    def __init__(
        self, tokenizer: LLTokenizer, start: LLMatcher, memory: int, max_masks: int
    ) -> None:
        self._start = start
        self._at_end = end_mask(tokenizer)
        self._size = len(self._at_end)
        self._max_masks = max_masks
        self._memory: Any = mmap.mmap(memory, self._size * max_masks)
        self._matchers: dict[int, LLMatcher] = {}
        self._used = 0

    def compute(self, step: MaskRequest) -> Masks:
        for matcher in step.released:
            self._matchers.pop(matcher, None)
        self._used = 0
        result = Masks([], {})
        for row in step.rows:
            before = self._used
            try:
                result.counts.append(self._row(row))
            except GrammarError as error:
                self._matchers.pop(row.matcher, None)
                self._used = before
                result.counts.append(0)
                result.failed[row.matcher] = shorten(str(error))
        return result

    def _row(self, row: Row) -> int:
        matcher = self._matchers.get(row.matcher)
        if matcher is None:
            self._matchers[row.matcher] = matcher = self._start.deep_copy()
        if row.tokens and not matcher.is_stopped() and not matcher.consume_tokens(row.tokens):
            raise GrammarError(f"the answer does not fit its grammar: {matcher.get_error()}")
        if self._used >= self._max_masks:
            return 0
        self._write(matcher)
        count = 1
        for draft in row.drafts:
            room = self._used < self._max_masks
            if not room or matcher.is_stopped() or matcher.try_consume_tokens([draft]) != 1:
                break
            count += 1
            self._write(matcher)
        if count > 1 and not matcher.rollback(count - 1):
            raise GrammarError(f"drafts cannot be rolled back: {matcher.get_error()}")
        return count

    def _write(self, matcher: LLMatcher) -> None:
        offset = self._used * self._size
        self._memory[offset : offset + self._size] = mask_of(matcher, self._at_end)
        self._used += 1
