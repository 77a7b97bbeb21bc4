"""Conversations on disk: one row per message in a `SessionFile`.

A session belongs to an owner (a hash of the API key, see `key_budgets`). Ids are unique per owner
only, so an owner can neither detect nor access the sessions of another. Sessions store text; the
engine's prefix cache finds their KV blocks.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.validation import invalid_value
from llaisys.server.errors import SessionLimitError
from llaisys.server.sessions.file import SessionFile, transaction

Message = dict[str, Any]


@dataclass(slots=True)
class SessionInfo:
    session_id: str
    title: str
    model: str
    created: float
    updated: float
    num_messages: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.session_id,
            "object": "session",
            "title": self.title,
            "model": self.model,
            "created": int(self.created),
            "updated": int(self.updated),
            "num_messages": self.num_messages,
        }


class SessionStore:
    """Every method is one transaction in a thread; a failed one changes nothing."""

    def __init__(
        self,
        path: Path | str,
        max_sessions: int = 1000,
        max_bytes: int = 1 << 30,
        max_owner_bytes: int | None = None,
    ) -> None:
        """Open the file; raises as `SessionFile` does."""
        self.file = SessionFile(path, max_bytes, max_owner_bytes)
        self.max_sessions = max_sessions  # per owner

    def close(self) -> None:
        self.file.close()

    @transaction()
    def list_all(self, db: sqlite3.Connection, owner: str) -> list[SessionInfo]:
        """Return the sessions of an owner, latest first, without those of stored responses."""
        rows = db.execute(
            "SELECT id, title, model, created, updated, "
            "(SELECT count(*) FROM messages m WHERE m.owner = s.owner AND m.session = s.id)"
            " FROM sessions s WHERE owner = ? AND NOT EXISTS (SELECT 1 FROM responses r"
            " WHERE r.owner = s.owner AND r.session = s.id) ORDER BY updated DESC, id",
            (owner,),
        )
        return [SessionInfo(*row) for row in rows]

    @transaction()
    def get(
        self, db: sqlite3.Connection, owner: str, session_id: str
    ) -> tuple[SessionInfo, list[Message], str | None] | None:
        """Return info, messages and client state; None when the owner has no such session."""
        row = db.execute(
            "SELECT id, title, model, created, updated FROM sessions WHERE owner = ? AND id = ?",
            (owner, session_id),
        ).fetchone()
        if row is None:
            return None
        messages = read_messages(db, owner, session_id)
        query = "SELECT state FROM client_states WHERE owner = ? AND session = ?"
        state = db.execute(query, (owner, session_id)).fetchone()
        client_state = json.loads(state[0]) if state is not None else None
        return SessionInfo(*(*row, len(messages))), messages, client_state

    @transaction()
    def create(
        self,
        db: sqlite3.Connection,
        owner: str,
        session_id: str | None = None,
        title: str = "",
        messages: Sequence[Message] = (),
    ) -> str:
        """Create a session and return its id. Raises ValueError for a taken id or too many."""
        name = session_id or f"sess-{uuid.uuid4().hex}"
        self.insert(db, owner, name, title)
        self.add_messages(db, owner, name, 0, messages)
        return name

    @transaction()
    def replace(
        self,
        db: sqlite3.Connection,
        owner: str,
        session_id: str,
        title: str,
        messages: Sequence[Message],
        client_state: str | None = None,
    ) -> None:
        """Replace title, messages and client state of a session; create it if missing."""
        if exists_in(db, owner, session_id):
            key = (owner, session_id)
            db.execute("DELETE FROM messages WHERE owner = ? AND session = ?", key)
            db.execute("DELETE FROM client_states WHERE owner = ? AND session = ?", key)
            db.execute(
                "UPDATE sessions SET title = ?, updated = ? WHERE owner = ? AND id = ?",
                (title, time.time(), *key),
            )
        else:
            self.insert(db, owner, session_id, title)
        self.add_messages(db, owner, session_id, 0, messages)
        if client_state is not None:
            state = json.dumps(client_state)
            self.file.check_bytes(db, owner, [state])
            db.execute("INSERT INTO client_states VALUES (?, ?, ?)", (owner, session_id, state))

    @transaction()
    def model_of(self, db: sqlite3.Connection, owner: str, session_id: str) -> str | None:
        """Return the model that answered last; None for no session or no answer."""
        query = "SELECT model FROM sessions WHERE owner = ? AND id = ?"
        row = db.execute(query, (owner, session_id)).fetchone()
        return row[0] or None if row is not None else None

    @transaction()
    def rename(self, db: sqlite3.Connection, owner: str, session_id: str, title: str) -> bool:
        query = "UPDATE sessions SET title = ? WHERE owner = ? AND id = ?"
        return db.execute(query, (title, owner, session_id)).rowcount > 0

    @transaction(deletes=True)
    def delete(self, db: sqlite3.Connection, owner: str, session_id: str) -> bool:
        query = "DELETE FROM sessions WHERE owner = ? AND id = ?"
        return db.execute(query, (owner, session_id)).rowcount > 0

    @transaction()
    def open_turn(
        self, db: sqlite3.Connection, owner: str, session_id: str, new: Sequence[Message]
    ) -> tuple[bool, list[Message]]:
        """Return whether the session exists, and its messages; `append` creates a missing one.
        Raises SessionLimitError or SessionDiskFullError when `new` does not fit, before an answer
        is generated."""
        exists = exists_in(db, owner, session_id)
        if not exists:
            self.check_count(db, owner)
        rows = encoded(new)
        self.file.check_disk(rows)
        self.file.check_bytes(db, owner, rows)
        return exists, read_messages(db, owner, session_id)

    @transaction(is_last=True)
    def append(
        self,
        db: sqlite3.Connection,
        owner: str,
        session_id: str,
        exists: bool,
        position: int,
        messages: Sequence[Message],
        model: str,
    ) -> bool:
        """Append a turn after the first `position` messages of a session, or create the session if
        it did not exist. False, and nothing is changed, when the session has changed since."""
        if exists_in(db, owner, session_id) != exists:
            return False
        if not exists:
            self.insert(db, owner, session_id, "")
        if count_messages(db, owner, session_id) != position:
            return False
        self.add_messages(db, owner, session_id, position, messages)
        self.set_model(db, owner, session_id, model)
        return True

    def set_model(self, db: sqlite3.Connection, owner: str, session_id: str, model: str) -> None:
        """Record the model of an answer and its time."""
        db.execute(
            "UPDATE sessions SET updated = ?, model = ? WHERE owner = ? AND id = ?",
            (time.time(), model, owner, session_id),
        )

    def check_count(self, db: sqlite3.Connection, owner: str) -> None:
        count = db.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()[0]
        if count >= self.max_sessions:
            raise SessionLimitError(
                f"there are {count} sessions; at most {self.max_sessions} are allowed: delete some",
                "too_many_sessions",
            )

    def insert(self, db: sqlite3.Connection, owner: str, name: str, title: str) -> None:
        self.check_count(db, owner)
        now = time.time()
        try:
            db.execute(
                "INSERT INTO sessions (owner, id, title, created, updated) VALUES (?, ?, ?, ?, ?)",
                (owner, name, title, now, now),
            )
        except sqlite3.IntegrityError:
            raise invalid_value("session_id", name, "one that does not exist yet") from None

    def add_messages(
        self,
        db: sqlite3.Connection,
        owner: str,
        name: str,
        position: int,
        messages: Sequence[Message],
    ) -> None:
        rows = encoded(messages)
        self.file.check_bytes(db, owner, rows)
        db.executemany(
            "INSERT INTO messages (owner, session, position, message) VALUES (?, ?, ?, ?)",
            [(owner, name, position + index, row) for index, row in enumerate(rows)],
        )


def exists_in(db: sqlite3.Connection, owner: str, session_id: str) -> bool:
    query = "SELECT 1 FROM sessions WHERE owner = ? AND id = ?"
    return db.execute(query, (owner, session_id)).fetchone() is not None


def count_messages(db: sqlite3.Connection, owner: str, session_id: str) -> int:
    query = "SELECT count(*) FROM messages WHERE owner = ? AND session = ?"
    return db.execute(query, (owner, session_id)).fetchone()[0]


def read_messages(db: sqlite3.Connection, owner: str, session_id: str) -> list[Message]:
    query = "SELECT message FROM messages WHERE owner = ? AND session = ? ORDER BY position"
    with closing(db.execute(query, (owner, session_id))) as rows:
        return [json.loads(row[0]) for row in rows]


def encoded(messages: Sequence[Message]) -> list[str]:
    """Return the messages as stored: JSON in ASCII."""
    return [json.dumps(message) for message in messages]
