"""The SQLite file of the sessions. One process opens it and holds a `FileLock`; a `DiskReserve`
lets it delete sessions on a full disk."""

import contextlib
import fcntl
import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from llaisys.common.errors import InvalidInputError
from llaisys.server.errors import SessionDiskFullError, SessionLimitError, SessionStorageError
from llaisys.server.thread_pool import BoundedThreadPool

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, sqlite3.Connection, P], T]
AsyncMethod = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]

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
RESERVED_BYTES = 1 << 20
CHUNK_BYTES = 16 << 10  # per write
MIN_FREE_BYTES = 1 << 20  # on the disk, for new contents


class SessionFileInUseError(InvalidInputError):
    """Another process has the file open."""


class FileLock:
    """`flock` on a separate file with the pid of the holder: closing another descriptor of the
    database file would release SQLite's own locks. The file is not removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Acquire without waiting. Returns None on success, else a description of the holder.
        Raises OSError if the file cannot be created or the filesystem has no locks."""
        # O_CLOEXEC: a child that outlives this process must not keep the lock.
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            return f"process {pid}" if pid.isdigit() else "another process"
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # full disk: the lock is held without a pid
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


class DiskReserve:
    """A file of up to RESERVED_BYTES. SQLite needs space to delete rows and to open a file (its log
    and index); on a full disk the file is removed to make it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> None:
        """Write the file, or what is missing of it; on a full disk it stays shorter."""
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:
            while (missing := RESERVED_BYTES - file.tell()) > 0:
                file.write(bytes(min(missing, CHUNK_BYTES)))
            os.fsync(file.fileno())  # allocates the blocks

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


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

    async def run(self, work: Callable[[sqlite3.Connection], T], is_last: bool, deletes: bool) -> T:
        """Run a transaction; see `transaction`."""
        start = self._pool.finish if is_last else self._pool.run
        return await start(self._locked, work, deletes)

    def _locked(self, work: Callable[[sqlite3.Connection], T], uses_reserve: bool) -> T:
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
                self.check_disk()
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

    def check_disk(self, messages: Sequence[str] = ()) -> None:
        """Raise SessionDiskFullError if `messages` and MIN_FREE_BYTES do not fit on the disk."""
        if self._path is None:
            return
        found = os.statvfs(self._path)
        if found.f_bavail * found.f_frsize < sum(map(len, messages)) + MIN_FREE_BYTES:
            raise SessionDiskFullError

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


def transaction(
    is_last: bool = False, deletes: bool = False
) -> Callable[[Method[P, T]], AsyncMethod[P, T]]:
    """Make a method of a store, which has a `file`, one transaction: it runs in the thread of the
    file, with the connection as its first argument. `is_last`: never rejected, for generated
    output, which would be lost. `deletes`: it only deletes, which is possible on a full disk."""

    def decorate(method: Method[P, T]) -> AsyncMethod[P, T]:
        @functools.wraps(method)
        async def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            file: SessionFile = self.file
            return await file.run(lambda db: method(self, db, *args, **kwargs), is_last, deletes)

        return run

    return decorate


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
