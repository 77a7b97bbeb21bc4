"""Sessions over HTTP: stored by the server, owned by a key, one turn at a time."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, KEYS, chat, error_of, reply
from prefork import preforked
from server_helpers import HELPERS, PACKAGE, Gate, ServerProcess
from wire_helpers import sse_events


def test_session_continues_on_the_server(client: httpx.Client) -> None:
    first = client.post(CHAT, json=chat(session_id="talk")).json()
    assert first["session_id"] == "talk"
    answer = first["choices"][0]["message"]["content"]
    body = chat(session_id="talk", messages=[{"role": "user", "content": "more"}], stream=True)
    with client.stream("POST", CHAT, json=body) as response:
        chunks = [json.loads(e) for e in sse_events(response) if e != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    prompt = f"[user]hi[assistant]{answer}[user]more[assistant]"
    expected = reply(prompt, 6)
    assert text == FakeTokenizer().decode_tokens(expected)
    exported = client.get("/v1/sessions/talk").json()
    assert [m["content"] for m in exported["messages"]] == ["hi", answer, "more", text]
    assert exported["num_messages"] == 4 and exported["model"] == "fake"


def test_single_delta_stream_is_stored(client: httpx.Client) -> None:
    for turn in range(3):
        body = chat(session_id="short", stream=True, max_tokens=1)
        with client.stream("POST", CHAT, json=body) as response:
            assert list(sse_events(response))[-1] == "[DONE]"
        kept = client.get("/v1/sessions/short").json()["messages"]
        assert [m["role"] for m in kept] == ["user", "assistant"] * (turn + 1)


def test_sessions_can_be_listed_imported_renamed_and_deleted(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    made = client.post("/v1/sessions", json={"title": "t", "messages": messages})
    assert made.status_code == 201
    name = made.json()["id"]
    assert name in [s["id"] for s in client.get("/v1/sessions").json()["data"]]
    assert client.patch(f"/v1/sessions/{name}", json={"title": "u"}).json()["title"] == "u"
    error_of(client.post("/v1/sessions", json={"session_id": name}), 400)
    assert client.delete(f"/v1/sessions/{name}").json()["deleted"] is True
    assert error_of(client.get(f"/v1/sessions/{name}"), 404)["code"] == "session_not_found"
    error_of(client.delete(f"/v1/sessions/{name}"), 404)
    error_of(client.patch(f"/v1/sessions/{name}", json={"title": "u"}), 404)


def test_session_replacement_is_atomic(client: httpx.Client) -> None:
    first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    other = [{"role": "user", "content": "three"}]
    path = "/v1/sessions/mirror"
    content = {"title": "Mine", "messages": first, "client_state": '{"é": 1}'}
    made = client.put(path, json=content).json()
    assert {name: made[name] for name in content} == content
    assert client.get(path).json()["client_state"] == content["client_state"]
    changed = client.put(path, json={"messages": other}).json()
    assert (changed["title"], changed["messages"], changed["client_state"]) == ("", other, None)
    assert changed["created"] == made["created"]
    bad = client.put(path, json={"messages": [*first, {"role": "no role", "content": "x"}]})
    assert bad.status_code == 400
    assert client.get(path).json()["messages"] == other
    assert client.put(path, json={"title": "x"}).status_code == 400
    client.delete(path)


def test_session_belongs_to_its_key(client: httpx.Client, server: ServerProcess) -> None:
    client.post(CHAT, json=chat(session_id="private"))
    with server.client(KEYS[1]) as other:
        assert other.get("/v1/sessions/private").status_code == 404
        assert "private" not in [s["id"] for s in other.get("/v1/sessions").json()["data"]]
        assert other.delete("/v1/sessions/private").status_code == 404
        other.post(CHAT, json=chat(session_id="private"))  # a new session with the same id
        assert other.get("/v1/sessions/private").json()["num_messages"] == 2
        other.delete("/v1/sessions/private")
    assert client.get("/v1/sessions/private").json()["num_messages"] == 2


def test_rejected_turns_do_not_change_a_session(client: httpx.Client) -> None:
    client.post(CHAT, json=chat(session_id="firm"))
    long = [{"role": "user", "content": "x" * 5000}]
    error_of(client.post(CHAT, json=chat(session_id="firm", messages=long)), 400)
    error_of(client.post(CHAT, json=chat(session_id="firm", n=2)), 400)
    assert client.get("/v1/sessions/firm").json()["num_messages"] == 2


def test_session_survives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "sessions.db"
    with ServerProcess(session_file=file) as first, first.wait_ready().client() as client:
        client.post(CHAT, json=chat(session_id="kept"))
        before = client.get("/v1/sessions/kept").json()
        first.process.kill()
    assert file.stat().st_mode & 0o077 == 0
    with ServerProcess(session_file=file) as second, second.wait_ready().client() as client:
        assert client.get("/v1/sessions/kept").json() == before
        again = client.post(CHAT, json=chat(session_id="kept")).json()
        assert again["usage"]["prompt_tokens"] > len("[user]hi[assistant]" * 2)
        assert second.stop() == 0


def test_second_turn_of_a_session_is_a_409(tmp_path: Path) -> None:
    slow = {"LLAISYS_TEST_STEP_SECONDS": "0.02"}
    with ServerProcess(env=slow, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        started = threading.Event()

        def long_turn() -> None:
            body = chat(session_id="one", max_tokens=400, ignore_eos=True, stream=True)
            headers = {"X-Request-Id": "long-turn"}
            with (
                server.client() as client,
                client.stream("POST", CHAT, json=body, headers=headers) as response,
            ):
                for _ in sse_events(response):
                    started.set()

        thread = threading.Thread(target=long_turn)
        thread.start()
        assert started.wait(30)
        with server.client() as client:
            assert error_of(client.post(CHAT, json=chat(session_id="one")), 409)
            found = client.post("/v1/requests/unknown/cancel")
            assert error_of(found, 404)["code"] == "request_not_found"
            assert client.post("/v1/requests/long-turn/cancel").json()["cancelled"] is True
            thread.join(30)
            assert not thread.is_alive()
            kept = client.get("/v1/sessions/one")
            assert kept.status_code == 404  # a cancelled turn is not stored
            assert client.post(CHAT, json=chat(session_id="one")).status_code == 200


class PausedServer:
    """A server whose engine is paused while a turn is open."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sessions.db"
        self.gate = Gate(folder)
        self.process = ServerProcess(env=self.gate.env, session_file=self.file)

    def during_turn(self, act: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Call `act(client)` during a turn; return the turn's status and last event."""

        def turn() -> tuple[int, dict[str, Any]]:
            with self.process.client() as client:
                if not fields.get("stream"):
                    response = client.post(CHAT, json=chat(**fields))
                    return response.status_code, response.json()
                with client.stream("POST", CHAT, json=chat(**fields)) as response:
                    errors = [e for e in sse_events(response) if '"error":' in e]
                return response.status_code, json.loads(errors[-1])

        self.gate.order("wait")
        with ThreadPoolExecutor(1) as pool, self.process.client() as client:
            answer = pool.submit(turn)
            self.gate.hold()
            act(client)
            self.gate.open()
            return answer.result(30)


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PausedServer]:
    paused = PausedServer(tmp_path_factory.mktemp("paused"))
    with paused.process:
        paused.process.wait_ready()
        yield paused


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("made", ["by its first turn", "before it"])
def test_session_deleted_during_its_first_turn_stays_deleted(
    paused: PausedServer, stream: bool, made: str
) -> None:
    def delete(client: httpx.Client) -> None:
        assert client.delete("/v1/sessions/gone").json()["deleted"] is True

    with paused.process.client() as client:
        if made == "before it":
            assert client.post("/v1/sessions", json={"session_id": "gone"}).status_code == 201
        status, answer = paused.during_turn(delete, session_id="gone", stream=stream)
        assert status == (200 if stream else 409)
        assert answer["error"]["code"] == "session_changed"
        assert client.get("/v1/sessions/gone").status_code == 404
        assert client.delete("/v1/sessions/gone").status_code == 404
        assert client.post(CHAT, json=chat(session_id="gone")).status_code == 200
        assert client.get("/v1/sessions/gone").json()["num_messages"] == 2
        client.delete("/v1/sessions/gone")


