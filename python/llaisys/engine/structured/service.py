"""Engine side of the grammar processes: started on first use, shared by an owner's requests with
the same grammar, cached when idle. Owners share no grammar: the time to compile would tell whether
another one uses it. Only `close` and `poll` with a timeout block."""

import logging
import mmap
import os
import select
import socket
import subprocess
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llaisys.common.interpreter import child_environment, module_command
from llaisys.common.structured import StructuredOutputs
from llaisys.common.types import ModelInfo
from llaisys.engine.structured.messages import (
    Compile,
    Compiled,
    FrameBuffer,
    MaskRequest,
    Masks,
    Opened,
    Row,
    Vocabulary,
    send,
)

logger = logging.getLogger("llaisys.engine")

MODULE = "llaisys.engine.structured.fork_server"
MAX_COMPILING = 2  # at once; one per owner when there are several owners
MAX_IDLE = 16  # cached grammars without a user
MAX_PROCESSES = 32  # grammar processes; half per owner when there are several owners
# CPU seconds that an owner may compile per window when there are several owners.
COMPILE_BUDGET = 20.0
BUDGET_WINDOW = 60.0
OPENING_SECONDS = 120.0  # limit for loading the vocabulary
START_SECONDS = 60.0  # limit for compiling; the grammar process has tighter limits


class Grammar:
    """One grammar and its process. A grammar with an `error` is never used again."""

    def __init__(self, spec: StructuredOutputs, owner: str = "") -> None:
        self.spec = spec
        self.owner = owner  # of the requests that use it
        self.users = 0
        self.is_ready = False
        self.error: str | None = None
        self.is_fault = False  # the error is of the engine, not of the grammar
        self.pending: list[Row] | None = None  # rows of the request in flight
        self.sent_at = 0.0
        self.compile_seconds = 0.0  # CPU time, when compiled
        self.released: list[int] = []  # matchers to free in its process
        self.masks: NDArray[np.uint32]  # [max_masks, words], written by the process
        self._connection: socket.socket | None = None
        self._frames: FrameBuffer
        self._memory: Any = None

    # ---- process -------------------------------------------------------------------------------

    def start(self, fork_server: socket.socket, words: int, max_masks: int) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("llaisys-masks")
        try:
            size = words * 4 * max_masks  # untouched pages use no memory
            os.ftruncate(memory, size)
            self._memory = mmap.mmap(memory, size)
            self.masks = np.frombuffer(self._memory, np.uint32).reshape(max_masks, words)
            self._connection, self._frames = ours, FrameBuffer(ours)
            self.sent_at = time.monotonic()
            send(fork_server, Compile(self.spec.to_wire(), max_masks), [theirs.fileno(), memory])
        finally:
            theirs.close()
            os.close(memory)

    @property
    def is_started(self) -> bool:
        return self._connection is not None

    def fileno(self) -> int:
        assert self._connection is not None
        return self._connection.fileno()

    def fail(self, error: str, is_fault: bool = False) -> None:
        self.error, self.is_fault = error, is_fault
        self.close()

    def close(self) -> None:
        """Close the socket; the process then exits."""
        self.is_ready = False
        self.pending = None
        if self._connection is not None:
            self._connection.close()

    # ---- messages ------------------------------------------------------------------------------

    def check_compiled(self) -> None:
        """Update `is_ready` and `error` if the process has replied."""
        frame = self._take()
        if frame is not None:
            reply = msgspec.msgpack.decode(frame, type=Compiled)
            self.error, self.compile_seconds = reply.error or None, reply.cpu_seconds
            self.is_ready = self.error is None
            if self.error is not None:
                self.close()

    def request_masks(self, rows: list[Row]) -> None:
        """Request the masks of a step; one request at a time: `pending` must be None."""
        assert self._connection is not None
        self.pending, self.sent_at = rows, time.monotonic()
        released, self.released = self.released, []
        try:
            send(self._connection, MaskRequest(rows, released))
        except OSError:
            self.fail("the process of the grammar has ended", is_fault=True)

    def poll_masks(self) -> Masks | None:
        """Return the reply to `request_masks`; None: not yet, or `error` is set."""
        frame = self._take()
        if frame is None:
            return None
        self.pending = None
        return msgspec.msgpack.decode(frame, type=Masks)

    def _take(self) -> bytes | None:
        try:
            return self._frames.take()
        except EOFError:
            error = "it takes too long, or too much memory, to find the tokens that may come next"
            self.fail(error if self.is_ready else "its process ended while it was compiled")
            return None


