"""llama.cpp's routes: /completion, /props, /slots, /apply-template, tokenize, paths without /v1,
and its extensions of OpenAI's responses. llama.cpp's server tests check the same behaviour."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, KEYS, chat, error_of, reply
from server_helpers import CONTEXT, Gate, ServerProcess
from wire_helpers import raw_request, sse_events

from llaisys.server.llamacpp.schemas import LlamaCompletionRequest


def complete(client: httpx.Client, path: str = "/completion", **fields: Any) -> Any:
    body = {"prompt": "abc", "temperature": 0, "n_predict": 6, "ignore_eos": True, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        return [json.loads(event) for event in sse_events(response) if event != "[DONE]"]


# ---- /completion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("return_tokens", [False, True])
def test_completion_has_text_counts_and_timings(
    client: httpx.Client, path: str, return_tokens: bool
) -> None:
    body = complete(client, path, return_tokens=return_tokens)
    assert body["content"] == FakeTokenizer().decode_tokens(reply("abc", 6))
    assert body["tokens"] == (reply("abc", 6) if return_tokens else [])
    assert body["stop"] is True and body["stop_type"] == "limit" and body["prompt"] == "abc"
    assert body["truncated"] is False and type(body["has_new_line"]) is bool
    timings = body["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 3 and timings["predicted_n"] == 6
    assert timings["predicted_ms"] >= 0 and timings["predicted_per_second"] >= 0
    assert body["generation_settings"]["n_predict"] == 6 and body["tokens_evaluated"] == 3


def test_stream_equals_whole_answer_and_ends_with_stats(client: httpx.Client) -> None:
    whole = complete(client, seed=42)
    body = {"prompt": "abc", "temperature": 0, "n_predict": 6, "ignore_eos": True, "seed": 42}
    events = events_of(client, "/completion", body)
    assert "".join(event["content"] for event in events) == whole["content"]
    for event in events[:-1]:
        assert event["stop"] is False and all(type(token) is int for token in event["tokens"])
    last = events[-1]
    assert last["stop"] is True and last["stop_type"] == "limit" and last["content"] == ""
    assert last["timings"]["predicted_n"] == 6 and last["generation_settings"]["seed"] == 42
    assert last["generation_settings"]["n_predict"] == 6 and type(last["has_new_line"]) is bool


@pytest.mark.parametrize("fields", [{}, {"n_predict": -1}])
def test_default_n_predict_fills_the_context(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post("/completion", json={"prompt": "abc", "ignore_eos": True, **fields})
    body = response.json()
    assert body["tokens_predicted"] == CONTEXT - 3 and body["truncated"] is True
    assert body["timings"]["predicted_n"] == CONTEXT - 3


def test_seed_determines_the_output(client: httpx.Client) -> None:
    texts = [complete(client, temperature=1, seed=seed)["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert complete(client, temperature=1, seed=1, cache_prompt=False)["content"] == texts[0]


def test_prompt_formats(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "abc"}).json()["tokens"]
    assert tokens == [97, 98, 99]
    text = complete(client)["content"]
    assert complete(client, prompt=tokens)["content"] == text
    for prompts in ([tokens, tokens], [tokens, "abc"], ["abc", "abc"]):
        answers = complete(client, prompt=prompts)
        assert [answer["content"] for answer in answers] == [text, text]
        assert [answer["index"] for answer in answers] == [0, 1]
    mixed = complete(client, prompt=[97, "b", 99])
    assert mixed["content"] == text and mixed["prompt"] == "abc" and mixed["tokens_evaluated"] == 3
    error_of(client.post("/completion", json={"prompt": [97, ["b"]]}), 400)
    error_of(client.post("/completion", json={"prompt": []}), 400)
    assert "511" in error_of(client.post("/completion", json={"prompt": [512]}), 400)["message"]


def test_response_fields_selects_fields(client: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
    body = complete(client, response_fields=fields)
    assert set(body) == set(fields[:3]) and body["generation_settings/n_predict"] == 6
    assert "generation_settings" in complete(client, response_fields=[])


def test_n_probs_returns_token_probabilities(client: httpx.Client) -> None:
    def check(entries: list[dict[str, Any]], count: int) -> None:
        assert len(entries) == count
        for entry in entries:
            assert len(entry["top_logprobs"]) == 10
            for shown in (entry, *entry["top_logprobs"]):
                assert type(shown["id"]) is int and type(shown["token"]) is str
                assert shown["logprob"] <= 0 and type(shown["bytes"]) is list

    check(complete(client, n_probs=10)["completion_probabilities"], 6)
    assert "completion_probabilities" not in complete(client)
    body = {"prompt": "abc", "temperature": 0, "n_predict": 5, "n_probs": 10, "ignore_eos": True}
    events = events_of(client, "/completion", body)
    found = [entry for event in events for entry in event.get("completion_probabilities", ())]
    check(found, 5)
    error = error_of(client.post("/completion", json={"prompt": "a", "n_probs": 21}), 400)
    assert "20" in error["message"] and error["param"] == "n_probs"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_logit_bias_by_token_or_text(client: httpx.Client, named: bool, as_object: bool) -> None:
    plain = complete(client, n_predict=60, return_tokens=True)["tokens"]
    token = next(token for token in plain if 33 <= token <= 126 and not chr(token).isdigit())
    key: Any = chr(token) if named else token
    bias: Any = {str(key): False} if as_object else [[key, False]]
    tokens = complete(client, n_predict=60, logit_bias=bias, return_tokens=True)["tokens"]
    assert token not in tokens


def test_accepts_fields_of_the_llama_cpp_page(client: httpx.Client) -> None:
    """The fields that llama.cpp's web page sends with every request."""
    body = {
        "samplers": ["dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "temperature"],
        "dynatemp_range": 0, "dynatemp_exponent": 1, "typical_p": 1, "xtc_probability": 0,
        "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "timings_per_token": False, "cache_prompt": True, "mirostat": 0,
        "id_slot": 0, "return_progress": False, "n_keep": 0, "stop": [""], "seed": -1,
    }  # fmt: skip
    assert complete(client, **body)["content"] == complete(client)["content"]
    assert complete(client, samplers="top_k;temperature")["content"] == complete(client)["content"]
    for field, value in (
        ("samplers", ["magic"]),
        ("samplers", [{}]),
    ):
        response = client.post("/completion", json={"prompt": "a", field: value})
        assert field in error_of(response, 400)["param"]


def test_infill_without_fim_tokens_is_rejected(client: httpx.Client) -> None:
    for path, body, field in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_prefix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ):
        error = error_of(client.post(path, json=body), 400)
        assert error["code"] == "no_infill" and error["param"] == field
    body = {"model": "fake", "prompt": "a", "suffix": "b"}
    assert "suffix" in client.post("/api/generate", json=body).json()["error"]
    body = {"prompt": ["a", "b"], "suffix": "c"}
    assert error_of(client.post("/v1/completions", json=body), 400)["param"] == "suffix"


