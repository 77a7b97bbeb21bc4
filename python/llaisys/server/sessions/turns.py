"""Turns of sessions that are being answered: one at a time each, stored when they are complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.common.types import CompletionOutput
from llaisys.server.errors import ApiError
from llaisys.server.sessions.store import SessionStore

INLINE_CHARS = 4096  # of an answer that is read on the loop


class SessionTurns:
    """The open turns of all sessions. This process is the only one that writes the store, so what
    is open here is all that is open."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._open: dict[tuple[str, str], SessionTurn] = {}

    @asynccontextmanager
    async def begin(
        self, owner: str, session_id: str | None, messages: list[dict[str, Any]]
    ) -> AsyncIterator[SessionTurn | None]:
        """The next turn of a session, with `messages` behind its history; None without a session.
        ApiError 409 while another one is open."""
        if session_id is None:
            yield None
            return
        turn = SessionTurn(self, (owner, session_id), messages)
        try:
            await turn.load()
            yield turn
        finally:
            turn.leave()

    async def delete(self, owner: str, session_id: str) -> bool:
        """Delete a session, and with it the turn that is open: that one will not be stored, so that
        a session does not come back. False when there is neither."""
        turn = self._open.get((owner, session_id))
        if turn is None:
            return await self.store.delete(owner, session_id)
        async with turn.storing:
            turn.deleted = True
            await self.store.delete(owner, session_id)
        return True

    async def replace(
        self, owner: str, session_id: str, title: str, messages: list[dict[str, Any]]
    ) -> None:
        """Give a session other contents. The turn that is open was an answer to the earlier ones:
        it will not be stored."""
        turn = self._open.get((owner, session_id))
        if turn is None:
            return await self.store.replace(owner, session_id, title, messages)
        async with turn.storing:
            await self.store.replace(owner, session_id, title, messages)
            turn.deleted = True

    def add(self, turn: SessionTurn) -> None:
        if turn.key in self._open:
            raise ApiError(
                409, "this session is answering another request", code="session_busy", retry_after=1
            )
        self._open[turn.key] = turn

    def remove(self, turn: SessionTurn) -> None:
        if self._open.get(turn.key) is turn:
            del self._open[turn.key]


class SessionTurn:
    """New messages behind a session's history. A turn that is cancelled or fails leaves the session
    as it was."""

    def __init__(
        self, turns: SessionTurns, key: tuple[str, str], new: list[dict[str, Any]]
    ) -> None:
        self.key = key  # owner, session id
        self.messages = new  # with the history before them, after `load`
        self.deleted = False  # what it was behind is gone: deleted or replaced while it was open
        self.storing = asyncio.Lock()  # held to store the turn, and to delete the session under it
        self.new_reader: Callable[[], AnswerReader] = AnswerReader
        self._turns = turns
        self._new = new
        self._exists = False
        self._kept = False
        turns.add(self)

    @property
    def session_id(self) -> str:
        return self.key[1]

    async def load(self) -> None:
        self._exists, history = await self._turns.store.open_turn(*self.key, self._new)
        self.messages = [*history, *self._new]

    def keep(self) -> None:
        """The turn outlives its `with` block; `close` ends it."""
        self._kept = True

    def leave(self) -> None:
        if not self._kept:
            self.close()

    def close(self) -> None:
        """Harmless when it is closed already."""
        self._turns.remove(self)

    def _read(self, text: str) -> dict[str, Any]:
        return self.new_reader().read(text).to_message()

    async def finish(self, output: CompletionOutput, model: str) -> None:
        """Store the turn if it came to its end. ApiError 409 when the session was deleted or
        changed meanwhile: the client must not believe that the turn was kept."""
        if output.finish_reason not in ("stop", "length"):
            return
        if len(output.text) > INLINE_CHARS:
            answer = await asyncio.to_thread(self._read, output.text)
        else:
            answer = self._read(output.text)
        position = len(self.messages) - len(self._new)
        async with self.storing:
            stored = not self.deleted and await self._turns.store.append(
                *self.key, self._exists, position, [*self._new, answer], model
            )
        if not stored:
            raise ApiError(
                409,
                "the session was deleted or changed while this request was answered; the answer "
                "was not kept",
                param="session_id",
                code="session_changed",
            )
