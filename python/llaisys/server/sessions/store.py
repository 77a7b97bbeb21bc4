"""Conversations that outlive a request and a restart: SQLite, one row a message.

A session belongs to the owner that made it (a hash of the API key, see `security`); the id is only
unique within an owner, so that nobody can find out, or reach, what another has. What a session
stores is text; its KV is found again through the engine's prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llaisys.common.errors import InvalidInputError, LlaisysError

T = TypeVar("T")
Message = dict[str, Any]

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    owner TEXT NOT NULL, id TEXT NOT NULL, title TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '', created REAL NOT NULL, updated REAL NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE TABLE IF NOT EXISTS messages (
    owner TEXT NOT NULL, session TEXT NOT NULL, position INTEGER NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (owner, session, position),
    FOREIGN KEY (owner, session) REFERENCES sessions (owner, id) ON DELETE CASCADE
);
"""
VERSION = 1


class SessionLimitError(LlaisysError, ValueError):
    """The owner has as many sessions as one may have."""


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
    """Every method is one transaction, run in a thread; a failed one changes nothing."""

    def __init__(self, path: Path | str, max_sessions: int = 1000) -> None:
        self.max_sessions = max_sessions
        self._lock = threading.Lock()
        if path != ":memory:":
            folder = Path(path).parent
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            except OSError as error:
                raise InvalidInputError(
                    f"session file {path}: {error.strerror}; name another with --session-file"
                ) from error
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=10)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA journal_mode = WAL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                raise InvalidInputError(
                    f"session file {path}: its version is {found}, this release reads {VERSION}"
                )
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.commit()
        except sqlite3.Error as error:
            raise InvalidInputError(f"session file {path}: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    async def list_all(self, owner: str) -> list[SessionInfo]:
        """The latest one first."""
        return await self._run(
            lambda db: [
                SessionInfo(*row)
                for row in db.execute(
                    "SELECT id, title, model, created, updated, "
                    "(SELECT count(*) FROM messages m WHERE m.owner = s.owner AND m.session = s.id)"
                    " FROM sessions s WHERE owner = ? ORDER BY updated DESC, id",
                    (owner,),
                )
            ]
        )

    async def get(self, owner: str, session_id: str) -> tuple[SessionInfo, list[Message]] | None:
        """Head and messages; None when the owner has no such session."""

        def read(db: sqlite3.Connection) -> tuple[SessionInfo, list[Message]] | None:
            row = db.execute(
                "SELECT id, title, model, created, updated FROM sessions "
                "WHERE owner = ? AND id = ?",
                (owner, session_id),
            ).fetchone()
            if row is None:
                return None
            messages = _messages(db, owner, session_id)
            name, title, model, created, updated = row
            return SessionInfo(name, title, model, created, updated, len(messages)), messages

        return await self._run(read)

    async def create(
        self,
        owner: str,
        session_id: str | None = None,
        title: str = "",
        messages: Sequence[Message] = (),
    ) -> str:
        """The new session's id. ValueError when the id is taken or there are too many."""
        name = session_id or f"sess-{uuid.uuid4().hex}"

        def write(db: sqlite3.Connection) -> str:
            self._insert(db, owner, name, title)
            _append(db, owner, name, 0, messages)
            return name

        return await self._run(write)

    async def rename(self, owner: str, session_id: str, title: str) -> bool:
        return await self._run(
            lambda db: (
                db.execute(
                    "UPDATE sessions SET title = ? WHERE owner = ? AND id = ?",
                    (title, owner, session_id),
                ).rowcount
                > 0
            )
        )

    async def delete(self, owner: str, session_id: str) -> bool:
        return await self._run(
            lambda db: (
                db.execute(
                    "DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, session_id)
                ).rowcount
                > 0
            )
        )

    async def open_turn(self, owner: str, session_id: str) -> list[Message]:
        """Messages so far; a session that does not exist has none, and begins with `append`.
        SessionLimitError now, not after the answer, when there is no room for it."""

        def read(db: sqlite3.Connection) -> list[Message]:
            found = db.execute(
                "SELECT 1 FROM sessions WHERE owner = ? AND id = ?", (owner, session_id)
            ).fetchone()
            if found is None:
                self._check_room(db, owner)
            return _messages(db, owner, session_id)

        return await self._run(read)

    async def append(
        self, owner: str, session_id: str, position: int, messages: Sequence[Message], model: str
    ) -> bool:
        """Add a turn behind the first `position` messages. False, and nothing is changed, when the
        session is not that long any more (deleted meanwhile)."""

        def write(db: sqlite3.Connection) -> bool:
            row = db.execute(
                "SELECT 1 FROM sessions WHERE owner = ? AND id = ?", (owner, session_id)
            ).fetchone()
            if row is None:
                if position:
                    return False
                self._insert(db, owner, session_id, "")
            count = db.execute(
                "SELECT count(*) FROM messages WHERE owner = ? AND session = ?", (owner, session_id)
            ).fetchone()[0]
            if count != position:
                return False
            _append(db, owner, session_id, position, messages)
            db.execute(
                "UPDATE sessions SET updated = ?, model = ? WHERE owner = ? AND id = ?",
                (time.time(), model, owner, session_id),
            )
            return True

        return await self._run(write)

    def _check_room(self, db: sqlite3.Connection, owner: str) -> None:
        count = db.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()[0]
        if count >= self.max_sessions:
            raise SessionLimitError(
                f"there are {count} sessions; at most {self.max_sessions} are kept: delete some"
            )

    def _insert(self, db: sqlite3.Connection, owner: str, name: str, title: str) -> None:
        self._check_room(db, owner)
        now = time.time()
        try:
            db.execute(
                "INSERT INTO sessions (owner, id, title, created, updated) VALUES (?, ?, ?, ?, ?)",
                (owner, name, title, now, now),
            )
        except sqlite3.IntegrityError:
            raise InvalidInputError(f"session_id {name!r} exists already") from None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def locked() -> T:
            with self._lock, self._db:  # commits, or rolls back
                return work(self._db)

        return await asyncio.to_thread(locked)


def _messages(db: sqlite3.Connection, owner: str, session_id: str) -> list[Message]:
    with closing(
        db.execute(
            "SELECT message FROM messages WHERE owner = ? AND session = ? ORDER BY position",
            (owner, session_id),
        )
    ) as rows:
        return [json.loads(row[0]) for row in rows]


def _append(
    db: sqlite3.Connection, owner: str, name: str, position: int, messages: Sequence[Message]
) -> None:
    db.executemany(
        "INSERT INTO messages (owner, session, position, message) VALUES (?, ?, ?, ?)",
        [
            (owner, name, position + index, json.dumps(message))
            for index, message in enumerate(messages)
        ],
    )