def test_t_max_predict_ms_and_prompt_objects(client: httpx.Client) -> None:
    plain = complete(client)["content"]
    assert complete(client, t_max_predict_ms=10**9, t_max_prompt_ms=5)["content"] == plain
    assert complete(client, t_max_predict_ms=-1, post_sampling_probs=False)["content"] == plain
    as_object = {"prompt_string": "abc", "multimodal_data": []}
    assert complete(client, prompt=as_object)["content"] == plain
    assert complete(client, prompt=[as_object, "abc"])[0]["content"] == plain
    for fields, param in (
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}}, "prompt.multimodal_data"),
        ({"prompt": {"no": "text"}}, "prompt"),
        ({"prompt": "x", "t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"prompt": "x", "post_sampling_probs": 1}, "post_sampling_probs"),
    ):
        assert error_of(client.post("/completion", json=fields), 400)["param"] == param


def test_post_sampling_probs(client: httpx.Client) -> None:
    body = complete(client, post_sampling_probs=True, n_probs=2)
    for entry in body["completion_probabilities"]:
        assert 0 < entry["prob"] <= 1 and "logprob" not in entry
        assert len(entry["top_probs"]) == 2 and "prob" in entry["top_probs"][0]
    assert body["generation_settings"]["post_sampling_probs"] is True


def test_dry_runs_only_as_part_of_the_chain() -> None:
    names = {"samplers": ["dry", "top_k"], "dry_multiplier": 2}
    body = LlamaCompletionRequest(prompt="a", **names)
    assert body.to_sampling().dry_multiplier == 2 and body.to_sampling().samplers == ("top_k",)
    body = LlamaCompletionRequest(prompt="a", **names | {"samplers": "top_k"})
    assert body.to_sampling().dry_multiplier == 0


def test_reported_seed_reproduces_the_output(client: httpx.Client) -> None:
    first = complete(client, temperature=1, seed=-1)
    seed = first["generation_settings"]["seed"]
    assert 0 <= seed < 1 << 53
    assert complete(client, temperature=1, seed=seed)["content"] == first["content"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", CHAT])
def test_timings_per_token(client: httpx.Client, path: str) -> None:
    body = chat() if path == CHAT else {"prompt": "abc"}
    body |= {"max_tokens": 5, "ignore_eos": True}
    events = events_of(client, path, {**body, "timings_per_token": True})
    timed = [event["timings"] for event in events if "timings" in event]
    assert len(timed) >= 2 and timed[-1]["predicted_n"] == 5
    assert all("prompt_per_second" in t and "predicted_per_second" in t for t in timed)
    assert len([e for e in events_of(client, path, body) if "timings" in e]) == 1


def test_rates_exclude_the_first_token(client: httpx.Client) -> None:
    timings = complete(client, n_predict=1)["timings"]
    assert timings["predicted_n"] == 1 and timings["predicted_per_second"] == 0
    timings = complete(client, n_predict=16)["timings"]
    expected = 1e3 * 15 / timings["predicted_ms"]
    assert timings["predicted_per_second"] == pytest.approx(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_verbose_returns_prompt_and_settings(client: httpx.Client, stream: bool) -> None:
    body = chat(verbose=True, seed=7, max_tokens=3, ignore_eos=True)
    if stream:
        *others, last = events_of(client, CHAT, body)
        assert not any("__verbose" in event for event in others)
    else:
        last = client.post(CHAT, json=body).json()
    found = last["__verbose"]
    assert found["prompt"] == "[user]hi[assistant]" and found["tokens_predicted"] == 3
    assert found["generation_settings"]["seed"] == 7
    assert "__verbose" not in client.post(CHAT, json=chat(verbose=False)).json()


def test_slots_are_not_changed(client: httpx.Client) -> None:
    for action in ("save", "restore", "erase"):
        error = error_of(client.post(f"/slots/1?action={action}", json={"filename": "x"}), 501)
        assert error["type"] == "not_supported_error"


def test_metrics_and_slots_can_be_disabled() -> None:
    with ServerProcess("--no-metrics", "--no-slots") as process, process.wait_ready().client() as c:
        assert error_of(c.get("/metrics"), 501)["code"] == "unsupported"
        assert error_of(c.get("/slots"), 501)["code"] == "unsupported"


def test_stop_words(client: httpx.Client) -> None:
    text = complete(client, n_predict=40)["content"]
    body = complete(client, n_predict=40, stop=[text[10:12]])
    assert body["stop_type"] == "word" and body["stopping_word"] == text[10:12]
    assert body["content"] == text[: text.index(text[10:12])]


def test_too_long_prompt_reports_length_and_context(client: httpx.Client) -> None:
    for path, body in (
        ("/completion", {"prompt": "x" * 3000}),
        ("/v1/completions", {"prompt": "x" * 3000, "stream": True}),
        ("/chat/completions", chat(messages=[{"role": "user", "content": "x" * 3000}])),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 3000}], stream=True)),
    ):
        error = error_of(client.post(path, json=body), 400)
        assert error["n_ctx"] == CONTEXT and error["n_prompt_tokens"] >= 3000
        assert error["code"] == "context_length_exceeded"
        named = "invalid_request_error" if "/v1/" in path else "exceed_context_size_error"
        assert error["type"] == named