def test_session_replaced_during_a_turn_keeps_the_replacement(paused: PausedServer) -> None:
    other = [{"role": "user", "content": "mine"}]

    def replace(client: httpx.Client) -> None:
        assert client.put("/v1/sessions/changing", json={"messages": other}).is_success

    status, answer = paused.during_turn(replace, session_id="changing")
    assert (status, answer["error"]["code"]) == (409, "session_changed")
    with paused.process.client() as client:
        assert client.get("/v1/sessions/changing").json()["messages"] == other
        client.delete("/v1/sessions/changing")


def test_turn_that_cannot_be_stored_is_an_error(paused: PausedServer) -> None:
    def change(client: httpx.Client) -> None:
        """Another program may write the file without the lock."""
        with sqlite3.connect(paused.file) as db:
            db.execute(
                "INSERT INTO messages SELECT owner, session, 2, message FROM messages "
                "WHERE session = 'shared' AND position = 0"
            )
        db.close()

    with paused.process.client() as client:
        client.post(CHAT, json=chat(session_id="shared"))
        status, answer = paused.during_turn(change, session_id="shared")
        assert status == 409 and answer["error"]["code"] == "session_changed"
        assert client.get("/v1/sessions/shared").json()["num_messages"] == 3


def refused_start(session_file: Path) -> str:
    """Return the error of `llaisys serve`: one line without a traceback."""
    arguments = ["serve", "--port", "0", "--log-level", "error"]
    arguments += ["--session-file", str(session_file)]
    process = preforked().start("llaisys.__main__", arguments, dict(os.environ))
    output = process.stderr.read()
    assert process.wait(120) == 1 and len(output.splitlines()) == 1, output
    return output


