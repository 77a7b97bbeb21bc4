"""Two engines of one process that exchange KV blocks."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from engine_fakes import greedy

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import TokenUpdate
from llaisys.engine.llm_engine import LLMEngine

TOKEN = b"secret"
_names = itertools.count()


class Pair:
    """A producer and a consumer that know each other's token."""

    def __init__(self, transport: str, producer: LLMEngine, consumer: LLMEngine, at: Path) -> None:
        self.producer, self.consumer = producer, consumer
        self.address = ""
        for name, engine in (("p", producer), ("c", consumer)):
            address = "tcp:127.0.0.1:0" if transport == "tcp" else f"unix:{at}/{name}"
            found = engine.core.start_kv_transfer(address, TOKEN)
            self.address = self.address or found

    def prefill(self, prompt: list[int], salt: str = "") -> str:
        """Compute a prompt on the producer; return the source for the consumer."""
        name = f"kv-{next(_names)}"
        sampling = SamplingParams(max_tokens=0)
        core = self.producer.core
        core.add_requests([Request(name, prompt, sampling, cache_salt=salt, kv_export=True)])
        run(self.producer)
        return f"{name}@{self.address}"

    def submit(
        self, prompt: list[int], source: str, params: SamplingParams, salt: str = ""
    ) -> list[str]:
        """Queue a prompt on the consumer; return the ids of its choices."""
        entry = self.consumer.input_processor.process(prompt, params, None, salt)
        for request in entry.requests:
            request.kv_source = source
        self.consumer.core.add_requests(entry.requests)
        return [request.request_id for request in entry.requests]

    def decode(self, prompt: list[int], source: str, count: int = 6) -> list[int]:
        [name] = self.submit(prompt, source, greedy(count, ignore_eos=True))
        return run(self.consumer)[name]

    def stats(self) -> dict[str, Any]:
        return self.consumer.stats()

    def check_idle(self) -> None:
        """No block, host slot or job is left in use."""
        for engine in (self.producer, self.consumer):
            deadline = time.monotonic() + 10
            while engine.core.scheduler.block_manager.host.num_in_transfer:
                assert time.monotonic() < deadline, "a host slot is still in use"
                engine.core.poll()
            engine.core.scheduler.check_integrity()
            assert not engine.core.has_unfinished()


def run(engine: LLMEngine) -> dict[str, list[int]]:
    """Step until everything has finished; return the tokens by request id."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, TokenUpdate] = {}
    deadline = time.monotonic() + 60
    while engine.core.has_unfinished():
        assert time.monotonic() < deadline, engine.stats()
        assert not engine.core.poll()
        for update in engine.core.step() if engine.core.can_step else ():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            last[update.request_id] = update
    assert all(update.error is None for update in last.values())
    return tokens


def answer(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of an engine that works alone."""
    entry = engine.input_processor.process(prompt, params)
    engine.core.add_requests(entry.requests)
    return run(engine)[entry.requests[0].request_id]
