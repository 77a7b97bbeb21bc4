"""The HTTP API on a model without weights: routes, fields, streams, keys."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from engine_fakes import FakeTokenizer, expected_tokens
from http_helpers import CHAT, KEYS, chat, error_of, reply
from server_helpers import CONTEXT, ServerProcess, wait_for
from wire_helpers import sse_events

from llaisys.server.metrics import Metrics, ModelMetrics

# ---- plain answers -------------------------------------------------------------------------------


def test_chat_equals_offline_engine(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(return_token_ids=True))
    assert response.status_code == 200
    body = response.json()
    choice = body["choices"][0]
    assert choice["token_ids"] == reply("[user]hi[assistant]", 6)
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert choice["message"]["content"] == FakeTokenizer().decode_tokens(choice["token_ids"])
    assert body["object"] == "chat.completion" and body["model"] == "fake"
    assert body["usage"]["completion_tokens"] == 6


def test_reports_cached_prompt_tokens_and_reuse_can_be_disabled(client: httpx.Client) -> None:
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


def test_completions_accept_token_ids(client: httpx.Client) -> None:
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
    content = b"".join(bytes(entry["bytes"]) for entry in entries)  # including partial characters
    assert content == b"".join(map(FakeTokenizer.token_bytes, reply("[user]hi[assistant]", 6)))
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [len(v) for v in logprobs.values()] == [5, 5, 5, 5]


def test_stop_token_has_its_logprobs_in_a_chunk_without_text(client: httpx.Client) -> None:
    tokens = reply("[user]hi[assistant]", 6)
    stop = next(i for i in range(2, 6) if tokens[i] not in tokens[:i])
    body = chat(logprobs=True, stop_token_ids=[tokens[stop]])
    whole = client.post(CHAT, json=body).json()["choices"][0]
    choices = []
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        choices = [json.loads(e)["choices"][0] for e in sse_events(response) if e != "[DONE]"]
    with_logprobs = [choice for choice in choices if choice["logprobs"]]
    entries = [entry for choice in with_logprobs for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"] and len(entries) == stop + 1
    last = with_logprobs[-1]
    assert len(last["logprobs"]["content"]) == 1 and not last["delta"].get("content")


@pytest.mark.parametrize("prompt", ["a", "é漢"])
def test_completion_logprobs_of_partial_characters(client: httpx.Client, prompt: str) -> None:
    """Every token has an entry and an offset, streamed or whole; token texts are distinct."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    body["logprobs"] = 4
    body["allowed_token_ids"] = sorted({65, *"é漢😀".encode()})
    body["return_token_ids"] = True
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    logprobs, text = whole["logprobs"], whole["text"]
    assert [len(values) for values in logprobs.values()] == [40] * 4
    assert [len(top) for top in logprobs["top_logprobs"]] == [4] * 40
    places = logprobs["text_offset"]
    assert places[0] == 0 and places == sorted(places) and places[-1] <= len(text)
    for token_id, name, place in zip(whole["token_ids"], logprobs["tokens"], places, strict=True):
        if token_id == 65:
            assert name == "A" and text[place:].lstrip("\ufffd").startswith("A")
        else:
            assert name == f"bytes:\\x{token_id:02x}"
    streamed: dict[str, list[Any]] = {"text": [], "tokens": [], "text_offset": []}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for event in sse_events(response):
            if event == "[DONE]":
                continue
            choice = json.loads(event)["choices"][0]
            streamed["text"].append(choice["text"])
            for field in ("tokens", "text_offset"):
                streamed[field] += (choice["logprobs"] or {}).get(field, [])
    assert "".join(streamed["text"]) == text
    assert streamed["tokens"] == logprobs["tokens"] and streamed["text_offset"] == places


def test_streams_end_with_finish_chunk_and_done(client: httpx.Client) -> None:
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
        text = "".join(c["delta"].get("content") or "" for c in mine)
        assert text == whole["choices"][index]["message"]["content"]


def test_completion_stream_with_echo_has_the_whole_text(client: httpx.Client) -> None:
    body = {"prompt": ["ab", "cd"], "max_tokens": 5, "temperature": 0, "echo": True}
    whole = [c["text"] for c in client.post("/v1/completions", json=body).json()["choices"]]
    texts = ["", ""]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for event in sse_events(response):
            if event != "[DONE]":
                choice = json.loads(event)["choices"][0]
                texts[choice["index"]] += choice["text"]
    assert texts == whole


def test_accepts_negative_seeds_and_string_bias_keys(client: httpx.Client) -> None:
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


@pytest.mark.parametrize("level", ["info", "debug"])
def test_probes_are_logged_at_debug_level_only(level: str) -> None:
    with ServerProcess("--log-level", level) as server:
        server.wait_ready()
        with server.client() as client:
            for path in ("/health", "/live", "/ready", "/metrics", "/version"):
                assert client.get(path).is_success
            assert client.post(CHAT, json=chat(max_tokens=1)).is_success
        assert server.stop() == 0
        found = [event for event in server.events() if event["message"] == "request"]
    routes = {event["route"]: event["level"] for event in found}
    probes = {"/health", "/live", "/ready", "/metrics"}
    assert routes["/version"] == routes[CHAT] == "info"
    assert probes & set(routes) == (probes if level == "debug" else set())
    assert all(routes[path] == "debug" for path in probes & set(routes))


