"""The engine requests of one HTTP request, and the resources to release when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput, StreamOutput
from llaisys.engine.output_processor import DEFAULT_OUTPUT_OPTIONS, OutputOptions
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.errors import is_fault
from llaisys.server.http.key_budgets import KeyBudget
from llaisys.server.http.limits import Admission
from llaisys.server.metrics import ModelMetrics
from llaisys.server.tracing import record_output

# A step of a request with many choices has many deltas, an embedding request many texts. Other
# tasks run after this much work on them.
MAX_BUSY_SECONDS = 0.005


class Pause:
    """Lets other tasks run after MAX_BUSY_SECONDS of work without suspension."""

    def __init__(self) -> None:
        self._busy = 0.0  # seconds of work since the last pause
        self._started = 0.0

    def start(self) -> None:
        """Work starts now; the time before it is not counted."""
        self._started = time.monotonic()

    async def if_busy(self) -> None:
        now = time.monotonic()
        self._busy += now - self._started
        if self._busy > MAX_BUSY_SECONDS:
            self._busy = 0.0
            await asyncio.sleep(0)
            now = time.monotonic()
        self._started = now


class Registry:
    """Open generations by their public ids, for the cancel route."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, set[Generation]] = defaultdict(set)

    def add(self, generation: Generation) -> None:
        for name in generation.public_ids:
            self._by_id[name].add(generation)

    def remove(self, generation: Generation) -> None:
        for name in generation.public_ids:
            self._by_id[name].discard(generation)
            if not self._by_id[name]:
                del self._by_id[name]

    def find(self, name: str, owner: str) -> list[Generation]:
        return [g for g in self._by_id.get(name, ()) if g.owner == owner]

    def all(self) -> set[Generation]:
        return {generation for group in self._by_id.values() for generation in group}


@dataclass(eq=False, slots=True)
class Generation:
    """An async context manager around all engine requests of an HTTP request. On exit, running
    requests are cancelled, reservations released and metrics updated."""

    engine: AsyncLLMEngine
    admission: Admission
    budget: KeyBudget
    metrics: ModelMetrics
    registry: Registry
    owner: str
    public_ids: Sequence[str]
    num_sequences: int
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by prompt, when finished
    _names: list[str] = field(default_factory=list)  # engine request ids, by prompt
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _started: float = field(default_factory=time.monotonic)
    _last_token: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        return len(self._names)

    async def __aenter__(self) -> Generation:
        count = self.num_sequences
        with contextlib.ExitStack() as stack:  # both or neither
            stack.enter_context(self.budget.reserve(count, self.admission.retry_after))
            stack.enter_context(self.admission.admit(self.owner, count))
            self._stack = stack.pop_all()
        self.registry.add(self)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.close(failed=exc[1] is not None and is_fault(exc[1]))

    def close(self, failed: bool = False) -> None:
        """Release everything; may be called more than once."""
        for name in self._names:
            self.engine.discard(name)
        self._stack.close()
        self.registry.remove(self)
        finished = sum(len(output.outputs) for output in self.outputs.values())
        missing, self.num_sequences = self.num_sequences - finished, finished
        if missing and self._names:
            self.metrics.abandoned("error" if failed else "abort", missing)

    async def submit(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        stream: bool,
        cache_salt: str | None,
        reuse_prefix: bool,
        request_id: str,
        reading: OutputOptions = DEFAULT_OUTPUT_OPTIONS,
        lora: str | None = None,
    ) -> None:
        """Send the prompts to the engine. `params`: of all prompts, or of each. Without
        `reuse_prefix` a unique cache salt is used."""
        self.budget.begin(sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)))
        pause = Pause()
        of_each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for prompt, own in zip(prompts, of_each, strict=True):
            pause.start()
            name = await self.engine.submit(
                prompt,
                own,
                request_id=request_id,
                owner=self.owner,
                stream=stream,
                cache_salt=cache_salt if reuse_prefix else f"once:{uuid.uuid4().hex}",
                on_tokens=self.budget.spend,
                reading=reading,
                lora=lora,
            )
            self._names.append(name)
            await pause.if_busy()

    async def run_step(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Run prompts of a search, whose tokens the caller counts, and return their outputs.
        `options`: of `AsyncLLMEngine.submit`."""
        self._names = []
        for prompt in prompts:
            name = await self.engine.submit(prompt, params, owner=self.owner, **options)
            self._names.append(name)
        found = []
        for name in self._names:
            async for delta in self.engine.stream(name):
                if delta.output is not None:
                    found.append(delta.output)
        return found

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Record the outputs of a search."""
        for number, output in enumerate(outputs):
            self.outputs[number] = output
            self.metrics.request_done(output.usage, output.outputs)
            record_output(output)
        self.admission.record_duration(time.monotonic() - self._started)

    async def cancel(self) -> bool:
        """Cancel all running requests; streams finish with reason `abort`."""
        found = [await self.engine.cancel(name) for name in self._names]
        return any(found)

    async def deltas(self) -> AsyncIterator[tuple[int, StreamOutput]]:
        """Yield (prompt index, delta) of all prompts in order of arrival."""
        if len(self._names) == 1:
            async for delta in self.engine.stream(self._names[0]):
                self._record(0, delta)
                yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, StreamOutput | Exception | None]] = asyncio.Queue()

        async def forward(index: int, name: str) -> None:
            try:
                async for delta in self.engine.stream(name):
                    queue.put_nowait((index, delta))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(forward(i, name)) for i, name in enumerate(self._names)]
        try:
            running = len(tasks)
            while running:
                index, item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    self._record(index, item)
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def set_sink(self, write: Callable[[StreamOutput], bool]) -> None:
        """Call `write` with deltas of a single prompt that `deltas` would only pass on; it returns
        whether it has written the delta. With several prompts `deltas` yields all of them."""
        if len(self._names) > 1:
            return

        def sink(delta: StreamOutput) -> bool:
            if not write(delta):
                return False
            self._record(0, delta)
            return True

        self.engine.set_sink(self._names[0], sink)

    async def result(self) -> list[RequestOutput]:
        """Wait for all prompts and return their outputs in prompt order."""
        async for _ in self.deltas():
            pass
        return [self.outputs[index] for index in range(len(self._names))]

    def _record(self, prompt: int, delta: StreamOutput) -> None:
        now, key = time.monotonic(), (prompt, delta.index)
        before = self._last_token.get(key)
        if delta.token_ids:
            if before is not None:
                self.metrics.record_tokens(now - before, len(delta.token_ids))
            self._last_token[key] = now
        if delta.output is not None:
            self.outputs[prompt] = delta.output
            self.metrics.request_done(delta.output.usage, delta.output.outputs)
            record_output(delta.output)
            self.admission.record_duration(now - self._started)
