"""The session file: one writer, checked on open, bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from error_helpers import naming

from llaisys.common.errors import InvalidInputError
from llaisys.server.errors import SessionLimitError, SessionStorageError
from llaisys.server.sessions import file as session_file
from llaisys.server.sessions.file import MIGRATIONS
from llaisys.server.sessions.store import SessionStore

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}

HOLDER = """
import subprocess, sys, time
from llaisys.server.sessions.store import SessionStore
store = SessionStore(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
print(child.pid, flush=True)
time.sleep(600)
"""


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_second_process_gets_the_pid_of_the_holder(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    first = SessionStore(file)
    (tmp_path / "link.db").symlink_to(file)
    for name in (file, tmp_path / "link.db", tmp_path / "." / "s.db"):
        with naming(InvalidInputError, str(os.getpid())):
            SessionStore(name)
    run(first.create("o", "kept"))  # failed attempts did not change it
    first.close()
    second = SessionStore(file)
    assert [info.session_id for info in run(second.list_all("o"))] == ["kept"]
    second.close()


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also when a child of the holder survives."""
    file = tmp_path / "s.db"
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with naming(InvalidInputError, str(holder.pid)):
                SessionStore(file)
            holder.kill()
            holder.wait()
            SessionStore(file).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_failed_open_releases_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    file.write_bytes(b"x" * 5000)
    for _ in range(2):
        with pytest.raises(InvalidInputError):
            SessionStore(file)
    file.unlink()
    SessionStore(file).close()


def test_damaged_page_is_detected_on_open(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    store = SessionStore(file)
    for number in range(50):
        run(store.create("o", f"s{number}", "t" * 200, [QUESTION] * 20))
    store.close()
    whole = file.read_bytes()
    page = 4096
    assert len(whole) > 20 * page
    for start in range(page, len(whole), 5 * page):  # all but the header
        file.write_bytes(whole[:start] + b"\xff" * page + whole[start + page :])
        with naming(InvalidInputError, "--session-file"):
            SessionStore(file)
    file.write_bytes(whole[: len(whole) // 2])
    with naming(InvalidInputError, "--session-file"):
        SessionStore(file)
    file.write_bytes(whole)
    SessionStore(file).close()


def test_turn_is_stored_only_after_the_history_it_answered() -> None:
    store = SessionStore(":memory:")
    turn = [QUESTION, ANSWER]

    async def steps() -> None:
        assert await store.open_turn("o", "s", [QUESTION]) == (False, [])
        assert not await store.append("o", "s", True, 0, turn, "m")  # deleted in the meantime
        assert await store.get("o", "s") is None
        assert await store.append("o", "s", False, 0, turn, "m")
        assert not await store.append("o", "s", False, 0, turn, "m")  # created in the meantime
        assert not await store.append("o", "s", True, 0, turn, "m")  # longer than it was
        assert await store.open_turn("o", "s", [QUESTION]) == (True, turn)
        assert await store.append("o", "s", True, 2, turn, "m")
        found = await store.get("o", "s")
        assert found is not None and found[1] == turn * 2

    run(steps())
    store.close()


def test_byte_limit_and_deletion(tmp_path: Path) -> None:
    file, most = tmp_path / "s.db", 1 << 20
    store = SessionStore(file, max_bytes=most)
    long = {"role": "user", "content": "é" * 10_000}

    async def steps() -> None:
        made = []
        with naming(SessionLimitError, str(most)) as refused:
            while True:
                made.append(await store.create("o", messages=[long]))
        assert refused.value.code == "session_storage_full"
        assert len(made) > 10
        with pytest.raises(SessionLimitError):
            await store.open_turn("o", made[0], [long])  # before generation
        with pytest.raises(SessionLimitError):
            await store.append("o", made[0], True, 1, [long, ANSWER], "m")
        for name in made:
            found = await store.get("o", name)
            assert found is not None and found[1] == [long]
        for name in made[:3]:
            assert await store.delete("o", name)
        assert await store.append("o", made[3], True, 1, [long, ANSWER], "m")

    run(steps())
    store.close()
    assert file.stat().st_size <= most
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * most


def test_byte_limit_per_owner(tmp_path: Path) -> None:
    """Also after reopening, and deleted bytes are subtracted."""
    file, most = tmp_path / "s.db", 1 << 18
    long = {"role": "user", "content": "x" * 10_000}

    async def fill(store: SessionStore, owner: str) -> list[str]:
        made = []
        with naming(SessionLimitError, str(most)) as refused:
            while True:
                made.append(await store.create(owner, messages=[long]))
        assert refused.value.code == "session_storage_full"
        return made

    store = SessionStore(file, max_bytes=4 * most, max_owner_bytes=most)
    made = run(fill(store, "greedy"))
    assert len(made) == most // 10_300
    assert len(run(fill(store, "other"))) == len(made)
    store.close()
    store = SessionStore(file, max_bytes=4 * most, max_owner_bytes=most)
    assert run(fill(store, "greedy")) == []
    with pytest.raises(SessionLimitError):
        run(store.open_turn("greedy", made[0], [long]))  # before generation
    assert run(store.delete("greedy", made[0]))
    assert len(run(fill(store, "greedy"))) == 1
    store.close()


def test_client_state_counts_and_is_deleted_with_its_session(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "s.db", max_bytes=1 << 20, max_owner_bytes=20_000)
    state = "é" * 1_000  # stored as 6,000 characters

    async def steps() -> None:
        await store.replace("o", "s", "t", [QUESTION], state)
        for _ in range(5):  # replaced states are subtracted
            await store.replace("o", "s", "t", [QUESTION], state)
        found = await store.get("o", "s")
        assert found is not None and found[1:] == ([QUESTION], state)
        with naming(SessionLimitError, "key"):
            await store.replace("o", "s", "t", [ANSWER], 4 * state)
        assert await store.get("o", "s") == found  # a failed replacement changes nothing
        await store.replace("o", "other", "t", [QUESTION], state)
        await store.replace("o", "other", "t", [QUESTION])
        assert await store.delete("o", "s")
        await store.replace("o", "s", "t", [QUESTION])
        for name in ("s", "other"):
            found = await store.get("o", name)
            assert found is not None and found[2] is None

    run(steps())
    store.close()


def test_byte_limit_counts_row_overhead(tmp_path: Path) -> None:
    """Row overhead exceeds the text."""
    file, most = tmp_path / "s.db", 1 << 20
    store = SessionStore(file, max_sessions=1 << 30, max_bytes=most)

    async def fill() -> None:
        for number in range(100_000):
            await store.create("o", f"{number:064d}", "t" * 200)

    with naming(SessionLimitError, str(most)):
        run(fill())
    assert len(run(store.list_all("o"))) > 100
    store.close()
    assert file.stat().st_size <= most


def test_byte_limit_within_one_transaction(tmp_path: Path) -> None:
    """The texts fit but their rows do not: SQLite limits the pages of the file."""
    file, most = tmp_path / "s.db", 1 << 18
    store = SessionStore(file, max_bytes=most)
    tiny = {"role": "user", "content": ""}
    with naming(SessionLimitError, str(most)) as refused:
        run(store.create("o", "n" * 64, messages=[tiny] * 4000))
    assert refused.value.code == "session_storage_full"
    assert run(store.list_all("o")) == []  # nothing is stored
    assert run(store.create("o", "small", messages=[tiny])) == "small"
    store.close()
    assert file.stat().st_size <= most


def test_storage_failure_is_a_session_storage_error(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    store = SessionStore(file)
    other = sqlite3.connect(file)
    other.execute("DROP TABLE messages")
    other.close()
    with pytest.raises(SessionStorageError):
        run(store.create("o", "s", messages=[QUESTION]))
    store.close()


def version_of(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def write_version(file: Path, version: int) -> None:
    """A file as the release with that version left it, with one chat."""
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.executescript("".join(MIGRATIONS[:version]))
        db.execute("INSERT INTO sessions VALUES ('o', 'kept', 'title', 'm', 1, 2)")
        rows = [("o", "kept", i, json.dumps(m)) for i, m in enumerate([QUESTION, ANSWER])]
        db.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_file_of_an_earlier_release_keeps_its_chats(tmp_path: Path, version: int) -> None:
    file, new = tmp_path / "old.db", tmp_path / "new.db"
    write_version(file, version)
    store = SessionStore(file)
    found = run(store.get("o", "kept"))
    assert found is not None and found[1] == [QUESTION, ANSWER]
    store.close()
    SessionStore(new).close()
    assert version_of(file) == version_of(new) == len(MIGRATIONS)
    tables = "SELECT name, sql FROM sqlite_master ORDER BY name"
    found = []
    for path in (file, new):
        with contextlib.closing(sqlite3.connect(path)) as db:
            found.append(db.execute(tables).fetchall())
    assert found[0] == found[1]


def test_file_of_a_release_without_stored_responses_stores_them(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    write_version(file, 1)
    SessionStore(file).close()
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("INSERT INTO responses VALUES ('o', 'resp_1', 'kept', 0, '{}')")


def test_file_of_a_later_release_is_refused_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    write_version(file, len(MIGRATIONS))
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    before = file.read_bytes()
    known = len(MIGRATIONS)
    text = f"version is {known + 1}, .* up to {known}; .*--session-file"
    with pytest.raises(InvalidInputError, match=text):
        SessionStore(file)
    assert file.read_bytes() == before


def test_failed_migration_leaves_the_version_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.db"
    write_version(file, len(MIGRATIONS))
    broken = "CREATE TABLE more (x); INSERT INTO missing VALUES (1);"
    monkeypatch.setattr(session_file, "MIGRATIONS", (*MIGRATIONS, broken))
    with pytest.raises(InvalidInputError):
        SessionStore(file)
    monkeypatch.undo()
    assert version_of(file) == len(MIGRATIONS)
    store = SessionStore(file)
    assert run(store.get("o", "kept")) is not None
    store.close()
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert not db.execute("SELECT * FROM sqlite_master WHERE name = 'more'").fetchall()