# ---- what is served ------------------------------------------------------------------------------


def test_props_describe_the_model_without_paths(client: httpx.Client) -> None:
    body = client.get("/props").json()
    assert body["default_generation_settings"]["n_ctx"] == CONTEXT and body["total_slots"] > 0
    assert body["default_generation_settings"]["params"]["temperature"] == 0.8
    assert body["default_generation_settings"]["params"]["seed"] == -1
    assert body["model_alias"] == "fake" and "/" not in body["model_path"]
    assert body["modalities"] == {"vision": False, "audio": False}
    assert client.post("/props", json={}).status_code == 405


def test_slots_show_counts_but_no_content(tmp_path: Any) -> None:
    gate = Gate(tmp_path)
    with ServerProcess("--max-num-seqs", "2", env=gate.env) as server:
        server.wait_ready()
        with server.client() as client:
            slots = client.get("/slots").json()
            assert [slot["is_processing"] for slot in slots] == [False, False]
            assert slots[0]["n_ctx"] == CONTEXT and "params" not in slots[0]
            gate.order("wait")
            body = {"prompt": "x", "max_tokens": 50, "n": 2, "ignore_eos": True}
            connection = raw_request(server, body)
            gate.hold()

            def busy() -> int:
                return sum(slot["is_processing"] for slot in client.get("/slots").json())

            server.wait_for(lambda: busy() == 2, "two slots to be busy")
            response = client.get("/slots", params={"fail_on_no_slot": 1})
            assert error_of(response, 503)["code"] == "full"
            connection.close()  # cancelled: its slots are free again
            gate.open()
            server.wait_for(lambda: busy() == 0, "free slots")