class CompileBudget:
    """CPU seconds of an owner's compilations within BUDGET_WINDOW."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float]] = deque()  # (time, CPU seconds)

    def add(self, seconds: float) -> None:
        self._entries.append((time.monotonic(), seconds))

    @property
    def used(self) -> float:
        oldest = time.monotonic() - BUDGET_WINDOW
        while self._entries and self._entries[0][0] < oldest:
            self._entries.popleft()
        return sum(seconds for _, seconds in self._entries)


class GrammarService:
    """Owner of the grammars in use and of the cached ones."""

    def __init__(self, info: ModelInfo, max_seqs: int) -> None:
        self.words = (info.vocab_size + 31) // 32
        self.max_masks = 4 * max_seqs + 64  # drafts have masks, too
        self.has_process_limit = True  # MAX_PROCESSES applies
        self._info = info
        # By owner and spec; the one used last is the last.
        self._grammars: dict[tuple[str, StructuredOutputs], Grammar] = {}
        self._compiling: list[Grammar] = []  # waiting and started, in order of arrival
        self._budgets: dict[str, CompileBudget] = {}  # by owner
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._frames: FrameBuffer
        self._is_open = False  # the tokenizer process has read the vocabulary
        self._opening_since = 0.0

    def get(self, spec: StructuredOutputs, owner: str = "") -> Grammar:
        """Return a cached or new grammar; the caller is a user of it until `release`."""
        self._budgets.setdefault(owner, CompileBudget())
        grammar = self._grammars.pop((owner, spec), None)
        if grammar is None or grammar.error is not None:
            grammar = Grammar(spec, owner)
            self._compiling.append(grammar)
        self._grammars[owner, spec] = grammar
        grammar.users += 1
        return grammar

    def release(self, grammar: Grammar) -> None:
        grammar.users -= 1
        idle = [known for known in self._grammars.values() if not known.users]
        for old in idle[: max(0, len(idle) - MAX_IDLE)]:
            self._remove(old)
        if not grammar.users and not grammar.is_ready:
            self._remove(grammar)

    def _charge(self, grammar: Grammar) -> None:
        """Add a compilation to its owner's budget; without a reply its wall time."""
        seconds = grammar.compile_seconds or time.monotonic() - grammar.sent_at
        self._budgets[grammar.owner].add(seconds)

    def _remove(self, grammar: Grammar) -> None:
        grammar.close()
        if grammar in self._compiling:
            self._compiling.remove(grammar)
            if grammar.is_started:
                self._charge(grammar)
        if self._grammars.get((grammar.owner, grammar.spec)) is grammar:
            del self._grammars[grammar.owner, grammar.spec]

    # ---- compiling -----------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> None:
        """Start and check compilations; waits at most `timeout` seconds for one to end."""
        if not self._compiling:
            return
        self._start_process()
        if self._control is None:  # the process could not be started
            return
        if not self._is_open:
            if timeout:
                select.select([self._control], [], [], timeout)
            if not self._check_opened():
                return
        self._start_some()
        started = [grammar for grammar in self._compiling if grammar.is_started]
        if timeout and started:
            select.select(started, [], [], timeout)
        for grammar in started:
            grammar.check_compiled()
            late = time.monotonic() - grammar.sent_at > START_SECONDS
            if late and not grammar.is_ready and grammar.error is None:
                grammar.fail("it could not be compiled in time")
            if grammar.is_ready or grammar.error is not None:
                self._charge(grammar)
        self._compiling = [g for g in self._compiling if not g.is_ready and g.error is None]

    def _start_some(self) -> None:
        while self._control is not None and (grammar := self._next()) is not None:
            try:
                grammar.start(self._control, self.words, self.max_masks)
            except OSError as error:
                self._fail_all(f"a grammar's process cannot be started: {error}")

    def _next(self) -> Grammar | None:
        """Return the waiting grammar to compile next: of the owner with the smallest load, in order
        of arrival. None when nothing waits or the limits are reached."""
        if sum(grammar.is_started for grammar in self._compiling) >= MAX_COMPILING:
            return None
        first: dict[str, Grammar] = {}  # by owner: an owner may have hundreds, in every step
        for grammar in self._compiling:
            if not grammar.is_started:
                first.setdefault(grammar.owner, grammar)
        allowed = [grammar for owner, grammar in first.items() if self._may_start(owner)]
        if not allowed or not self._free_process():
            return None
        return min(allowed, key=lambda grammar: self._load(grammar.owner))

    def _load(self, owner: str) -> tuple[int, float]:
        """(running compilations, CPU seconds of recent ones) of an owner."""
        running = sum(g.is_started and g.owner == owner for g in self._compiling)
        return running, self._budgets[owner].used

    def _may_start(self, owner: str) -> bool:
        if len(self._budgets) < 2:
            return True
        running, used = self._load(owner)
        processes = sum(g.owner == owner for g in self._processes if g.users)
        return running < 1 and used < COMPILE_BUDGET and processes < MAX_PROCESSES // 2

    @property
    def _processes(self) -> list[Grammar]:
        """Grammars with a process, least recently used first."""
        return [g for g in self._grammars.values() if g.is_started and g.error is None]

    def _free_process(self) -> bool:
        """Whether another process may start; removes idle grammars if needed."""
        if not self.has_process_limit:
            return True
        processes = self._processes
        idle = [grammar for grammar in processes if not grammar.users]
        while len(processes) >= MAX_PROCESSES and idle:
            self._remove(idle.pop(0))
            processes = self._processes
        return len(processes) < MAX_PROCESSES

    def _start_process(self) -> None:
        if self._process is not None and self._process.poll() is not None and not self._is_open:
            self._fail_all("the tokenizer process ended")
        if self._control is not None:
            return
        info, source = self._info, self._info.tokenizer_source
        if source is None:
            self._fail_all("structured output needs the model's own tokenizer")
            return
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                module_command(MODULE, str(theirs.fileno())),
                env={**child_environment(), "TOKENIZERS_PARALLELISM": "false"},  # no threads
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # parser messages about untrusted grammars
                process_group=0,  # as in processes/child.py
                pass_fds=(theirs.fileno(),),
            )
            send(ours, Vocabulary(source, info.eos_token_ids, info.vocab_size))
        except OSError as error:
            ours.close()
            self._fail_all(f"the tokenizer process cannot be started: {error}")
            return
        finally:
            theirs.close()
        self._control, self._frames = ours, FrameBuffer(ours)
        self._is_open = False
        self._opening_since = time.monotonic()

    def _check_opened(self) -> bool:
        try:
            frame = self._frames.take()
        except EOFError:
            self._fail_all("the tokenizer process ended")
            return False
        if frame is None:
            if time.monotonic() - self._opening_since > OPENING_SECONDS:
                self._fail_all("the tokenizer process does not answer")
            return False
        error = msgspec.msgpack.decode(frame, type=Opened).error
        if error:
            self._fail_all(f"structured output is not available with this model: {error}", False)
            return False
        logger.info(
            "structured output: the tokenizer process %d is ready after %.1f s",
            self._process.pid if self._process is not None else -1,
            time.monotonic() - self._opening_since,
        )
        self._is_open = True
        return True

    def _fail_all(self, error: str, is_fault: bool = True) -> None:
        """Fail all compilations and stop the process; the next request starts it again."""
        for grammar in self._compiling:
            grammar.fail(error, is_fault)
        self._compiling = []
        self._end_process()

    def _end_process(self) -> None:
        """Stop the tokenizer process; compiled grammars keep running."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._is_open = False

    def close(self) -> None:
        for grammar in self._grammars.values():
            grammar.close()
        self._grammars = {}
        self._compiling = []
        self._end_process()
