"""Bodies in the shape of programs that are too large to install here: Open WebUI, Cline, Continue,
curl as in Ollama's manual. They are written by hand after those programs' ways, not captured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from script import (
    ASK_COUNT,
    ASK_WEATHER,
    CITY,
    COUNT,
    HELLO,
    KEY,
    MODEL,
    WEATHER,
    WEATHER_ANSWER,
)
from scripted_server import scripted_server
from server_helpers import ServerProcess
from wire_helpers import sse_events


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("shapes"), "--api-key", KEY) as process:
        yield process


def streamed_text(client: httpx.Client, body: dict[str, Any]) -> str:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        *events, done = list(sse_events(response))
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_open_webui(client: httpx.Client) -> None:
    """A chat with its OpenAI connection, then its title request."""
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "user", "content": ASK_COUNT}],
        "stream_options": {"include_usage": True},
        "tools": [],
        "metadata": {"chat_id": "c", "message_id": "m", "session_id": "s"},
        "features": {"web_search": False},
        "background_tasks": {"title_generation": True},
        "model_item": {"id": MODEL, "object": "model"},
        "chat_id": "c",
    }
    assert streamed_text(client, body) == COUNT
    title = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "A title?"}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    answer = client.post("/v1/chat/completions", json=title).json()
    assert answer["choices"][0]["message"]["content"] == HELLO


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_open_webui_with_tools(client: httpx.Client) -> None:
    """Calls are assembled from deltas by index; the result is sent with the whole history."""
    body: dict[str, Any] = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "user", "content": ASK_WEATHER}],
        "tools": [WEATHER_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        *events, _ = list(sse_events(response))
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    pieces = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    assert {piece["index"] for piece in pieces} == {0} and pieces[0]["function"]["name"]
    arguments = "".join(piece["function"].get("arguments") or "" for piece in pieces)
    assert json.loads(arguments) == {"city": CITY}
    assert choices[-1]["finish_reason"] == "tool_calls"
    function = {"name": "get_weather", "arguments": arguments}
    called = {"id": pieces[0]["id"], "type": "function", "function": function, "index": 0}
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": called["id"], "content": WEATHER},
    ]
    assert streamed_text(client, body) == WEATHER_ANSWER


def test_open_webui_with_ollama_api(client: httpx.Client) -> None:
    assert client.get("/api/version").json()["version"]
    (model,) = client.get("/api/tags").json()["models"]
    assert model["model"] == MODEL and model["digest"] and model["details"]["family"]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": ASK_COUNT}],
        "options": {"num_ctx": 8192, "temperature": 0.7, "top_k": 40, "stop": []},
        "stream": True,
        "keep_alive": "5m",
    }
    with client.stream("POST", "/api/chat", json=body) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in response.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines) == COUNT
    assert lines[-1]["done"] and lines[-1]["eval_duration"] > 0


def test_cline(client: httpx.Client) -> None:
    """Its OpenAI-compatible provider: text parts, a temperature of 0, usage in the stream."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [{"type": "text", "text": "<task>"},
                                         {"type": "text", "text": ASK_COUNT}]},
        ],
        "temperature": 0,
        "max_tokens": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [WEATHER_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }  # fmt: skip
    assert streamed_text(client, body) == COUNT


def test_cline_with_anthropic_api(client: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 8192,
        "temperature": 0,
        "system": [{"text": "You are Cline.", "type": "text", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": ASK_COUNT, **cached}]}],
        "stream": True,
    }
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    with client.stream("POST", "/v1/messages", json=body, headers=headers) as response:
        events = [json.loads(event) for event in sse_events(response)]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == COUNT


def test_continue(client: httpx.Client) -> None:
    """Chat and tab completion."""
    body = {
        "messages": [{"role": "user", "content": ASK_COUNT}],
        "model": MODEL,
        "max_tokens": 4096,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert streamed_text(client, body) == COUNT
    body = {"model": MODEL, "prompt": "def add(", "max_tokens": 8, "temperature": 0.01,
            "stop": ["\n\n", "/src/"], "stream": True}  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200 and list(sse_events(response))[-1] == "[DONE]"


def test_curl_example_of_the_ollama_manual(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": MODEL, "prompt": "Why is the sky blue?", "stream": False})
    answer = client.post("/api/generate", content=body, headers=form)
    assert answer.json()["response"] == HELLO
    assert client.head("/").status_code == 200
