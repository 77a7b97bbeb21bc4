"""Every route with every list, object and count that it accepts at its maximum: the CPU time of the
event-loop thread per iteration stays under 50 ms. Routes and fields are read from the application:
a new route fails until it is in the table.

    pytest -q -s test/attack/test_event_loop_table.py

prints the longest iteration of every route.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engine_fakes
import httpx
import pytest
from engine_fakes import FakeTokenizer
from fastapi.routing import APIRoute
from loop_meter import MAX_SECONDS, MeteredLoop, application_of, run_metered, server_client
from nightly import NIGHTLY
from server_helpers import PACKAGE

from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.server.config import ServerConfig
from llaisys.server.http.middleware import ANONYMOUS

MAX_COLLECTION = 0.2  # of a garbage collection in another thread
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
MANY = 4096  # messages
LONG_RESPONSE = f"resp_{0:032x}"
MANY_TURNS = 40_000  # messages of a stored conversation

# ---- the table: (method, path) -> the smallest valid body; None: no body -------------------------

CHAT = {"messages": MESSAGES, "max_tokens": 2}
PROMPT = {"prompt": "hi", "max_tokens": 2}
RERANK = {"query": "a", "documents": ["b"]}
ROUTES: dict[tuple[str, str], dict[str, Any] | None] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/chat/completions/input_tokens"): CHAT,
    ("POST", "/v1/chat/completions/batch"): {**CHAT, "messages": [MESSAGES]},
    ("POST", "/v1/completions"): PROMPT,
    ("POST", "/invocations"): None,  # forwards to other routes
    ("GET", "/ping"): None,
    ("POST", "/ping"): None,
    ("GET", "/load"): None,
    ("POST", "/tokenize"): {"prompt": "hi"},
    ("POST", "/detokenize"): {"tokens": [97]},
    ("POST", "/v1/embeddings"): {"input": "a"},
    ("POST", "/v1/score"): {"text_1": "a", "text_2": "b"},
    ("POST", "/score"): {"text_1": "a", "text_2": "b"},
    ("POST", "/v1/rerank"): RERANK,
    ("POST", "/v2/rerank"): RERANK,
    ("POST", "/rerank"): RERANK,
    ("POST", "/v1/reranking"): RERANK,
    ("POST", "/reranking"): RERANK,
    ("POST", "/chat/completions"): CHAT,
    ("POST", "/chat/completions/input_tokens"): CHAT,
    ("POST", "/completion"): PROMPT,
    ("POST", "/completions"): PROMPT,
    ("POST", "/infill"): {"input_prefix": "a", "input_suffix": "b", "max_tokens": 2},
    ("POST", "/apply-template"): {"messages": MESSAGES},
    ("POST", "/embeddings"): {"input": "a"},
    ("POST", "/embedding"): {"content": "a"},
    ("POST", "/responses"): {"input": "hi", "max_output_tokens": 2},
    ("POST", "/v1/responses"): {"input": "hi", "max_output_tokens": 2},
    ("POST", "/v1/responses/input_tokens"): {"input": "hi"},
    ("POST", "/v1/messages"): CHAT,
    ("POST", "/v1/messages/count_tokens"): {"messages": MESSAGES},
    ("POST", "/api/chat"): {"model": "mock", "messages": MESSAGES},
    ("POST", "/api/generate"): {"model": "mock", "prompt": "hi"},
    ("POST", "/api/embed"): {"model": "mock", "input": "a"},
    ("POST", "/api/embeddings"): {"model": "mock", "prompt": "a"},
    ("POST", "/api/show"): {"model": "mock"},
    ("POST", "/api/pull"): {"model": "mock"},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "a", "lora_path": "a"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "a"},
    ("POST", "/v1/sessions"): {"messages": MESSAGES},
    ("PUT", "/v1/sessions/{session_id}"): {"messages": MESSAGES},
    ("PATCH", "/v1/sessions/{session_id}"): {"title": "t"},
    ("POST", "/v1/requests/{request_id}/cancel"): None,
    ("GET", "/v1/models"): None,
    ("GET", "/models"): None,
    ("GET", "/v1/models/{model:path}"): None,
    ("GET", "/props"): None,
    ("GET", "/slots"): None,
    ("GET", "/tokenizer_info"): None,
    ("GET", "/v1/responses/{response_id}"): None,
    ("GET", "/v1/responses/{response_id}/input_items"): None,
    ("POST", "/v1/responses/{response_id}/cancel"): None,
    ("DELETE", "/v1/responses/{response_id}"): None,
    ("POST", "/slots/{number}"): None,
    ("GET", "/lora-adapters"): None,
    ("POST", "/lora-adapters"): None,  # its body is a list, see read_routes
    ("GET", "/api/tags"): None,
    ("GET", "/api/ps"): None,
    ("GET", "/api/version"): None,
    ("GET", "/v1/sessions"): None,
    ("GET", "/v1/sessions/{session_id}"): None,
    ("DELETE", "/v1/sessions/{session_id}"): None,
    ("GET", "/health"): None,
    ("GET", "/live"): None,
    ("GET", "/ready"): None,
    ("GET", "/version"): None,
    ("GET", "/metrics"): None,
}

# ---- values --------------------------------------------------------------------------------------

# The most of each kind that a body may have (http/bodies.py).
LISTS: dict[str, Any] = {
    "numbers": [97] * 130_000,
    "strings": ["x"] * 130_000,
    "lists": [[97]] * 16_000,
    "objects": [{"type": "text", "text": "x"}] * 16_000,
}
OBJECTS: dict[str, Any] = {
    "fields": {f"f{n}": 1 for n in range(60_000)},
    "nested": {"a": [[[[]]]] * 3_900},
}


def tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"name": f"f{number}", "description": "d" * 40, "parameters": parameters}
    return {"type": "function", "function": function}


SCHEMA = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4_000)}}
# Field -> values that are valid in one of the protocols, at the limits.
VALUES: dict[str, list[Any]] = {
    "messages": [
        MESSAGES * MANY,
        MESSAGES * 16_000,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8_000}],
        [{"role": "user", "content": "😀" * 200_000}],
    ],
    "tools": [
        [tool(n) for n in range(128)],
        [tool(n) for n in range(3_000)],
        [{"name": f"f{n}", "input_schema": {"type": "object"}} for n in range(3_000)],
        [{"type": "function", "name": f"f{n}", "parameters": {}} for n in range(3_000)],
    ],
    "prompt": [["hi"] * 64, [[97, 98]] * 64, [97] * 1900, "hi " * 400_000],
    "input": [
        MESSAGES * MANY,
        [{"type": "item_reference", "id": f"msg_{n:032x}_0"} for n in range(MANY)],
        ["hi"] * 2048,
        [[97, 98]] * 2048,
        [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"}
         for n in range(MANY)],
    ],
    "stop": [[f"{n:0>60}" for n in range(16)], [f"{n:0>1000}" for n in range(64)]],
    "stop_sequences": [[f"{n:0>60}" for n in range(64)]],
    "stop_token_ids": [list(range(250))],
    "bad_words": [[f"w{n}" for n in range(256)]],
    "allowed_token_ids": [list(range(256))],
    "logit_bias": [{str(n): 1 for n in range(256)}, {str(n): 1 for n in range(60_000)}],
    "logprob_token_ids": [list(range(128))],
    "kv_transfer_params": [{"prompt_token_ids": [97] * n} for n in (1900, 130_000)],
    "metadata": [{f"k{n}": "v" * 500 for n in range(16)}],
    "documents": [["x"] * 1000, ["x" * 1000] * 1000],
    "texts": [["x"] * 1000],
    "text_2": [["x"] * 1000],
    "tokens": [[97] * 130_000],
    "context": [[97] * 1900],
    "input_extra": [[{"text": "x", "filename": f"f{n}"} for n in range(4_000)]],
    "chat_template_kwargs": [{"x": [1] * 120_000}, {f"f{n}": 1 for n in range(10_000)}],
    "structured_outputs": [{"json": SCHEMA}, {"choice": [f"c{n}" for n in range(1024)]}],
    "guided_json": [SCHEMA],
    "guided_choice": [[f"c{n}" for n in range(1024)]],
    "json_schema": [SCHEMA],
    "format": [SCHEMA],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}],
    "system": [[{"type": "text", "text": "x"}] * 8_000],
    "options": [{"stop": [f"s{n}" for n in range(64)], "num_predict": 2}],
}  # fmt: skip
# Counts at their maximum, with the logprobs that multiply them.
COUNTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"n": 128, "logprobs": True, "top_logprobs": 20},
                             {"n": 128, "logprobs": True, "top_logprobs": 20, "stream": True}],
    "/v1/chat/completions/batch": [{"messages": [MESSAGES * n] * 64} for n in (1, 60)],
    "/v1/completions": [{"n": 128, "logprobs": 20}, {"n": 128, "logprobs": 20, "stream": True},
                        {"prompt": "hi" * 900, "prompt_logprobs": 20, "max_tokens": 1}],
    "/completion": [{"n": 128, "n_probs": 20}, {"n": 128, "n_probs": 20, "stream": True}],
    "/infill": [{"n": 128, "n_probs": 20}],
    "/v1/embeddings": [{"input": ["hi"] * 1024, "encoding_format": "base64"}],
    "/v1/rerank": [{"documents": ["x"] * 512, "top_n": 512}],
    "/v1/messages": [{"max_tokens": 1500}, {"max_tokens": 1500, "stream": True}],
    "/v1/responses": [{"max_output_tokens": 1500}],
    "/api/chat": [{"options": {"num_predict": 1500}}],
}  # fmt: skip


def config() -> ServerConfig:
    return ServerConfig(
        engine=EngineConfig(
            model="mock",
            tokenizer=FakeTokenizer(),
            scheduler=SchedulerConfig(128, 2048, min_prefill_chunk=4),
            cache=CacheConfig(block_size=4, num_kv_blocks=8192),
            warmup=False,
        ),
        serve_webui=False,
        engine_module="fault_engine",
    )


def routes_of(client: httpx.AsyncClient) -> dict[tuple[str, str], APIRoute]:
    app = application_of(client)
    included = [getattr(route, "original_router", None) for route in app.routes]
    routes = [*app.routes, *(route for router in included if router for route in router.routes)]
    return {
        (method, route.path): route
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }


def container_fields(route: APIRoute) -> dict[str, set[str]]:
    """Field -> `array` and `object`, as the field accepts them."""
    if route.body_field is None:
        return {}
    schema = route.body_field.field_info.annotation.model_json_schema(by_alias=True)

    def kinds(part: dict[str, Any]) -> Iterator[str]:
        alternatives = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
        for inner in alternatives:
            yield from kinds(inner)
        if "$ref" in part:
            yield "object"
        elif isinstance(part.get("type"), str):
            yield part["type"]
        elif not alternatives and "const" not in part and "enum" not in part:
            yield from ("array", "object")  # anything

    found = {name: set(kinds(part)) for name, part in schema["properties"].items()}
    return {name: accepted & {"array", "object"} for name, accepted in found.items()}


def declaring_class(schema: Any, field: str) -> type:
    """The class in which a field is written: its validation is the same in all subclasses."""
    own = [kind for kind in schema.__mro__ if field in getattr(kind, "__annotations__", {})]
    return own[-1] if own else schema


def bodies_of(
    route: APIRoute, base: dict[str, Any], seen: set[Any], measured: set[Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, body) of every attack on a route; invalid lists once per declaration of a field.
    Outside of the nightly run: all values of a field for the first route that has its declaration,
    one in turn for the others, and one of each kind of invalid list in turn."""
    for field, accepted in container_fields(route).items():
        declaration = declaring_class(route.body_field.field_info.annotation, field), field
        valid = VALUES.get(field, [])
        everything = NIGHTLY or declaration not in seen
        for number, value in enumerate(valid):
            if everything or number == len(measured) % len(valid):
                yield f"{field}#{number}", {**base, field: value}
        if declaration in seen:
            continue
        seen.add(declaration)
        for kind, values in (("array", LISTS), ("object", OBJECTS)):
            names = list(values) if NIGHTLY else [list(values)[len(seen) % len(values)]]
            for name in names if kind in accepted else ():
                yield f"{field}: {name}", {**base, field: values[name]}
    for number, counts in enumerate(COUNTS.get(route.path, ())):
        yield f"counts#{number}", {**base, **counts}


