"""Responses with `background: true`: generated without a connection, polled or streamed by id.

A response runs as a stream whose events are kept, so that a client can resume it. Responses that
end are stored like others; the last ones stay here too, with their events.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.types import Message

from llaisys.server.errors import is_fault
from llaisys.server.http.error_handlers import to_api_error
from llaisys.server.http.event_stream import EventStream
from llaisys.server.responses.formatter import ResponsesFormatter

MAX_ENDED = 32  # responses that are kept with their events after their end
EVENT_END = b"\n\n"


@dataclass(eq=False, slots=True)
class BackgroundResponse:
    """One response. The index of an event is its sequence number."""

    owner: str
    formatter: ResponsesFormatter
    events: list[bytes] = field(default_factory=list)
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def snapshot(self) -> dict[str, Any]:
        return self.formatter.snapshot("in_progress" if self.events else "queued")

    def add(self, chunk: bytes) -> None:
        self.events += [part + EVENT_END for part in chunk.split(EVENT_END) if part]
        self._notify()

    def end(self) -> None:
        self.ended = True
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def stream(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after a sequence number until the response ends."""
        sent = after + 1
        while True:
            if sent < len(self.events):
                chunk = b"".join(self.events[sent:])
                sent = len(self.events)
                yield chunk
            elif self.ended:
                return
            else:
                await self.changed.wait()

    def event_stream(self, after: int = -1) -> EventStream:
        return EventStream(self.stream(after), lambda: None, self.formatter.media_type)


class BackgroundResponses:
    """The responses that run, and the last ones that ended."""

    def __init__(self) -> None:
        self._responses: dict[str, BackgroundResponse] = {}

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        found = self._responses.get(response_id)
        return found if found is not None and found.owner == owner else None

    def start(
        self,
        owner: str,
        formatter: ResponsesFormatter,
        run: Callable[[], Awaitable[Any]],
        releases: list[Callable[[], None]],
    ) -> BackgroundResponse:
        """Run a response. `run` returns its EventStream; `releases` are called at the end."""
        found = BackgroundResponse(owner, formatter)
        self._responses[formatter.response_id] = found
        found.task = asyncio.create_task(self._run(found, run, releases))
        return found

    async def cancel(self, response: BackgroundResponse) -> None:
        """End a response; it keeps what was generated."""
        if response.task is not None and not response.ended:
            response.task.cancel()
            await asyncio.wait({response.task})

    def remove(self, response_id: str) -> None:
        self._responses.pop(response_id, None)

    async def _run(
        self,
        response: BackgroundResponse,
        run: Callable[[], Awaitable[Any]],
        releases: list[Callable[[], None]],
    ) -> None:
        formatter = response.formatter
        stream: EventStream | None = None
        try:
            stream = await run()
            async for chunk in stream.events:
                response.add(chunk)
        except asyncio.CancelledError:
            if formatter.snapshot("")["status"] == "":  # not complete
                response.add(formatter.format_cancelled())
        except BaseException as error:
            if not is_fault(error):
                raise
            failure = to_api_error(error, formatter.request_id)
            response.add(b"".join(formatter.format_error(failure)))
        finally:
            if stream is not None:
                await stream.events.aclose()
                stream.on_close()
            for release in releases:
                release()
            response.end()
            ended = [name for name, found in self._responses.items() if found.ended]
            for name in ended[: max(0, len(ended) - MAX_ENDED)]:
                del self._responses[name]


def detached(request: Request) -> tuple[Request, list[Callable[[], None]]]:
    """Return a request that outlives its connection, and the release callbacks of the original,
    which are moved to it."""
    state = request.scope["state"]
    releases: list[Callable[[], None]] = list(state["at_end"])
    state["at_end"].clear()
    own = {**state, "at_end": releases, "log": dict(state.get("log") or {})}

    async def receive() -> Message:
        await asyncio.Event().wait()  # never disconnects
        raise AssertionError

    return Request({**request.scope, "state": own}, receive), releases
