"""Conversations that outlive a request and a restart: SQLite, one row a message.

One process writes a file, and holds `FileLock` on it. A session belongs to the owner that made it
(a hash of the API key, see `security`); the id is only unique within an owner, so that nobody can
find out, or reach, what another has. What a session stores is text; its KV is found again through
the engine's prefix cache.
"""

from __future__ import annotations

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
from llaisys.common.validation import refuse
from llaisys.server.lanes import Lane
from llaisys.server.sessions.file_lock import FileLock

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
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, session TEXT NOT NULL, position INTEGER NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (owner, id),
    FOREIGN KEY (owner, session) REFERENCES sessions (owner, id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS responses_of_sessions ON responses (owner, session);
"""
# What each owner's rows take, kept by the database itself for as long as it is open: it follows
# every transaction, and the sessions that are deleted with their messages. They are ASCII.
ROW_BYTES = 256  # of the bookkeeping of a row, its index included
ROWS = {"messages": "message", "responses": "body"}  # table -> the column with its text
SHARES = "CREATE TEMP TABLE shares (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL);" + "".join(
    f"""
INSERT INTO shares
    SELECT owner, sum(length({text}) + {ROW_BYTES}) FROM {table} WHERE true GROUP BY owner
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TEMP TRIGGER {table}_grow AFTER INSERT ON main.{table} BEGIN
    INSERT INTO shares VALUES (new.owner, length(new.{text}) + {ROW_BYTES})
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TEMP TRIGGER {table}_shrink AFTER DELETE ON main.{table} BEGIN
    UPDATE shares SET bytes = bytes - length(old.{text}) - {ROW_BYTES} WHERE owner = old.owner;
END;
"""
    for table, text in ROWS.items()
)
VERSION = 1
ANOTHER = "name another with --session-file"


MAX_WAITING = 64  # transactions


class SessionLimitError(LlaisysError, ValueError):
    """There is no room for another session or message; `code` says of which kind."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class SessionStorageError(LlaisysError, RuntimeError):
    """The file could not be read or written (a full disk, a damaged page); nothing was changed."""


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

    def __init__(
        self,
        path: Path | str,
        max_sessions: int = 1000,
        max_bytes: int = 1 << 30,
        max_owner_bytes: int | None = None,
    ) -> None:
        """Opens and checks the whole file. InvalidInputError when it cannot be used: no permission,
        damaged, of another release, or held by another process."""
        self.max_sessions = max_sessions  # of one owner
        self.max_bytes = max_bytes  # of the file
        self.max_owner_bytes = max_owner_bytes  # of one owner's messages; None: no own limit
        self._lock = threading.Lock()
        self._lane = Lane("database", 1, MAX_WAITING)  # a locked database holds up nobody else
        self._file_lock: FileLock | None = None
        if path != ":memory:":
            path = Path(path).resolve()  # a link to the file is the same file
            self._file_lock = _make_file(path)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=10)
            try:
                self._prepare(path)
            except BaseException:
                self._db.close()
                raise
        except BaseException as error:
            if self._file_lock is not None:
                self._file_lock.release()
            if isinstance(error, sqlite3.Error):
                raise refuse_file(path, f": {error}; {ANOTHER}") from error
            raise

    def _prepare(self, path: Path | str) -> None:
        db = self._db
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            what = problem.splitlines()[-1]
            raise refuse_file(path, f" is damaged ({what}); {ANOTHER}")
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise refuse_file(path, f": its version is {found}, this release reads {VERSION}")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA temp_store = MEMORY")
        db.executescript(SCHEMA + SHARES)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.commit()
        self._page_size = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {max(1, self.max_bytes // self._page_size)}")

    def close(self) -> None:
        self._lane.close()
        with self._lock:
            self._db.close()
            if self._file_lock is not None:
                self._file_lock.release()

    async def list_all(self, owner: str) -> list[SessionInfo]:
        """The latest one first."""
        return await self.transaction(
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
            messages = read_messages(db, owner, session_id)
            name, title, model, created, updated = row
            return SessionInfo(name, title, model, created, updated, len(messages)), messages

        return await self.transaction(read)

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
            self.insert(db, owner, name, title)
            self.add_messages(db, owner, name, 0, messages)
            return name

        return await self.transaction(write)

    async def replace(
        self, owner: str, session_id: str, title: str, messages: Sequence[Message]
    ) -> None:
        """A session has this title and these messages, whatever it had; it is made if there is
        none."""

        def write(db: sqlite3.Connection) -> None:
            if exists_in(db, owner, session_id):
                key = (owner, session_id)
                db.execute("DELETE FROM messages WHERE owner = ? AND session = ?", key)
                db.execute(
                    "UPDATE sessions SET title = ?, updated = ? WHERE owner = ? AND id = ?",
                    (title, time.time(), *key),
                )
            else:
                self.insert(db, owner, session_id, title)
            self.add_messages(db, owner, session_id, 0, messages)

        await self.transaction(write)

    async def model_of(self, owner: str, session_id: str) -> str | None:
        """The model that answered last; None: no such session, or nobody has."""

        def read(db: sqlite3.Connection) -> str | None:
            query = "SELECT model FROM sessions WHERE owner = ? AND id = ?"
            row = db.execute(query, (owner, session_id)).fetchone()
            return row[0] or None if row is not None else None

        return await self.transaction(read)

    async def rename(self, owner: str, session_id: str, title: str) -> bool:
        return await self.transaction(
            lambda db: (
                db.execute(
                    "UPDATE sessions SET title = ? WHERE owner = ? AND id = ?",
                    (title, owner, session_id),
                ).rowcount
                > 0
            )
        )

    async def delete(self, owner: str, session_id: str) -> bool:
        return await self.transaction(
            lambda db: (
                db.execute(
                    "DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, session_id)
                ).rowcount
                > 0
            )
        )

    async def open_turn(
        self, owner: str, session_id: str, new: Sequence[Message]
    ) -> tuple[bool, list[Message]]:
        """Whether the session exists, and its messages; one that does not has none, and begins with
        `append`. SessionLimitError now, not after the answer, when there is no room for `new`."""

        def read(db: sqlite3.Connection) -> tuple[bool, list[Message]]:
            exists = exists_in(db, owner, session_id)
            if not exists:
                self.check_count(db, owner)
            self.check_bytes(db, owner, encoded(new))
            return exists, read_messages(db, owner, session_id)

        return await self.transaction(read)

    async def append(
        self,
        owner: str,
        session_id: str,
        exists: bool,
        position: int,
        messages: Sequence[Message],
        model: str,
    ) -> bool:
        """Add a turn behind the first `position` messages of a session that `exists`, or begin it.
        False, and nothing is changed, when the session is not so any more. However many wait for
        the database, it is not refused: its answer exists."""

        def write(db: sqlite3.Connection) -> bool:
            if exists_in(db, owner, session_id) != exists:
                return False
            if not exists:
                self.insert(db, owner, session_id, "")
            count = count_messages(db, owner, session_id)
            if count != position:
                return False
            self.add_messages(db, owner, session_id, position, messages)
            db.execute(
                "UPDATE sessions SET updated = ?, model = ? WHERE owner = ? AND id = ?",
                (time.time(), model, owner, session_id),
            )
            return True

        return await self.last_transaction(write)

    def check_count(self, db: sqlite3.Connection, owner: str) -> None:
        count = db.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()[0]
        if count >= self.max_sessions:
            raise SessionLimitError(
                f"there are {count} sessions; at most {self.max_sessions} are kept: delete some",
                "too_many_sessions",
            )

    def check_bytes(self, db: sqlite3.Connection, owner: str, messages: Sequence[str]) -> None:
        """Free pages inside the file count as room."""
        pages, free = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        more = sum(len(message) for message in messages)
        if (pages - free) * self._page_size + more > self.max_bytes:
            raise self._full()
        if self.max_owner_bytes is None:
            return
        row = db.execute("SELECT bytes FROM shares WHERE owner = ?", (owner,)).fetchone()
        if (row[0] if row else 0) + more + ROW_BYTES * len(messages) > self.max_owner_bytes:
            raise SessionLimitError(
                f"the sessions of one key may fill {self.max_owner_bytes} bytes, and this is more: "
                "delete some",
                "session_storage_full",
            )

    def _full(self, remark: str = "") -> SessionLimitError:
        return SessionLimitError(
            f"the sessions may fill {self.max_bytes} bytes, and this is more{remark}: delete some",
            "session_storage_full",
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
            raise refuse("session_id", name, "one that does not exist yet") from None

    def add_messages(
        self,
        db: sqlite3.Connection,
        owner: str,
        name: str,
        position: int,
        messages: Sequence[Message],
    ) -> None:
        rows = encoded(messages)
        self.check_bytes(db, owner, rows)
        db.executemany(
            "INSERT INTO messages (owner, session, position, message) VALUES (?, ?, ?, ?)",
            [(owner, name, position + index, row) for index, row in enumerate(rows)],
        )

    async def transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._lane.run(self._locked, work)

    async def last_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`transaction`, never refused: for what has been generated, which would be lost."""
        return await self._lane.finish(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                with self._db:  # commits, or rolls back
                    return work(self._db)
            except sqlite3.Error as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise self._full(" (or the disk is full)") from error
                raise SessionStorageError(str(error)) from error


def refuse_file(path: Path | str, what: str) -> InvalidInputError:
    return InvalidInputError(f"session file {path}{what}", field="session_file", value=str(path))


def _make_file(path: Path) -> FileLock:
    """An empty file where there is none, for its owner's eyes only; and the lock on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        lock = FileLock(path.with_name(path.name + ".lock"))
        holder = lock.acquire()
    except OSError as error:
        raise refuse_file(path, f": {error.strerror}; {ANOTHER}") from error
    if holder is not None:
        raise refuse_file(path, f" is in use by {holder}; {ANOTHER}")
    return lock


def exists_in(db: sqlite3.Connection, owner: str, session_id: str) -> bool:
    query = "SELECT 1 FROM sessions WHERE owner = ? AND id = ?"
    return db.execute(query, (owner, session_id)).fetchone() is not None


def count_messages(db: sqlite3.Connection, owner: str, session_id: str) -> int:
    query = "SELECT count(*) FROM messages WHERE owner = ? AND session = ?"
    count: int = db.execute(query, (owner, session_id)).fetchone()[0]
    return count


def read_messages(db: sqlite3.Connection, owner: str, session_id: str) -> list[Message]:
    with closing(
        db.execute(
            "SELECT message FROM messages WHERE owner = ? AND session = ? ORDER BY position",
            (owner, session_id),
        )
    ) as rows:
        return [json.loads(row[0]) for row in rows]


def encoded(messages: Sequence[Message]) -> list[str]:
    """As they are stored, in ASCII."""
    return [json.dumps(message) for message in messages]
