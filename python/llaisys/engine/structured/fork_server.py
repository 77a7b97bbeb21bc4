"""The tokenizer process: loads a model's vocabulary once, then forks a process for every grammar.

    python -m llaisys.engine.structured.fork_server FD      (started by the engine)

It has one thread, so it can be forked safely; the forks share the pages of the vocabulary.
It exits when its socket is closed. A grammar process compiles one grammar, then computes masks
until the engine closes the socket.
"""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import sys
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from llaisys.common.errors import LlaisysError
from llaisys.common.structured import StructuredOutputs
from llaisys.engine.structured.matching import (
    GrammarError,
    check_grammar,
    compile_grammar,
    end_mask,
    limit_memory,
    mask_of,
    open_tokenizer,
    shorten,
)
from llaisys.engine.structured.messages import (
    Compile,
    Compiled,
    MaskRequest,
    Masks,
    Opened,
    Row,
    Vocabulary,
    receive,
    send,
)
from llaisys.tokenization import Tokenizer


def open_vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    """Open a tokenizer; LlaisysError: its tokens have no bytes, or the model has no end token."""
    tokenizer = Tokenizer.from_source(vocabulary.source)
    size = vocabulary.vocab_size
    tokens = tokenizer.vocabulary_bytes(size)
    eos = {*vocabulary.eos_token_ids, *tokenizer.eos_token_ids}
    ends = sorted(token for token in eos if 0 <= token < size)
    if not ends:
        raise LlaisysError("the model has no token that ends an answer")
    special = sorted(token for token in tokenizer.special_ids if token < size)
    return open_tokenizer(tokens, special, ends, lambda text: tokenizer.encode(text, False))


def serve(engine: socket.socket) -> None:
    vocabulary, _ = receive(engine, Vocabulary)
    try:
        tokenizer = open_vocabulary(vocabulary)
    except Exception as error:
        send(engine, Opened(f"{error}"))
        return
    send(engine, Opened())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children
    while True:
        request, (connection, memory) = receive(engine, Compile, max_fds=2)
        if not os.fork():
            engine.close()
            run_grammar(tokenizer, request, socket.socket(fileno=connection), memory)
        os.close(connection)
        os.close(memory)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(EOFError):  # the engine has exited
        serve(socket.socket(fileno=int(sys.argv[1])))


def run_grammar(
    tokenizer: LLTokenizer, request: Compile, engine: socket.socket, memory: int
) -> None:
    """The grammar process. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for the process of its check
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.freeze()
        serve_masks(tokenizer, request, engine, memory)
    except (EOFError, OSError):
        pass  # the engine has closed the socket
    finally:
        os._exit(0)


def serve_masks(
    tokenizer: LLTokenizer, request: Compile, engine: socket.socket, memory: int
) -> None:
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


if __name__ == "__main__":
    main()
