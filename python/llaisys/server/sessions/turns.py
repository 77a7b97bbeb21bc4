"""Open turns of sessions: one at a time per session, stored when complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.common.types import CompletionOutput
from llaisys.server.errors import ApiError
from llaisys.server.sessions.store import SessionStore

INLINE_CHARS = 4096  # longest answer that is parsed on the event loop


class SessionTurns:
    """The open turns of all sessions; complete, because only this process writes the store."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._open: dict[tuple[str, str], SessionTurn] = {}

    @asynccontextmanager
    async def begin(
        self, owner: str, session_id: str | None, messages: list[dict[str, Any]]
    ) -> AsyncIterator[SessionTurn | None]:
        """Open the next turn of a session: its history followed by `messages`. Yields None without
        a session. Raises ApiError 409 while another turn is open."""
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
        """Delete a session. An open turn will not be stored, so it does not recreate the session.
        False when there is neither."""
        turn = self._open.get((owner, session_id))
        if turn is None:
            return await self.store.delete(owner, session_id)
        async with turn.storing:
            turn.deleted = True
            await self.store.delete(owner, session_id)
        return True

    async def replace(
        self,
        owner: str,
        session_id: str,
        title: str,
        messages: list[dict[str, Any]],
        client_state: str | None = None,
    ) -> None:
        """Replace the contents of a session. An open turn, based on the old contents, will not be
        stored."""
        turn = self._open.get((owner, session_id))
        if turn is None:
            return await self.store.replace(owner, session_id, title, messages, client_state)
        async with turn.storing:
            await self.store.replace(owner, session_id, title, messages, client_state)
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
    """New messages after a session's history. A cancelled or failed turn does not change the
    session."""

    def __init__(
        self, turns: SessionTurns, key: tuple[str, str], new: list[dict[str, Any]]
    ) -> None:
        self.key = key  # owner, session id
        self.messages = new  # after `load` with the history before them
        self.deleted = False  # the session was deleted or replaced while the turn was open
        self.storing = asyncio.Lock()  # serialises storing the turn and deleting the session
        self.new_reader: Callable[[], AnswerReader] = AnswerReader
        self._turns = turns
        self._new = new
        self._exists = False
        self._kept_open = False
        turns.add(self)

    @property
    def session_id(self) -> str:
        return self.key[1]

    async def load(self) -> None:
        self._exists, history = await self._turns.store.open_turn(*self.key, self._new)
        self.messages = [*history, *self._new]

    def keep_open(self) -> None:
        """Keep the turn open after its `with` block; `close` ends it."""
        self._kept_open = True

    def leave(self) -> None:
        if not self._kept_open:
            self.close()

    def close(self) -> None:
        """Close the turn; may be called more than once."""
        self._turns.remove(self)

    def _read(self, text: str) -> dict[str, Any]:
        return self.new_reader().read(text).to_message()

    async def finish(self, output: CompletionOutput, model: str) -> None:
        """Store the turn if its answer is complete. Raises ApiError 409 when the session was
        deleted or changed in the meantime, so that the client knows the turn was not stored."""
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
                "was not stored",
                param="session_id",
                code="session_changed",
            )