def test_apply_template(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi there"}]
    body = client.post("/apply-template", json={"messages": messages}).json()
    assert body["prompt"] == "[system]Be.[user]Hi there[assistant]"
    fields = {"messages": messages, "add_generation_prompt": False}
    body = client.post("/apply-template", json=fields).json()
    assert body["prompt"] == "[system]Be.[user]Hi there"
    for wrong in (None, "string", [123], [{}], [{"role": 123}], []):
        error_of(client.post("/apply-template", json={"messages": wrong}), 400)


def test_tokenize_with_and_without_pieces(client: httpx.Client) -> None:
    content = "What is 媽?"
    tokens = client.post("/tokenize", json={"content": content}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"] == content
    pieces = client.post("/tokenize", json={"content": content, "with_pieces": True}).json()
    assert [entry["id"] for entry in pieces["tokens"]] == tokens
    raw = b"".join(
        p.encode() if isinstance(p, str) else bytes(p)
        for p in (entry["piece"] for entry in pieces["tokens"])
    )
    assert raw.decode() == content
    assert client.post("/tokenize", json={"content": "x", "add_special": True}).status_code == 200
    error_of(client.post("/tokenize", json={"content": "x", "prompt": "x"}), 400)


def test_tokenizer_metadata(client: httpx.Client) -> None:
    body = client.get("/tokenizer_info").json()
    assert body["model_max_length"] == CONTEXT and body["vocab_size"] == 512
    assert body["tokenizer_class"]


# ---- OpenAI's answers as its clients read them ---------------------------------------------------


def test_routes_without_v1(client: httpx.Client, server: ServerProcess) -> None:
    assert client.get("/models").json() == client.get("/v1/models").json()
    bare = openai.OpenAI(base_url=server.url, api_key=KEYS[0], max_retries=0)
    answer = bare.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"


def test_responses_have_fingerprint_and_timings(client: httpx.Client) -> None:
    for path, body in ((CHAT, chat()), ("/v1/completions", {"prompt": "a", "max_tokens": 6})):
        answer = client.post(path, json=body).json()
        assert answer["system_fingerprint"].startswith("b")
        assert answer["timings"]["predicted_n"] <= 6 and "prompt_per_second" in answer["timings"]
    prints = {client.post(CHAT, json=chat()).json()["system_fingerprint"] for _ in range(2)}
    assert len(prints) == 1


def test_first_chunk_has_role_and_null_content(client: httpx.Client) -> None:
    events = events_of(client, CHAT, chat())
    first, *middle, last = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    for event in [*middle, last]:
        assert "role" not in event["choices"][0]["delta"]
        assert event["system_fingerprint"] == first["system_fingerprint"]
        assert event["id"] == first["id"]
    assert "content" not in last["choices"][0]["delta"] and last["timings"]["predicted_n"] == 6


def test_timings_per_token_or_in_last_chunk(client: httpx.Client) -> None:
    usage = {"stream_options": {"include_usage": True}}
    first, *chunks = events_of(client, CHAT, chat(timings_per_token=True, **usage))
    assert "timings" not in first
    assert chunks[-1]["choices"] == [] and chunks[-1]["timings"]["predicted_n"] == 6
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks[:-2] if "timings" in chunk]
    assert counts and counts == sorted(counts)
    plain = events_of(client, CHAT, chat())
    assert ["timings" in chunk for chunk in plain].count(True) == 1


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
     [{"role": "system", "content": "test"}, {}]],
)  # fmt: skip
def test_invalid_messages(client: httpx.Client, messages: Any) -> None:
    error_of(client.post("/chat/completions", json={"messages": messages}), 400)


