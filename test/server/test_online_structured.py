"""Structured output over HTTP: every field of every API, and hostile grammars."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Ulm"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
GBNF = 'root ::= "on" | "off"'
# Each is rejected within its limits; unbounded they take minutes, gigabytes or the stack.
HOSTILE: dict[str, dict[str, Any]] = {
    "slow": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "wide": {
        "json": {
            "type": "object",
            "properties": {f"k{i}": {"type": "string"} for i in range(2500)},
        }
    },
    "exponential": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}": {"const": c}}} for c in (1, 2)]}
                for i in range(10)
            ]
        }
    },
    "deep": {"regex": "(" * 8000 + "a" + ")" * 8000},
    "nested": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
    "gbnf": {"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    "empty": {"json": {"$ref": "#"}},
    "unknown": {"json": {"type": "string", "contentEncoding": "base64", "not": {"const": "a"}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("structured") / "model"
    write_hf_model(path, tiny_config())
    options = ["--model", str(path), "--threads", "1", "--max-model-len", "512"]
    with ServerProcess(*options, real=True) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    chosen = {"max_tokens": 200, "seed": 1, "temperature": 1.0, **fields}
    return {"messages": [{"role": "user", "content": "go"}], **chosen}


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def is_right(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True,
          "schema": SCHEMA}}}, is_right),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_right),
        ({"structured_outputs": {"json": SCHEMA}}, is_right),
        ({"structured_outputs": {"choice": ["a", "b"]}}, re.compile("a|b").fullmatch),
        ({"structured_outputs": {"regex": "x{3}"}}, re.compile("xxx").fullmatch),
        ({"guided_json": SCHEMA}, is_right),
        ({"guided_json": json.dumps(SCHEMA)}, is_right),
        ({"guided_regex": "y{2}"}, re.compile("yy").fullmatch),
        ({"guided_choice": ["c", "d"]}, re.compile("c|d").fullmatch),
        ({"guided_grammar": GBNF}, re.compile("on|off").fullmatch),
        ({"grammar": GBNF}, re.compile("on|off").fullmatch),
        ({"json_schema": SCHEMA}, is_right),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_structured_output_field_is_enforced(
    client: httpx.Client, fields: Any, is_good: Any
) -> None:
    assert is_good(text_of(client.post(CHAT, json=body(**fields))))
    completion = {"prompt": "go", "max_tokens": 200, "seed": 2, **fields}
    assert is_good(text_of(client.post("/v1/completions", json=completion)))


def test_openai_client_parses_and_streams(server: ServerProcess) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    model = api.models.list().data[0].id
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "go"}], "seed": 5}
    whole = api.chat.completions.create(**asked, response_format=form, max_tokens=200)
    parts = api.chat.completions.create(**asked, response_format=form, max_tokens=200, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert is_right(text) and text == whole.choices[0].message.content


def test_strict_rejects_unsupported_schema_keywords(client: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    for strict in (True, False, None):
        definition = {"name": "a", "schema": schema, "strict": strict}
        form = {"type": "json_schema", "json_schema": definition}
        response = client.post(CHAT, json=body(response_format=form))
        assert response.status_code == (400 if strict else 200), response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema"),
        ({"guided_regex": "a" * 20_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"grammar": GBNF, "guided_regex": "a"}, "grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"grammar": "root ::= missing"}, "structured_outputs.grammar"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_invalid_structured_output_is_a_400_with_its_field(
    client: httpx.Client, fields: Any, param: str
) -> None:
    for stream in (False, True):
        response = client.post(CHAT, json=body(**fields, stream=stream))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_hostile_grammar_is_rejected_without_delaying_others(client: httpx.Client) -> None:
    """During their compilation another stream continues and /health responds."""
    plain = body(max_tokens=400, ignore_eos=True, stream=True)
    gaps: list[float] = []
    health: list[float] = []
    statuses: list[int] = []
    done = threading.Event()

    def read_stream() -> None:
        with httpx.Client(base_url=client.base_url, timeout=120) as other:
            while not done.is_set():
                with other.stream("POST", CHAT, json=plain) as response:
                    last = None
                    for line in response.iter_lines():
                        now = time.monotonic()
                        if line and last is not None:
                            gaps.append(now - last)
                        last = now if line else last
                        if done.is_set():
                            break

    def ask_health() -> None:
        with httpx.Client(base_url=client.base_url, timeout=120) as other:
            while not done.wait(0.05):
                start = time.monotonic()
                statuses.append(other.get("/health").status_code)
                health.append(time.monotonic() - start)

    threads = [threading.Thread(target=read_stream), threading.Thread(target=ask_health)]
    for thread in threads:
        thread.start()
    try:
        for name, form in HOSTILE.items():
            response = client.post(CHAT, json=body(structured_outputs=form))
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert error["param"].startswith("structured_outputs."), name
        assert text_of(client.post(CHAT, json=body(guided_choice=["still here"]))) == "still here"
    finally:
        done.set()
        for thread in threads:
            thread.join()
    # One compilation takes 2 s of CPU time. A machine may stall: a few may be late.
    assert sorted(gaps)[-5] < 1.0, sorted(gaps)[-5:]
    assert sum(seconds > 0.5 for seconds in health) <= 2 + len(health) // 20, sorted(health)[-5:]
    assert set(statuses) == {200}


def test_cancel_during_grammar_compilation_leaks_nothing(
    client: httpx.Client, server: ServerProcess
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body(structured_outputs=HOSTILE["slow"]), timeout=0.2)
    assert text_of(client.post(CHAT, json=body(guided_choice=["fine"]))) == "fine"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        metrics = client.get("/metrics").text
        if re.search(r"num_requests_waiting\{[^}]*\} 0\.0", metrics):
            return
        time.sleep(0.2)
    raise AssertionError("the request still waits")


def test_one_key_cannot_delay_the_grammars_of_another(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A flood of slow schemas by one key: the other key's schemas are compiled at once, and the
    flood ends at the queue timeout."""
    path = tmp_path_factory.mktemp("keys") / "model"
    write_hf_model(path, tiny_config())
    options = ["--model", str(path), "--threads", "1", "--max-model-len", "512"]
    options += ["--api-key", "flood", "--api-key", "quiet", "--queue-timeout", "8"]
    ended: list[tuple[int, float]] = []

    def flood(number: int) -> None:
        schema = {"type": "integer", "multipleOf": 1_000_003 + 2 * number}
        with keyed(server, "flood") as client:
            start = time.monotonic()
            response = client.post(CHAT, json=body(structured_outputs={"json": schema}))
            ended.append((response.status_code, time.monotonic() - start))

    def keyed(server: ServerProcess, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=server.url, timeout=120, headers=headers)

    with ServerProcess(*options, real=True) as server, keyed(server.wait_ready(), "quiet") as quiet:
        assert text_of(quiet.post(CHAT, json=body(guided_choice=["first"]))) == "first"
        threads = [threading.Thread(target=flood, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        waiting = "num_requests_waiting"
        server.wait_for(lambda: server.metric(waiting, "quiet") >= 16, "the flood")
        compiled = []  # schemas of the flood that were compiled during each quiet request
        for number in range(4):
            before = sum(status == 400 for status, _ in ended)
            text = f"quick {number}"
            assert text_of(quiet.post(CHAT, json=body(guided_choice=[text]))) == text
            compiled.append(sum(status == 400 for status, _ in ended) - before)
        for thread in threads:
            thread.join()
    assert max(compiled) <= 8, compiled  # of 16 that came before; the next ones go on meanwhile
    statuses = {status for status, _ in ended}
    assert 503 in statuses and statuses <= {400, 503}  # 400: how many depends on the machine
    assert max(seconds for status, seconds in ended if status == 503) < 100