def test_second_server_on_a_session_file_names_the_holder(paused: PausedServer) -> None:
    output = refused_start(paused.file)
    assert (
        f"is in use by process {paused.process.process.pid}" in output
        and "--session-file" in output
    )


def test_second_server_with_the_default_session_file_uses_another(tmp_path: Path) -> None:
    path = os.pathsep.join([str(PACKAGE), str(HELPERS)])
    env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)}
    servers, urls = [], []
    try:
        for _ in range(2):
            server = preforked().start("fault_server", ["--port", "0"], env)
            servers.append(server)
            line = next(line for line in server.stdout if "serving" in line)
            urls.append(line.split()[-1])
        for number, url in enumerate(urls):
            with httpx.Client(base_url=url, timeout=60) as client:
                body = {"messages": [{"role": "user", "content": f"to {number}"}]}
                assert client.post("/v1/sessions", json=body).is_success
                assert len(client.get("/v1/sessions").json()["data"]) == 1
    finally:
        for server in servers:
            server.terminate()
            server.wait(30)
    port = urls[1].rpartition(":")[2]
    files = {file.name for file in (tmp_path / "llaisys").glob("*.sqlite3")}
    assert files == {"sessions.sqlite3", f"sessions-{port}.sqlite3"}
    first, second = (server.stderr.read() for server in servers)
    assert "is in use by process" not in first
    (warning,) = [line for line in second.splitlines() if "is in use by process" in line]
    assert "WARNING" in warning and warning.endswith(f"sessions-{port}.sqlite3")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING ", warning)


def test_damaged_session_file_is_rejected_at_start(tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    file.write_bytes(b"this is no database " * 500)
    assert f"session file {file}: file is not a database" in refused_start(file)


def test_session_file_size_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    long = [{"role": "user", "content": "x" * 90_000}]
    with ServerProcess("--max-session-bytes", str(1 << 20), session_file=file) as server:
        server.wait_ready()
        with server.client() as client:
            made = []
            while (answer := client.post("/v1/sessions", json={"messages": long})).is_success:
                made.append(answer.json()["id"])
                assert len(made) < 20
            assert error_of(answer, 400)["code"] == "session_storage_full"
            assert "1048576 bytes" in answer.json()["error"]["message"]
            refused = client.post(CHAT, json=chat(session_id="new", messages=long))
            assert error_of(refused, 400)["code"] == "session_storage_full"
            client.delete(f"/v1/sessions/{made[0]}")
            assert client.post("/v1/sessions", json={"messages": long}).status_code == 201
        assert server.stop() == 0
    assert file.stat().st_size <= 1 << 20


def test_one_key_may_fill_half_of_the_session_file(tmp_path: Path) -> None:
    options = ("--api-key", "one", "--api-key", "two", "--max-session-bytes", str(1 << 20))
    body = {"messages": [{"role": "user", "content": "x" * 50_000}]}
    with ServerProcess(*options, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        counts = []
        for key in ("one", "two"):
            with server.client(key) as client:
                made = 0
                while (answer := client.post("/v1/sessions", json=body)).status_code == 201:
                    made += 1
                assert error_of(answer, 400)["code"] == "session_storage_full"
                counts.append(made)
    assert counts[0] == (1 << 19) // 50_300 and counts[1] > 5
