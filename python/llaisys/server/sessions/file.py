"""The SQLite file of the sessions. One process opens it and holds a `FileLock`."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.server.sessions.disk import MIN_FREE_BYTES, DiskReserve, free_bytes
from llaisys.server.sessions.file_lock import FileLock
from llaisys.server.thread_pool import BoundedThreadPool

T = TypeVar("T")

# One entry per version of the file: the statements that lead to it from the version before. The
# last entry is what this release reads. An entry never changes after its release.
MIGRATIONS = (
    """
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
""",
    """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, session TEXT NOT NULL, position INTEGER NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (owner, id),
    FOREIGN KEY (owner, session) REFERENCES sessions (owner, id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS responses_of_sessions ON responses (owner, session);
""",
    """
CREATE TABLE IF NOT EXISTS client_states (
    owner TEXT NOT NULL, session TEXT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (owner, session),
    FOREIGN KEY (owner, session) REFERENCES sessions (owner, id) ON DELETE CASCADE
);
""",
)
# Bytes stored per owner, in a temporary table that triggers keep up to date within each
# transaction, cascaded deletes included. Texts are ASCII, so length() counts bytes.
ROW_BYTES = 256  # overhead of a row, index included
ROWS = {"messages": "message", "client_states": "state", "responses": "body"}  # table -> text
USAGE = "CREATE TEMP TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL);" + "".join(
    f"""
INSERT INTO usage
    SELECT owner, sum(length({text}) + {ROW_BYTES}) FROM {table} WHERE true GROUP BY owner
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TEMP TRIGGER {table}_grow AFTER INSERT ON main.{table} BEGIN
    INSERT INTO usage VALUES (new.owner, length(new.{text}) + {ROW_BYTES})
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TEMP TRIGGER {table}_shrink AFTER DELETE ON main.{table} BEGIN
    UPDATE usage SET bytes = bytes - length(old.{text}) - {ROW_BYTES} WHERE owner = old.owner;
END;
"""
    for table, text in ROWS.items()
)
USE_ANOTHER = "use another with --session-file"
MAX_WAITING = 64  # transactions


class SessionLimitError(LlaisysError, ValueError):
    """A storage limit is reached; `code` is the error code for the client."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class SessionFileInUseError(InvalidInputError):
    """Another process has the file open."""


class SessionStorageError(LlaisysError, RuntimeError):
    """The file could not be read or written (full disk, damaged page); nothing was changed."""


class SessionDiskFullError(SessionStorageError):
    """The disk of the session file is full; nothing was changed."""

    def __init__(self) -> None:
        super().__init__("the disk of the session file is full")


class SessionFile:
    """Runs transactions in one thread, serially; a failed one changes nothing."""

    def __init__(
        self,
        path: Path | str,
        max_bytes: int,
        max_owner_bytes: int | None,
    ) -> None:
        """Open and check the file. Raises InvalidInputError when it is unusable: no permission,
        damaged, of a later release, or (SessionFileInUseError) in use by another process. A file of
        an earlier release is brought to this one's version."""
        self.max_bytes = max_bytes
        self.max_owner_bytes = max_owner_bytes  # per owner; None: no limit per owner
        self._lock = threading.Lock()
        self._pool = BoundedThreadPool("database", 1, MAX_WAITING)
        self._file_lock: FileLock | None = None
        self._path: Path | None = None  # None in memory
        self._reserve: DiskReserve | None = None
        if path != ":memory:":
            self._path = path = Path(path).resolve()  # symbolic links share one lock
            self._file_lock = _make_file(path)
            self._reserve = DiskReserve(path.with_name(path.name + ".reserve"))
            self._reserve.release()  # space to open the file on a full disk
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
                raise file_error(path, f": {error}; {USE_ANOTHER}") from error
            raise

    def _prepare(self, path: Path | str) -> None:
        db = self._db
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            what = problem.splitlines()[-1]
            raise file_error(path, f" is damaged ({what}); {USE_ANOTHER}")
        version = db.execute("PRAGMA user_version").fetchone()[0]  # 0: a new file
        known = len(MIGRATIONS)
        if not 0 <= version <= known:
            raise file_error(
                path, f": its version is {version}, this release reads up to {known}; {USE_ANOTHER}"
            )
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA temp_store = MEMORY")
        for number, statements in enumerate(MIGRATIONS[version:], version + 1):
            db.executescript(f"BEGIN; {statements} PRAGMA user_version = {number}; COMMIT;")
        db.executescript(USAGE)
        db.commit()
        self._page_size = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {max(1, self.max_bytes // self._page_size)}")
        if self._reserve is not None:
            self._reserve.acquire()

    def close(self) -> None:
        self._pool.close()
        with self._lock:
            self._db.close()
            if self._file_lock is not None:
                self._file_lock.release()

    async def transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._pool.run(self._locked, work)

    async def last_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Like `transaction`, but never rejected: for generated output, which would be lost."""
        return await self._pool.finish(self._locked, work)

    async def deletion(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Like `transaction`, for work that only deletes: possible on a full disk."""
        return await self._pool.run(self._locked, work, uses_reserve=True)

    def _locked(self, work: Callable[[sqlite3.Connection], T], uses_reserve: bool = False) -> T:
        with self._lock:
            try:
                try:
                    return self._run(work)
                except sqlite3.Error as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                        raise
                self._make_space(uses_reserve)
                found = self._run(work)
                if uses_reserve:
                    self._make_space(False)
                    if self._reserve is not None:
                        self._reserve.acquire()
                return found
            except sqlite3.Error as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise SessionStorageError(str(error)) from error
                self._check_disk()
                raise self._full(" (or the disk is full)") from error

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._db:  # commits, or rolls back
            return work(self._db)

    def _make_space(self, uses_reserve: bool) -> None:
        """Let the log start again at its first page: a full disk cannot extend it."""
        if uses_reserve and self._reserve is not None:
            self._reserve.release()
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(RESTART)")

    def _check_disk(self, more: int = 0) -> None:
        """Raise SessionDiskFullError if `more` bytes and MIN_FREE_BYTES do not fit on the disk."""
        if self._path is not None and free_bytes(self._path) < more + MIN_FREE_BYTES:
            raise SessionDiskFullError

    def check_disk(self, messages: Sequence[str]) -> None:
        """Raise SessionDiskFullError if the disk has no space for `messages`."""
        self._check_disk(sum(map(len, messages)))

    def check_bytes(self, db: sqlite3.Connection, owner: str, messages: Sequence[str]) -> None:
        """Raise SessionLimitError if `messages` exceed a limit. Free pages count as free."""
        pages, free = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        more = sum(len(message) for message in messages)
        if (pages - free) * self._page_size + more > self.max_bytes:
            raise self._full()
        if self.max_owner_bytes is None:
            return
        row = db.execute("SELECT bytes FROM usage WHERE owner = ?", (owner,)).fetchone()
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


def file_error(
    path: Path | str, what: str, kind: type[InvalidInputError] = InvalidInputError
) -> InvalidInputError:
    return kind(f"session file {path}{what}", field="session_file", value=str(path))


def _make_file(path: Path) -> FileLock:
    """Create the file if missing, with mode 0600, and lock it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        lock = FileLock(path.with_name(path.name + ".lock"))
        holder = lock.acquire()
    except OSError as error:
        raise file_error(path, f": {error.strerror}; {USE_ANOTHER}") from error
    if holder is not None:
        raise file_error(path, f" is in use by {holder}; {USE_ANOTHER}", SessionFileInUseError)
    links = path.stat().st_nlink
    if links > 1:  # the lock and SQLite's log belong to a path, not to the file
        lock.release()
        raise file_error(path, f" has {links} hard links; it must have 1; {USE_ANOTHER}")
    return lock
