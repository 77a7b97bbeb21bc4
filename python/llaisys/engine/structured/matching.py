"""The matcher of one grammar: translation of `StructuredOutputs` to a grammar of llguidance,
compilation within limits, and masks. Runs in a grammar process.

`check_grammar` compiles and tries an untrusted grammar in a fork that may be killed.
"""

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llaisys.common.closed_schema import closed
from llaisys.common.errors import LlaisysError
from llaisys.common.structured import StructuredOutputs

COMPILE_SECONDS = 2.0  # CPU time of compilation and trial
MASK_SECONDS = 0.1  # CPU time of one mask of the trial
LATER_MASK_SECONDS = 2.0  # CPU time of one mask after the trial; then the process is killed
WALL_SECONDS = 30.0  # wall time of the check
EXTRA_MEMORY = 512 << 20  # bytes beyond those at the fork
CHECK_NICENESS = 10
TRIAL_TOKENS = 24  # random tokens of the trial
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


def compile_grammar(tokenizer: LLTokenizer, spec: StructuredOutputs) -> LLMatcher:
    """Raises GrammarError."""
    matcher = LLMatcher(tokenizer, lower(spec), log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def end_mask(tokenizer: LLTokenizer) -> bytes:
    """Return the mask of a complete answer: end tokens only."""
    words = bytearray((tokenizer.vocab_size + 31) // 32 * 4)
    for token in tokenizer.eos_tokens:
        words[token // 8] |= 1 << token % 8
    return bytes(words)


def mask_of(matcher: LLMatcher, at_end: bytes) -> bytes:
    """Return the mask of the next token; GrammarError when the matcher fails."""
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


def check_grammar(tokenizer: LLTokenizer, spec: StructuredOutputs, engine: socket.socket) -> str:
    """Return the error of a grammar, or "". Stops when the engine closes its socket."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(read_end)
            os.write(write_end, (_try_grammar(tokenizer, spec) or "ok").encode()[:4096])
        os._exit(0)
    os.close(write_end)
    ready, _, _ = select.select([read_end, engine.fileno()], [], [], WALL_SECONDS)
    result = os.read(read_end, 4096).decode(errors="replace") if read_end in ready else ""
    os.close(read_end)
    if not result:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if result:
        return "" if result == "ok" else result
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"it takes more than {COMPILE_SECONDS:g} s of CPU time to compile"
    if not ready:
        return f"it could not be compiled within {WALL_SECONDS:g} s"
    return f"it takes more than {EXTRA_MEMORY >> 20} MiB of memory, or is nested too deeply"


def _try_grammar(tokenizer: LLTokenizer, spec: StructuredOutputs) -> str:
    """In the fork: compile, and sample a few random tokens; return the error, or ""."""
    os.nice(CHECK_NICENESS)
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    try:
        matcher = compile_grammar(tokenizer, spec)
        _sample_tokens(matcher, tokenizer)
    except GrammarError as error:
        return shorten(str(error))
    except MemoryError:
        return f"it takes more than {EXTRA_MEMORY >> 20} MiB of memory"
    except Exception as error:
        return shorten(f"{type(error).__name__}: {error}")
    return ""


def _sample_tokens(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
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
    """Return the first allowed token after a random position."""
    size = len(mask)
    start = rng.randrange(size)
    for step in range(size):
        index = (start + step) % size
        if mask[index]:
            bits = [bit for bit in range(8) if mask[index] >> bit & 1]
            return index * 8 + rng.choice(bits)
    return None


def limit_memory() -> None:
    """Limit the memory of this process to EXTRA_MEMORY more than it has."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        now = int(numbers.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_MEMORY, now + EXTRA_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def shorten(text: str) -> str:
    """Join the lines of a parser error, cut to MAX_ERROR_CHARS."""
    lines = [line.strip() for line in text.replace("<non-verbose/>", "").splitlines()]
    joined = " ".join(line for line in lines if line)
    return joined if len(joined) <= MAX_ERROR_CHARS else joined[: MAX_ERROR_CHARS - 3] + "..."


def open_tokenizer(
    tokens: list[bytes],
    special_ids: list[int],
    ends: list[int],
    encode: Callable[[str], list[int]],
) -> LLTokenizer:
    """Build llguidance's tokenizer from the bytes of each token, by id. `encode`: the model's
    tokenization, used where the grammar allows only one text."""
    wrapper: Any = _Tokens(tokens, special_ids, ends[0], encode)
    return LLTokenizer(wrapper, eos_token=ends)


class _Tokens:
    """The tokenizer interface of llguidance."""

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
        """Return the model's tokens of a text if their bytes equal it, else the longest matches."""
        data = text.encode()
        with contextlib.suppress(LlaisysError):
            ids = self._encode(text)
            known = [self.tokens[i] for i in ids if i < len(self.tokens)]
            if len(known) == len(ids) and b"".join(known) == data:
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        found, offset = [], 0
        while offset < len(data):
            for size in range(min(self._longest, len(data) - offset), 0, -1):
                token = self._ids.get(data[offset : offset + size])
                if token is not None:
                    found.append(token)
                    offset += size
                    break
            else:
                return found
        return found


# Between the tokens of a JSON text; bounded, because models can repeat white space forever.
WHITE_SPACE = r"[\x20\x0A\x09]{1,16}"
ANY_OBJECT = {"type": "object"}


class GrammarError(Exception):
    """The constraint is invalid; the text has the reason."""


def lower(spec: StructuredOutputs) -> str:
    """Return the grammar; raises GrammarError."""
    kind = spec.constraint
    value = getattr(spec, kind)
    if kind == "json_object":
        return _schema(ANY_OBJECT, spec)
    if kind == "json":
        return _schema(json.loads(value), spec)
    if kind == "regex":
        return json.dumps({"grammars": [{"lark_grammar": f"start: /{_pattern(value)}/"}]})
    if kind == "choice":
        return _lark("start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in value))
    if kind == "grammar":
        return _lark(_as_lark(value))
    return _lark(_structural_tag(json.loads(value), spec))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema(schema: Any, spec: StructuredOutputs) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, spec)}]})


