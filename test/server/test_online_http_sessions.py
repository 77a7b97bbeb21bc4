"""Sessions over HTTP: kept by the server, owned by a key, one turn at a time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, KEYS, chat, error_of, reply
from server_helpers import ServerProcess, sse_events


def test_a_session_continues_on_the_server(client: httpx.Client) -> None:
    first = client.post(CHAT, json=chat(session_id="talk")).json()
    assert first["session_id"] == "talk"
    answer = first["choices"][0]["message"]["content"]
    body = chat(session_id="talk", messages=[{"role": "user", "content": "more"}], stream=True)
    with client.stream("POST", CHAT, json=body) as response:
        chunks = [json.loads(e) for e in sse_events(response) if e != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    prompt = f"[user]hi[assistant]{answer}[user]more[assistant]"
    expected = reply(prompt, 6)
    assert text == FakeTokenizer().decode_tokens(expected)
    exported = client.get("/v1/sessions/talk").json()
    assert [m["content"] for m in exported["messages"]] == ["hi", answer, "more", text]
    assert exported["num_messages"] == 4 and exported["model"] == "fake"


def test_a_stream_that_is_over_with_its_first_part_is_kept_too(client: httpx.Client) -> None:
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


def test_a_session_belongs_to_its_key(client: httpx.Client, server: ServerProcess) -> None:
    client.post(CHAT, json=chat(session_id="private"))
    with server.client(KEYS[1]) as other:
        assert other.get("/v1/sessions/private").status_code == 404
        assert "private" not in [s["id"] for s in other.get("/v1/sessions").json()["data"]]
        assert other.delete("/v1/sessions/private").status_code == 404
        other.post(CHAT, json=chat(session_id="private"))  # another one of the same name
        assert other.get("/v1/sessions/private").json()["num_messages"] == 2
        other.delete("/v1/sessions/private")
    assert client.get("/v1/sessions/private").json()["num_messages"] == 2


def test_refused_turns_leave_a_session_as_it_was(client: httpx.Client) -> None:
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


def test_only_one_turn_of_a_session_at_a_time(tmp_path: Path) -> None:
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
