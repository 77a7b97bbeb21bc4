"""The matcher of one grammar: made within limits, asked for masks. Runs in a grammar's own process.

`checked` is what stands between a stranger's grammar and everybody else: it compiles and tries the
grammar in a fork that may be killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llaisys.common.errors import LlaisysError
from llaisys.common.structured import StructuredOutputs
from llaisys.engine.structured.lowering import GrammarError, lower

COMPILE_SECONDS = 2.0  # of CPU time, for the compilation and the trial
MASK_SECONDS = 0.1  # of CPU time, for one mask of the trial
LATER_MASK_SECONDS = 2.0  # of CPU time, for one mask of an answer; then the process is killed
WALL_SECONDS = 30.0  # for the check on a machine that is busy with other things
EXTRA_MEMORY = 512 << 20  # bytes beyond what a process has when it is forked
CHECK_NICENESS = 10  # others go first while a grammar is only being looked at
TRIAL_TOKENS = 24  # that the trial draws at random
MAX_ERROR_CHARS = 400


def limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compiled(tokenizer: LLTokenizer, wanted: StructuredOutputs) -> LLMatcher:
    """Raises GrammarError."""
    matcher = LLMatcher(tokenizer, lower(wanted), log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def end_mask(tokenizer: LLTokenizer) -> bytes:
    """The mask of an answer that is complete."""
    words = bytearray((tokenizer.vocab_size + 31) // 32 * 4)
    for token in tokenizer.eos_tokens:
        words[token // 8] |= 1 << token % 8
    return bytes(words)


def mask_of(matcher: LLMatcher, at_end: bytes) -> bytes:
    """What may come next; raises GrammarError when the grammar cannot say."""
    signal.setitimer(signal.ITIMER_PROF, LATER_MASK_SECONDS)
    try:
        if matcher.is_stopped() and not matcher.is_error():
            return at_end
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return mask[: len(at_end)]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---- the check -----------------------------------------------------------------------------------


def checked(tokenizer: LLTokenizer, wanted: StructuredOutputs, engine: socket.socket) -> str:
    """What is wrong with a grammar; empty when nothing is. The engine may hang up meanwhile."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(reading)
            os.write(writing, (_verdict(tokenizer, wanted) or "ok").encode()[:4096])
        os._exit(0)
    os.close(writing)
    found, _, _ = select.select([reading, engine.fileno()], [], [], WALL_SECONDS)
    said = os.read(reading, 4096).decode(errors="replace") if reading in found else ""
    os.close(reading)
    if not said:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said:
        return "" if said == "ok" else said
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"it takes more than {COMPILE_SECONDS:g} s of CPU time to compile"
    if not found:
        return f"it could not be compiled within {WALL_SECONDS:g} s"
    return f"it takes more than {EXTRA_MEMORY >> 20} MiB of memory, or is nested too deeply"


def _verdict(tokenizer: LLTokenizer, wanted: StructuredOutputs) -> str:
    """In the fork: compile, and draw a few tokens at random."""
    os.nice(CHECK_NICENESS)
    bound_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    try:
        matcher = compiled(tokenizer, wanted)
        _try_out(matcher, tokenizer)
    except GrammarError as error:
        return short(str(error))
    except MemoryError:
        return f"it takes more than {EXTRA_MEMORY >> 20} MiB of memory"
    except Exception as error:
        return short(f"{type(error).__name__}: {error}")
    return ""


def _try_out(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    rng = random.Random(0)
    ends = set(tokenizer.eos_tokens)
    for _ in range(TRIAL_TOKENS):
        start = time.process_time()
        mask = matcher.compute_bitmask()
        seconds = time.process_time() - start
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        if seconds > MASK_SECONDS:
            raise GrammarError(
                f"it takes {1e3 * seconds:.0f} ms of CPU time to find the tokens that may come "
                f"next; at most {1e3 * MASK_SECONDS:.0f} are allowed"
            )
        token = _some_token(mask, rng)
        if token is None:
            raise GrammarError("nothing can begin or continue an answer")
        if token in ends or matcher.is_stopped():
            return
        if not matcher.consume_token(token):
            raise GrammarError(matcher.get_error())


def _some_token(mask: bytes, rng: random.Random) -> int | None:
    """One that is allowed: the first after a random place."""
    size = len(mask)
    start = rng.randrange(size)
    for step in range(size):
        place = (start + step) % size
        if mask[place]:
            bits = [bit for bit in range(8) if mask[place] >> bit & 1]
            return place * 8 + rng.choice(bits)
    return None


def bound_memory() -> None:
    """A process that wants more than is good ends itself."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        now = int(numbers.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_MEMORY, now + EXTRA_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def short(text: str) -> str:
    """The first lines of what the parser says."""
    lines = [line.strip() for line in text.replace("<non-verbose/>", "").splitlines()]
    joined = " ".join(line for line in lines if line)
    return joined if len(joined) <= MAX_ERROR_CHARS else joined[: MAX_ERROR_CHARS - 3] + "..."


def open_tokenizer(
    tokens: list[bytes],
    special_ids: list[int],
    ends: list[int],
    encode: Callable[[str], list[int]],
) -> LLTokenizer:
    """The parser's view of a vocabulary: the bytes of each token, by id, and the model's own way
    to cut a text into tokens, which is taken where only one text can come."""
    wrapper: Any = _Tokens(tokens, special_ids, ends[0], encode)
    return LLTokenizer(wrapper, eos_token=ends)


class _Tokens:
    """What llguidance asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: list[int],
        end: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end
        self._encode = encode
        special = set(special_ids)
        self._ids = {t: i for i, t in enumerate(tokens) if t and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The model's own tokens of a text, if they are just that text; else the longest ones."""
        data = text.encode()
        with contextlib.suppress(LlaisysError):
            ids = self._encode(text)
            known = [self.tokens[i] for i in ids if i < len(self.tokens)]
            if len(known) == len(ids) and b"".join(known) == data:
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        found, place = [], 0
        while place < len(data):
            for size in range(min(self._longest, len(data) - place), 0, -1):
                token = self._ids.get(data[place : place + size])
                if token is not None:
                    found.append(token)
                    place += size
                    break
            else:
                return found
        return found