@pytest.fixture(autouse=True)
def engine_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(engine_fakes.__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(root)]))


def test_every_route_is_in_the_table() -> None:
    async def run(loop: MeteredLoop) -> None:
        async with server_client(config()) as client:
            assert set(routes_of(client)) == set(ROUTES)

    run_metered(run)


def test_no_list_of_any_route_blocks_the_event_loop() -> None:
    slow: list[str] = []

    async def run(loop: MeteredLoop) -> None:
        async with server_client(config()) as client:
            measured, seen = set(), set()
            for (method, path), route in routes_of(client).items():
                base = ROUTES[method, path]
                if base is None or route.endpoint in measured:  # another name of the same route
                    continue
                measured.add(route.endpoint)
                address = path.replace("{session_id}", "s")
                warm = await client.request(method, address, json=base)
                assert warm.status_code < 500, (path, warm.text)
                longest, count, statuses = (0.0, ""), 0, set()
                for name, body in bodies_of(route, base, seen, measured):
                    content = json.dumps(body, ensure_ascii=False).encode()
                    send = partial(client.request, method, address, content=content, headers=JSON)
                    response, seconds = await loop.measure(send)
                    assert response.status_code < 500, (path, name, response.text[:300])
                    for _ in range(2):  # another process slows a core down, but not each time
                        if seconds > MAX_SECONDS:
                            seconds = min(seconds, (await loop.measure(send))[1])
                    longest, count = max(longest, (seconds, name)), count + 1
                    statuses.add(response.status_code)
                    assert loop.longest_collection < MAX_COLLECTION, (path, name)
                    if seconds > MAX_SECONDS:
                        slow.append(f"{method} {path} {name}: {1000 * seconds:.0f} ms")
                print(f"{path:<34}{count:>5}{1000 * longest[0]:>8.1f} ms  {longest[1]} {statuses}")
            await read_routes(loop, client, slow)

    run_metered(run)
    assert not slow, "\n".join(slow)


