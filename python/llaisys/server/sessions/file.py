"""The file that keeps the sessions: SQLite, opened by one process, which holds `FileLock` on it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.server.sessions.file_lock import FileLock
from llaisys.server.thread_pool import BoundedThreadPool

T = TypeVar("T")

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


class SessionFile:
    """Runs transactions in a thread, one after the other; a failed one changes nothing."""

    def __init__(
        self,
        path: Path | str,
        max_bytes: int,
        max_owner_bytes: int | None,
    ) -> None:
        """Opens and checks the whole file. InvalidInputError when it cannot be used: no permission,
        damaged, of another release, or held by another process."""
        self.max_bytes = max_bytes
        self.max_owner_bytes = max_owner_bytes  # of one owner's messages; None: no own limit
        self._lock = threading.Lock()
        self._pool = BoundedThreadPool("database", 1, MAX_WAITING)
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
        self._pool.close()
        with self._lock:
            self._db.close()
            if self._file_lock is not None:
                self._file_lock.release()

    async def transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._pool.run(self._locked, work)

    async def last_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`transaction`, never refused: for what has been generated, which would be lost."""
        return await self._pool.finish(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                with self._db:  # commits, or rolls back
                    return work(self._db)
            except sqlite3.Error as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise self._full(" (or the disk is full)") from error
                raise SessionStorageError(str(error)) from error

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