def _with_options(schema: Any, spec: StructuredOutputs) -> Any:
    """Add the options of `spec` to a schema; x-guidance options inside it are replaced."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"lenient": spec.lenient, "coerce_one_of": spec.lenient}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = spec.whitespace_pattern or WHITE_SPACE
    if spec.disable_additional_properties is not False:
        schema = closed(schema, every=bool(spec.disable_additional_properties))
    return {**schema, "x-guidance": options}


def _pattern(regex: str) -> str:
    """Return the pattern without anchors: it matches whole answers."""
    from llguidance import regex_to_lark

    bare = regex.removeprefix("^")
    if bare.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", bare):
        bare = bare[:-1]
    return str(regex_to_lark(bare, "d"))


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:
        raise GrammarError(f"neither Lark nor GBNF: {error}") from None


def _structural_tag(tag: dict[str, Any], spec: StructuredOutputs) -> str:
    """Free text in which a trigger starts one of the structures, as in vLLM."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError('it must have "structures" and "triggers", two lists')
    if not structures:
        raise GrammarError("structures is empty; it must have at least one")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("triggers must be strings that are not empty")
    rules = [r"TAG_TEXT: /(.|\n)*/"]
    for number, structure in enumerate(structures):
        begin, end, schema = _structure(number, structure)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"structures[{number}].begin starts with none of the triggers")
        body = f"%json {json.dumps(_with_options(schema, spec))}"
        rest = _literal(begin[len(trigger) :])
        rules.append(f"trigger_{number}[lazy]: TAG_TEXT {_literal(trigger)}")
        rules.append(f"tag_{number}: trigger_{number} {rest} {body} {_literal(end)}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* tag_end", "tag_end: TAG_TEXT", *rules])


def _structure(number: int, structure: Any) -> tuple[str, str, Any]:
    name = f"structures[{number}]"
    if not isinstance(structure, dict):
        raise GrammarError(f"{name} must be an object with begin, schema and end")
    begin, end, schema = (structure.get(key) for key in ("begin", "end", "schema"))
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"{name}.begin and {name}.end must be strings")
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{name}.schema must be an object")
    return begin, end, schema


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