async def continue_long_conversations(
    loop: MeteredLoop, client: httpx.AsyncClient, slow: list[str]
) -> None:
    """A session and a stored response grow by turns, without a limit: the next turn of each."""
    service = application_of(client).state.models.first
    many = MESSAGES * MANY_TURNS
    await service.sessions.create(ANONYMOUS, "many", messages=many)
    output = {"type": "message", "role": "assistant", "content": [{"text": "x" * 6_000}]}
    response = {"id": LONG_RESPONSE, "output": [output | {"id": "msg_many_0"}]}
    await service.responses.store(ANONYMOUS, response, None, [*many, *MESSAGES], "mock")
    turns: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT | {"session_id": "many"},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2,
                          "previous_response_id": LONG_RESPONSE},
    }  # fmt: skip
    for path, body in turns.items():
        response, seconds = await loop.measure(partial(client.post, path, json=body))
        assert response.status_code == 200, (path, response.text[:300])
        print(f"{path + ', the next of many turns':<45}{1000 * seconds:>8.1f} ms")
        if seconds > MAX_SECONDS:
            slow.append(f"{path} with {MANY_TURNS} turns: {1000 * seconds:.0f} ms")


async def read_routes(loop: MeteredLoop, client: httpx.AsyncClient, slow: list[str]) -> None:
    """Routes without a body, on a full store."""
    assert (await client.delete("/v1/sessions/s")).status_code == 200
    existing = (await client.get("/v1/sessions")).json()["data"]
    for session in existing:
        await client.delete(f"/v1/sessions/{session['id']}")
    store = application_of(client).state.models.first.sessions
    for number in range(900):
        await store.create(ANONYMOUS, f"n{number}", messages=MESSAGES)
    large = {"session_id": "large", "messages": [{"role": "user", "content": "x" * 500}] * MANY}
    assert (await client.post("/v1/sessions", json=large)).status_code == 201
    await continue_long_conversations(loop, client, slow)
    names = {"{session_id}": "many", "{response_id}": LONG_RESPONSE, "{model:path}": "mock",
             "{request_id}": "none", "{number}": "1"}  # fmt: skip
    for (method, path), base in sorted(ROUTES.items(), reverse=True):  # GET before DELETE
        if base is not None:
            continue
        address = path
        for name, value in names.items():
            address = address.replace(name, value)
        scales = [{"id": number, "scale": 0} for number in range(16_000)]
        content = json.dumps(scales).encode() if path == "/lora-adapters" else None
        headers = JSON if content else None
        send = partial(client.request, method, address, content=content, headers=headers)
        response, seconds = await loop.measure(send)
        assert response.status_code in (200, 400, 404, 501), (path, response.text[:300])
        print(f"{method + ' ' + path:<39}{1000 * seconds:>8.1f} ms  {response.status_code}")
        if seconds > MAX_SECONDS:
            slow.append(f"{method} {path}: {1000 * seconds:.0f} ms")
