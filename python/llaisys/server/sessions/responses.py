"""Stored responses of /v1/responses and the sessions that they belong to.

A response is a position in a session: its history is the first `position` messages. A response
that follows the last one of a session extends the session; one that follows an earlier position
starts a new session with a copy of the history. OpenAI's clients store responses by default, so
when storage is full the oldest of these sessions are deleted.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.common.validation import check_count
from llaisys.server.errors import SessionLimitError
from llaisys.server.sessions.file import transaction
from llaisys.server.sessions.store import (
    Message,
    SessionStore,
    count_messages,
    encoded,
    exists_in,
    read_messages,
)

PREFIX = "resp_"  # of response ids, and of the sessions that responses start


@dataclass(frozen=True, slots=True)
class ResponsePosition:
    """The end of a response: after the first `position` messages of a session."""

    session: str
    position: int
    messages: tuple[Message, ...]


class ResponseStore:
    """Every method is one transaction of the session store."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self.file = sessions.file

    @transaction()
    def get(self, db: sqlite3.Connection, owner: str, response_id: str) -> str | None:
        """Return a response as JSON."""
        return read_body(db, owner, response_id)

    @transaction()
    def items(
        self, db: sqlite3.Connection, owner: str, response_ids: Sequence[str], max_bytes: int
    ) -> dict[str, dict[str, Any]]:
        """Return the output items of responses by item id, without unknown responses. Raises
        InvalidInputError when the responses together exceed `max_bytes`."""
        found: dict[str, dict[str, Any]] = {}
        size = 0
        for response_id in response_ids:
            body = read_body(db, owner, response_id)
            if body is not None:
                size += len(body)
                check_count("input", size, max_bytes, "bytes in its referenced responses")
                found |= {item["id"]: item for item in json.loads(body)["output"]}
        return found

    @transaction()
    def position(
        self, db: sqlite3.Connection, owner: str, response_id: str
    ) -> ResponsePosition | None:
        """Return the position and history of a response; None if there is no such response."""
        query = "SELECT session, position FROM responses WHERE owner = ? AND id = ?"
        row = db.execute(query, (owner, response_id)).fetchone()
        if row is None:
            return None
        messages = read_messages(db, owner, row[0])[: row[1]]
        return ResponsePosition(row[0], row[1], tuple(messages))

    @transaction(deletes=True)
    def delete(self, db: sqlite3.Connection, owner: str, response_id: str) -> bool:
        """Delete a response, and its session with its last response. False if there is none."""
        query = "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING session"
        row = db.execute(query, (owner, response_id)).fetchone()
        if row is None:
            return False
        query = "SELECT 1 FROM responses WHERE owner = ? AND session = ?"
        if db.execute(query, (owner, row[0])).fetchone() is None:
            db.execute("DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, row[0]))
        return True

    @transaction()
    def make_room(self, db: sqlite3.Connection, owner: str, messages: Sequence[Message]) -> None:
        """Free storage for `messages` before generation. Raises SessionLimitError, or
        SessionDiskFullError and deletes nothing."""
        rows = encoded(messages)
        self.file.check_disk(rows)
        self._make_room(db, owner, rows, None)

    @transaction(is_last=True)
    def store(
        self,
        db: sqlite3.Connection,
        owner: str,
        response: dict[str, Any],
        before: ResponsePosition | None,
        new: Sequence[Message],
        model: str,
    ) -> None:
        """Store a response and its new messages. Raises SessionLimitError or SessionStorageError
        when storage is full."""
        name, body = response["id"], json.dumps(response)
        session, start = name, 0
        if before is not None:
            is_last = count_messages(db, owner, before.session) == before.position
            if is_last and exists_in(db, owner, before.session):
                session, start = before.session, before.position
            else:
                new = [*before.messages, *new]
        self._make_room(db, owner, [*encoded(new), body], session)
        if session == name:
            self._sessions.insert(db, owner, name, "")
        self._sessions.add_messages(db, owner, session, start, new)
        self._sessions.set_model(db, owner, session, model)
        db.execute(
            "INSERT INTO responses (owner, id, session, position, body) VALUES (?, ?, ?, ?, ?)",
            (owner, name, session, start + len(new), body),
        )

    def _make_room(
        self, db: sqlite3.Connection, owner: str, rows: Sequence[str], excluded: str | None
    ) -> None:
        """Delete the oldest sessions of this owner's responses, except `excluded`, until another
        session with these rows fits."""
        while True:
            try:
                self._sessions.check_count(db, owner)
                self.file.check_bytes(db, owner, rows)
                return
            except SessionLimitError:
                oldest = db.execute(
                    "SELECT id FROM sessions s WHERE owner = ? AND id != ? AND EXISTS (SELECT 1 "
                    "FROM responses r WHERE r.owner = s.owner AND r.session = s.id) "
                    "AND substr(id, 1, 5) = ? ORDER BY updated, id LIMIT 1",
                    (owner, excluded or "", PREFIX),
                ).fetchone()
                if oldest is None:
                    raise
                db.execute("DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, oldest[0]))


def read_body(db: sqlite3.Connection, owner: str, response_id: str) -> str | None:
    query = "SELECT body FROM responses WHERE owner = ? AND id = ?"
    row = db.execute(query, (owner, response_id)).fetchone()
    return None if row is None else str(row[0])