def test_metrics_have_vllm_names(client: httpx.Client) -> None:
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
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_mean_accepted_length",
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


def test_tokens_of_a_delta_are_counted_at_once() -> None:
    metrics = Metrics()
    model = ModelMetrics(metrics, lambda: "m")
    model.create_series()
    model.record_tokens(0.02, 4)  # 5 ms each
    model.record_tokens(9.0, 1)
    text = metrics.text().decode()
    name = "llaisys:inter_token_latency_seconds"
    for bound, count in ("0.0025", 0), ("0.005", 4), ("5.0", 4), ("+Inf", 5):
        assert f'\n{name}_bucket{{le="{bound}",model_name="m"}} {count}.0\n' in text
    assert f'\n{name}_count{{model_name="m"}} 5.0\n' in text
    assert f'\n{name}_sum{{model_name="m"}} 9.02\n' in text


def test_request_id_is_echoed(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(), headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response = client.post(CHAT, json=chat(), headers={"X-Request-Id": "a b" + "c" * 200})
    assert len(response.headers["x-request-id"]) == 32
    assert client.post(CHAT, json=chat(request_id="r7")).json()["id"] == "chatcmpl-r7"


# ---- keys, owners, hosts -------------------------------------------------------------------------


def test_every_route_except_health_and_ui_requires_a_key(server: ServerProcess) -> None:
    with server.client(KEYS[0]) as client:
        routes = client.get("/openapi.json").json()["paths"]
    assert len(routes) >= 13
    with server.client() as anonymous:
        for path, methods in routes.items():
            url = path.replace("{", "").replace("}", "")
            for method in methods:
                response = anonymous.request(method, url, json={})
                expected = 200 if path in ("/health", "/live", "/ping", "/ready") else 401
                assert response.status_code == expected, url
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


def test_foreign_hosts_and_origins_are_rejected(client: httpx.Client) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", ""):
        response = client.post(CHAT, json=chat(), headers={"Host": host})
        assert response.status_code in (400, 403), host
    assert client.get("/health", headers={"Host": "rebound.example"}).status_code == 403
    assert client.get("/health", headers={"Host": "localhost:9"}).status_code == 200
    assert client.get("/health", headers={"Host": "10.1.2.3"}).status_code == 200
    for origin in (
        *("https://evil.example", "null", "http://127.0.0.1.evil.example"),
        *("http://localhost.evil.example:3000", "http://localhost:3000.evil.example"),
        *("http://evil.example/http://localhost:3000", "file://localhost"),
    ):
        response = client.post(CHAT, json=chat(), headers={"Origin": origin})
        assert "access-control-allow-origin" not in response.headers
        error_of(response, 403)
    own = str(client.base_url).rstrip("/")
    assert client.post(CHAT, json=chat(), headers={"Origin": own}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://localhost", "http://127.0.0.1:1", "http://[::1]:5"]
)
def test_pages_of_this_machine_are_allowed_and_preflights_need_no_key(
    client: httpx.Client, server: ServerProcess, origin: str
) -> None:
    response = client.post(CHAT, json=chat(), headers={"Origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "x-llaisys-ignored-fields" in response.headers["access-control-expose-headers"]
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with server.client() as anonymous:
        preflight = anonymous.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        # The request itself needs a key; the page may read the error.
        refused = anonymous.post(CHAT, json=chat(), headers={"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


def test_log_lines_have_key_route_and_latency(client: httpx.Client, server: ServerProcess) -> None:
    client.post(CHAT, json=chat(), headers={"X-Request-Id": "log-me"})

    def found() -> list[dict[str, Any]]:
        return [e for e in server.events() if e.get("request_id") == "log-me"]

    wait_for(lambda: bool(found()), "the log line")
    line = found()[0]
    assert line["model"] == "fake" and line["status"] == 200 and line["latency_ms"] > 0
    assert line["completion_tokens"] == 6 and line["finish_reason"] == "length"


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


def test_concurrent_clients_get_their_own_answers(server: ServerProcess) -> None:
    """More clients than max_num_seqs; each has its own expected answer."""
    limits = httpx.Limits(max_connections=64)
    with server.client(KEYS[0], limits=limits) as client, ThreadPoolExecutor(32) as pool:

        def ask(number: int) -> tuple[int, list[int]]:
            body = {"prompt": f"client {number}", "max_tokens": 12, "temperature": 0}
            response = client.post("/v1/completions", json={**body, "return_token_ids": True})
            return number, response.json()["choices"][0]["token_ids"]

        for number, tokens in pool.map(ask, range(300)):
            assert tokens == reply(f"client {number}", 12)
    server.wait_idle(KEYS[0])


def test_model_card_shows_sampling_defaults(client: httpx.Client) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert card["default_sampling_params"] == {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
    }  # fmt: skip
