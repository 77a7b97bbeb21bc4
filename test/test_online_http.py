"""The HTTP surface on a model without weights: routes, fields, errors, streams, sessions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_fakes import FakeTokenizer, expected_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import CONTEXT, ServerProcess, sse_events, wait_for

KEYS = ("key-of-alice", "key-of-bob")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("http")
    (folder / "ui").mkdir()
    (folder / "ui" / "index.html").write_text("<title>ui</title>")
    (folder / "ui" / "app.js").write_text("export {};")
    options = [item for key in KEYS for item in ("--api-key", key)]
    with ServerProcess(
        *options,
        "--max-body-bytes",
        "100000",
        "--webui",
        str(folder / "ui"),
        "--served-model-name",
        "fake",
        "alias",
        session_file=folder / "sessions.db",
    ) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(KEYS[0]) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    return {**body, **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    return error


def reply(prompt: str, max_tokens: int) -> list[int]:
    return expected_tokens(FakeTokenizer().encode(prompt), max_tokens)


# ---- plain answers -------------------------------------------------------------------------------


def test_chat_gives_what_the_engine_gives_without_a_server(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(return_token_ids=True))
    assert response.status_code == 200
    body = response.json()
    choice = body["choices"][0]
    assert choice["token_ids"] == reply("[user]hi[assistant]", 6)
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert choice["message"]["content"] == FakeTokenizer().decode_tokens(choice["token_ids"])
    assert body["object"] == "chat.completion" and body["model"] == "fake"
    assert body["usage"]["completion_tokens"] == 6


def test_cached_prompt_tokens_are_reported_and_can_be_refused(client: httpx.Client) -> None:
    body = chat(messages=[{"role": "user", "content": "cached " * 20}])
    client.post(CHAT, json=body)

    def cached(**fields: Any) -> int:
        usage = client.post(CHAT, json={**body, **fields}).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() > 0
    assert cached(reuse_prefix=False) == 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0


def test_completions_with_several_prompts_choices_and_echo(client: httpx.Client) -> None:
    body = {"prompt": ["one", "three"], "n": 2, "echo": True, "max_tokens": 3, "seed": 5}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"][:3] for choice in answer["choices"]]
    assert starts == ["one", "one", "thr", "thr"]
    assert answer["usage"]["prompt_tokens"] == 8 and answer["usage"]["completion_tokens"] == 12
    again = client.post("/v1/completions", json=body).json()
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]


def test_completions_take_token_ids(client: httpx.Client) -> None:
    body = {"prompt": [104, 105], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens([104, 105], 4)
    several = client.post("/v1/completions", json={**body, "prompt": [[104, 105], [106]]}).json()
    assert several["choices"][1]["token_ids"] == expected_tokens([106], 4)


def test_stop_string_and_stop_reason(client: httpx.Client) -> None:
    body = chat(max_tokens=40, ignore_eos=True)
    text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    stop = text[10:12]
    choice = client.post(CHAT, json={**body, "stop": stop}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["message"]["content"] == text[: text.index(stop)]


def test_logprobs_of_chat_and_of_completions(client: httpx.Client) -> None:
    choice = client.post(CHAT, json=chat(logprobs=True, top_logprobs=3)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 6 and all(len(entry["top_logprobs"]) == 3 for entry in entries)
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [len(v) for v in logprobs.values()] == [5, 5, 5, 5]


def test_streams_end_in_a_finish_chunk_and_done(client: httpx.Client) -> None:
    body = chat(n=3, seed=1, temperature=1, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", CHAT, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = list(sse_events(response))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 18
    whole = client.post(CHAT, json={**body, "stream": False, "stream_options": None}).json()
    for index in range(3):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine].count(None) == len(mine) - 1
        assert mine[-1]["finish_reason"] == "length"
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == whole["choices"][index]["message"]["content"]


def test_completion_stream_with_echo_is_the_whole_text(client: httpx.Client) -> None:
    body = {"prompt": ["ab", "cd"], "max_tokens": 5, "temperature": 0, "echo": True}
    whole = [c["text"] for c in client.post("/v1/completions", json=body).json()["choices"]]
    texts = ["", ""]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for event in sse_events(response):
            if event != "[DONE]":
                choice = json.loads(event)["choices"][0]
                texts[choice["index"]] += choice["text"]
    assert texts == whole


def test_negative_seeds_and_strings_as_bias_keys_are_openai(client: httpx.Client) -> None:
    body = chat(seed=-(1 << 63), temperature=1, logit_bias={"104": -100, "105": 5.5})
    answers = [client.post(CHAT, json=body).json()["choices"][0]["message"] for _ in range(2)]
    assert answers[0] == answers[1]


# ---- routes --------------------------------------------------------------------------------------


def test_models_and_routing_by_name(client: httpx.Client) -> None:
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["fake", "alias"]
    assert client.get("/v1/models/alias").json()["max_model_len"] == CONTEXT
    assert client.post(CHAT, json=chat(model="alias")).json()["model"] == "alias"
    error = error_of(client.post(CHAT, json=chat(model="gpt-9")), 404)
    assert error["code"] == "model_not_found" and "gpt-9" in error["message"]
    assert error_of(client.get("/v1/models/none"), 404)["param"] == "model"


def test_tokenize_and_detokenize(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "héy", "return_token_strs": True}).json()
    assert answer["tokens"] == list("héy".encode()) and answer["count"] == 4
    assert len(answer["token_strs"]) == 4 and answer["max_model_len"] == CONTEXT
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "héy"
    messages = [{"role": "user", "content": "a"}]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert bytes(answer["tokens"]) == b"[user]a[assistant]"
    error_of(client.post("/tokenize", json={}), 400)
    assert "512" in error_of(client.post("/detokenize", json={"tokens": [512]}), 400)["message"]


def test_status_routes(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json()["version"]
    assert client.get("/openapi.json").json()["info"]["title"] == "NovaInfer"
    error_of(client.get("/nothing"), 404)
    error_of(client.get(CHAT), 405)


def test_metrics_have_the_names_that_dashboards_know(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=chat(stream=True, max_tokens=20)) as response:
        assert list(sse_events(response))[-1] == "[DONE]"
    text = client.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "http_requests_total",
        "engine_cpu_seconds_total",
        "engine_resident_memory_bytes",
    ):
        assert f"\nllaisys:{name}{{" in text, name
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert f"\nllaisys:{name}_count{{" in text, name
    assert "process_resident_memory_bytes" in text
    assert 'finished_reason="length"' in text


def test_request_id_goes_in_and_out(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(), headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response = client.post(CHAT, json=chat(), headers={"X-Request-Id": "a b" + "c" * 200})
    assert len(response.headers["x-request-id"]) == 32
    assert client.post(CHAT, json=chat(request_id="r7")).json()["id"] == "chatcmpl-r7"


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{}]),
        ("reasoning_effort", "low"),
        ("service_tier", "flex"),
        ("store", True),
        ("chat_template", "{{ 7 * 7 }}"),
        ("truncate_prompt_tokens", 5),
        ("best_of", 4),
        ("use_beam_search", True),
        ("suffix", "x"),
        ("priority", 1),
        ("prompt_logprobs", 1),
        ("no_such_field", 1),
        ("Temperature", 1),
    ],
)
def test_fields_that_are_not_there_are_refused_by_name(
    client: httpx.Client, field: str, value: Any
) -> None:
    error = error_of(client.post(CHAT, json=chat(**{field: value})), 400)
    assert error["param"] == field and field in error["message"]


def test_neutral_values_of_refused_fields_pass(client: httpx.Client) -> None:
    body = chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        modalities=["text"],
        best_of=1,
    )
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    body["messages"] = [*body["messages"], message, {"role": "user", "content": "and?"}]
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"n": 129}, "128"),
        ({"n": 0}, "1"),
        ({"n": 1 << 63}, "128"),
        ({"stop": ["x"] * 65}, "64"),
        ({"stop": "x" * 1025}, "1024"),
        ({"stop": ""}, "1"),
        ({"top_logprobs": 21, "logprobs": True}, "20"),
        ({"top_logprobs": 2}, "2"),
        ({"logit_bias": {"5": 101}}, "100"),
        ({"logit_bias": {"513": 1}}, "512"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "1024"),
        ({"stop_token_ids": [512]}, "512"),
        ({"stop_token_ids": list(range(1025))}, "1024"),
        ({"bad_words": ["x"] * 257}, "256"),
        ({"cache_salt": "x" * 1025}, "1024"),
        ({"seed": 1 << 64}, str((1 << 64) - 1)),
        ({"min_tokens": 7}, "6"),
        ({"max_completion_tokens": 7}, "6"),
        ({"temperature": 101}, "100"),
        ({"samplers": ["magic"]}, "top_k"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"messages": []}, "1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "user"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "2047"),
        ({"messages": [{"role": "user", "content": "x" * 2047}]}, "2047"),
        ({"session_id": "a/b"}, "session_id"),
    ],
)
def test_caps_are_named_with_their_number(
    client: httpx.Client, fields: dict[str, Any], number: str
) -> None:
    assert number in error_of(client.post(CHAT, json=chat(**fields)), 400)["message"]


def test_completion_caps(client: httpx.Client) -> None:
    def refuse(number: str, **fields: Any) -> None:
        body = {"prompt": "x", **fields}
        error = error_of(client.post("/v1/completions", json=body), 400)
        assert number in error["message"], error

    refuse("64", prompt=["x"] * 65)
    refuse("128", prompt=["x"] * 43, n=3)
    refuse("511", prompt=[512])
    refuse("echo", echo=True, logprobs=1)
    refuse("20", logprobs=21)
    refuse("1", prompt=[])
    refuse("empty", prompt="")


def test_bodies_that_are_not_requests(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"{", b"nonsense", b"[]", b"1", b"null", b'{"messages": NaN}', b"[" * 50_000):
        error_of(client.post(CHAT, content=body, headers=headers), 400)
    nan = b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'
    assert (
        "temperature" in error_of(client.post(CHAT, content=nan, headers=headers), 400)["message"]
    )
    digits = b'{"prompt":"x","seed":' + b"1" * 5000 + b"}"
    error_of(client.post("/v1/completions", content=digits, headers=headers), 400)
    error_of(client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)


def test_a_body_of_nothing_but_mistakes_costs_little(client: httpx.Client) -> None:
    """One mistake is reported, not a hundred thousand."""
    headers = {"content-type": "application/json"}
    for body in (
        {"prompt": [[1], "a"] * 5000},
        {"prompt": "x", **{f"f{i}": 1 for i in range(5000)}},
        {"prompt": "x", "stop": [1] * 20_000},
    ):
        content = json.dumps(body).encode()
        response = client.post("/v1/completions", content=content, headers=headers)
        assert error_of(response, 400)["message"] and len(response.text) < 1000
    wrong = {"messages": [{"role": 1}] * 5000}
    assert len(client.post(CHAT, json=wrong).text) < 1000


def test_a_lone_surrogate_does_no_harm(client: httpx.Client) -> None:
    body = b'{"prompt":"a\\ud800b","max_tokens":2}'
    headers = {"content-type": "application/json"}
    response = client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code in (200, 400)


NUMERIC = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, (1 << 31) - 1),
    "min_p": (0, 1),
    "n": (1, 128),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (1, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "top_logprobs": (0, 20),
}
NUMBERS = st.one_of(
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.floats(),
    st.sampled_from([-1, 0, 1, 2, 20, 21, 100, 128, 129, 0.5, 1.0, 1.5, -2, 1 << 31, 1 << 63]),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(field=st.sampled_from(sorted(NUMERIC)), value=NUMBERS)
def test_every_number_is_taken_or_refused_by_name(
    client: httpx.Client, field: str, value: Any
) -> None:
    """Junk never reaches the engine, and never makes a 500."""
    body = chat(max_tokens=2, logprobs=True)
    if field == "n" and isinstance(value, int) and value > 4:
        body["max_tokens"] = 1
    if field == "max_completion_tokens":
        del body["max_tokens"]
    body[field] = value
    if field in ("max_tokens", "max_completion_tokens"):
        body["stop_token_ids"] = list(range(512))
    content = json.dumps(body).encode()
    response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert field in error["message"] or error["param"] == field
    elif value is not None:
        assert not isinstance(value, (bool, str))
        low, high = NUMERIC[field]
        assert low <= value <= high


# ---- keys, owners, doors -------------------------------------------------------------------------


def test_every_route_but_health_and_the_ui_needs_a_key(server: ServerProcess) -> None:
    with server.client(KEYS[0]) as client:
        routes = client.get("/openapi.json").json()["paths"]
    assert len(routes) >= 13
    with server.client() as anonymous:
        for path, methods in routes.items():
            url = path.replace("{", "").replace("}", "")
            for method in methods:
                response = anonymous.request(method, url, json={})
                assert response.status_code == (200 if path == "/health" else 401), url
        for path in ("/openapi.json", "/nothing", "/docs", "/v1/../metrics"):
            assert error_of(anonymous.get(path), 401)["code"] == "invalid_api_key"
        assert anonymous.get("/").status_code == 200
        assert anonymous.post("/", json={}).status_code == 401
        for wrong in ("Bearer", "Bearer x", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"):
            headers = {"Authorization": wrong}
            assert anonymous.get("/v1/models", headers=headers).status_code == 401


def test_web_ui_has_a_strict_policy(server: ServerProcess) -> None:
    with server.client() as client:
        page = client.get("/")
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy
        assert client.get("/app.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/../server_helpers.py").status_code == 401
        again = client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304


def test_foreign_hosts_and_origins_are_turned_away(client: httpx.Client) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", ""):
        response = client.post(CHAT, json=chat(), headers={"Host": host})
        assert response.status_code in (400, 403), host
    assert client.get("/health", headers={"Host": "rebound.example"}).status_code == 403
    assert client.get("/health", headers={"Host": "localhost:9"}).status_code == 200
    assert client.get("/health", headers={"Host": "10.1.2.3"}).status_code == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        error_of(client.post(CHAT, json=chat(), headers={"Origin": origin}), 403)
    own = str(client.base_url).rstrip("/")
    response = client.post(CHAT, json=chat(), headers={"Origin": own})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_errors_leak_nothing(client: httpx.Client, server: ServerProcess) -> None:
    canary = "canary-7f3a"
    bodies = [
        chat(messages=[{"role": "user", "content": canary}], n=0),
        chat(messages=[{"role": "user", "content": [{"type": "x", "text": canary}]}]),
        chat(messages=[{"role": "user", "content": canary, "what": canary}]),
        {"prompt": canary * 2000},
    ]
    for body in bodies:
        path = "/v1/completions" if "prompt" in body else CHAT
        text = client.post(path, json=body).text
        assert canary not in text.replace(f"'{canary}'", "") and "0x" not in text
        assert "/work" not in text and "Traceback" not in text
    client.post(CHAT, json=chat(messages=[{"role": "user", "content": canary}]))
    assert not any(canary in line for line in server.log)


def test_log_lines_say_who_what_and_how_long(client: httpx.Client, server: ServerProcess) -> None:
    client.post(CHAT, json=chat(), headers={"X-Request-Id": "log-me"})

    def found() -> list[dict[str, Any]]:
        return [e for e in server.events() if e.get("request_id") == "log-me"]

    wait_for(lambda: bool(found()), "the log line")
    line = found()[0]
    assert line["model"] == "fake" and line["status"] == 200 and line["latency_ms"] > 0
    assert line["completion_tokens"] == 6 and line["finish_reason"] == "length"


# ---- sessions ------------------------------------------------------------------------------------


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


# ---- the openai client ---------------------------------------------------------------------------


def test_openai_client_sees_typed_errors(server: ServerProcess) -> None:
    good = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)
    with pytest.raises(openai.NotFoundError):
        good.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="n"):
        good.completions.create(model="fake", prompt="a", n=1000)
    bad = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        bad.models.list()


def test_many_clients_at_once_lose_and_mix_nothing(server: ServerProcess) -> None:
    """More clients than the engine runs at once; each has its own expected answer."""
    limits = httpx.Limits(max_connections=64)
    with server.client(KEYS[0], limits=limits) as client, ThreadPoolExecutor(32) as pool:

        def ask(number: int) -> tuple[int, list[int]]:
            body = {"prompt": f"client {number}", "max_tokens": 12, "temperature": 0}
            response = client.post("/v1/completions", json={**body, "return_token_ids": True})
            return number, response.json()["choices"][0]["token_ids"]

        for number, tokens in pool.map(ask, range(300)):
            assert tokens == reply(f"client {number}", 12)
    server.wait_idle(KEYS[0])


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