def test_failed_completion_stream_ends_with_error(tmp_path: Any) -> None:
    gate = Gate(tmp_path)
    with ServerProcess(env=gate.env) as server:
        server.wait_ready()
        with server.client() as client:
            body = {"prompt": "x", "n_predict": 400, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/completion", json=body) as response:
                lines = sse_events(response)
                assert json.loads(next(lines))["stop"] is False
                gate.order("raise once")
                events = [json.loads(line) for line in lines]
            assert events[-1]["error"]["code"] == "engine_error"
            assert client.post("/completion", json={"prompt": "x", "n_predict": 2}).is_success
        server.wait_idle()


def test_metrics_with_llama_cpp_names(client: httpx.Client) -> None:
    def metrics() -> dict[str, float]:
        answer = client.get("/metrics")
        (started,) = [v for k, v in answer.headers.raw if k == b"Process-Start-Time-Unix"]
        assert int(started) > 0
        assert "# TYPE llamacpp:n_tokens_max counter" in answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("llamacpp:")]
        return {name: float(value) for name, value in (line.split(" ") for line in lines)}

    before = metrics()
    body = {"prompt": "count these tokens, please: " * 4, "n_predict": 5, "temperature": 0}
    reported = [client.post("/completion", json=body).json()["timings"] for _ in range(2)]
    after = metrics()
    for name, field in (
        ("prompt_tokens_total", "prompt_n"),
        ("prompt_tokens_cached_total", "cache_n"),
        ("tokens_predicted_total", "predicted_n"),
    ):
        expected = sum(timings[field] for timings in reported)
        assert after[f"llamacpp:{name}"] - before[f"llamacpp:{name}"] == expected > 0
    names = "prompt_seconds_total tokens_predicted_seconds_total n_decode_total n_tokens_max"
    assert all(after[f"llamacpp:{name}"] > 0 for name in names.split())
    gauges = "prompt_tokens_seconds predicted_tokens_seconds requests_processing requests_deferred"
    assert all(after[f"llamacpp:{name}"] >= 0 for name in gauges.split())


def test_timings_of_prompt_progress(client: httpx.Client) -> None:
    body = {"prompt": "progress " * 40, "n_predict": 2}
    fields = {"return_progress": True, "timings_per_token": True}
    parts = [e for e in events_of(client, "/completion", body | fields) if "prompt_progress" in e]
    first, last = parts[0]["timings"], parts[-1]["timings"]
    assert first["prompt_n"] == first["prompt_ms"] == first["predicted_n"] == 0
    progress = parts[-1]["prompt_progress"]
    assert last["prompt_n"] == progress["total"] - progress["cache"] and last["prompt_ms"] > 0
    assert last["prompt_ms"] == progress["time_ms"] and last["cache_n"] == progress["cache"]


def test_apply_template_includes_tools(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert "look_up" in client.post("/apply-template", json=body).json()["prompt"]
    error_of(client.post("/apply-template", json={**body, "tools": [{"type": 5}]}), 400)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
def test_input_tokens_of_a_chat_are_counted(client: httpx.Client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    counted = client.post(f"{path}/input_tokens", json=body)
    usage = client.post(path, json={**body, "max_tokens": 1}).json()["usage"]
    assert counted.json() == {"input_tokens": usage["prompt_tokens"]}
    assert client.post(f"{path}/input_tokens", json={"messages": "no"}).status_code == 400
