"""http_api*.md, from the OpenAPI description of the application."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llaisys.common.options import options_of
from llaisys.common.sampling import FIELDS, SamplingParams
from llaisys.server.schemas.fields import HINTS, IGNORED_HEADER, REJECTED_AT_TOP, STRICT_HEADER
from reference_pages.application import application
from reference_pages.markdown import code, one_line, page, prose, table

Schema = Mapping[str, Any]
# Page -> (title, tags of its routes); the first page that needs a schema has it.
PAGES = {
    "http_api_openai.md": ("HTTP API: OpenAI", ("OpenAI",)),
    "http_api_server.md": (
        "HTTP API: Tokens, sessions, requests, vLLM",
        ("tokens", "sessions", "requests", "vLLM"),
    ),
    "http_api_embeddings.md": ("HTTP API: Embeddings, score, rerank", ("embeddings",)),
    "http_api_llamacpp.md": ("HTTP API: llama.cpp", ("llama.cpp",)),
    "http_api_lora.md": ("HTTP API: LoRA adapters", ("LoRA",)),
    "http_api_anthropic.md": ("HTTP API: Anthropic", ("Anthropic",)),
    "http_api_ollama.md": ("HTTP API: Ollama", ("Ollama",)),
}
NULL = {"type": "null"}
MAX_RANGE = 1 << 31


def http_pages() -> dict[str, str]:
    document = application().openapi()
    schemas = document["components"]["schemas"]
    routes = list(_routes(document["paths"]))
    known = {tag for _, tags in PAGES.values() for tag in tags} | {"status"}
    missing = {route["tag"] for route in routes} - known
    if missing:
        raise ValueError(f"no page for the tags {sorted(missing)}; see PAGES")
    pages, written = {}, {"HTTPValidationError", "ValidationError"}
    for name, (title, tags) in PAGES.items():
        own = [route for route in routes if route["tag"] in tags]
        parts = [_route_table(own)]
        queue = [route["schema"] for route in own if route["schema"]]
        while queue:
            schema = queue.pop(0)
            if schema not in written:
                written.add(schema)
                parts += [f"## {_short(schema)}", *_fields(schema, schemas[schema])]
                queue += _references(schemas[schema])
        pages[name] = page(title, _intro(), *parts)
    return {"http_api.md": _index(routes), **pages}


def _routes(paths: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path, methods in paths.items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            yield {
                "tag": route["tags"][0],
                "route": code(f"{method.upper()} {path}"),
                "text": one_line(route.get("description")) or f"{route['summary'].capitalize()}.",
                "schema": reference.rpartition("/")[2],
            }


def _index(routes: list[dict[str, Any]]) -> str:
    parts = [
        prose(
            "Every route needs an API key when the server has keys, but `/health` and `/live`: "
            "`Authorization: Bearer KEY` or `X-Api-Key: KEY`. Errors have the shape of the "
            "protocol. A running server describes itself at `/openapi.json`."
        )
    ]
    for name, (title, tags) in PAGES.items():
        link = f"Fields: [{name}]({name})."
        own = [route for route in routes if route["tag"] in tags]
        parts += [f"## {title.removeprefix('HTTP API: ')}", link, _route_table(own)]
    parts += ["## Status", _route_table([r for r in routes if r["tag"] == "status"])]
    rows = [
        (code(name), about.kind.limits(), about.shown_default(default), about.help)
        for name, about, default in options_of(SamplingParams)
        if name not in ("detokenize", "pooling", "second_text")
    ]
    parts += [
        "## Sampling fields",
        prose(
            "Fields of chats, completions and of llama.cpp's routes. `max_tokens`, `logprobs` and "
            "`seed` have the form of the protocol."
        ),
        table(["Field", "Values", "Default", "Description"], rows),
        "## Ignored and rejected fields",
        prose(
            f"Unknown fields are ignored and named in the response header `{IGNORED_HEADER}`. With "
            f"the option `strict_fields`, or the request header `{STRICT_HEADER}: 1`, they are a "
            "400. Known fields without effect: " + ", ".join(code(name) for name in HINTS) + "."
        ),
        prose(
            "Fields that would change the output and are not supported are a 400 unless their "
            "value is neutral: " + ", ".join(code(name) for name in REJECTED_AT_TOP) + "."
        ),
    ]
    return page("HTTP API", *parts)


def _intro() -> str:
    return "Routes of all protocols and sampling fields: [http_api.md](http_api.md)."


def _route_table(routes: list[dict[str, Any]]) -> str:
    rows = [(r["route"], _short(r["schema"]) if r["schema"] else "", r["text"]) for r in routes]
    return table(["Route", "Body", "Description"], rows)


def _fields(name: str, schema: Schema) -> list[str]:
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    has_sampling = len(properties.keys() & FIELDS.keys()) > 20
    rows = [
        (
            code(field) + (" (required)" if field in required else ""),
            type_text(value),
            one_line(value.get("description")),
        )
        for field, value in properties.items()
        if not (
            has_sampling and field in FIELDS and field not in ("logprobs", "max_tokens", "seed")
        )
    ]
    sampling = "And the [sampling fields](http_api.md#sampling-fields)." if has_sampling else ""
    return [table(["Field", "Values", "Description"], rows), sampling]


def _short(name: str) -> str:
    return name.rpartition("__")[2]


def _references(schema: Any) -> list[str]:
    """The schemas that a schema names, in order."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for value in schema.values() for name in _references(value)]
    if isinstance(schema, list):
        return [name for value in schema for name in _references(value)]
    return []


def type_text(schema: Schema) -> str:
    """The values that a schema accepts, in words."""
    if "$ref" in schema:
        return _short(schema["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = [type_text(option) for option in schema[key] if option != NULL]
            return " or ".join(dict.fromkeys(options))
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(
            str(schema["const"]).lower()
            if isinstance(schema["const"], bool)
            else str(schema["const"])
        )
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(type_text({"type": item}) for item in kind)
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}"
    names = {"boolean": "`true`, `false`", "string": "text"}
    return str(names.get(kind, kind)) + _range(schema)


def _range(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if low is None or abs(low) > MAX_RANGE:
        return ""
    least = f" above {low:g}" if "exclusiveMinimum" in schema else f" {low:g}"
    return f"{least} or more" if high is None or high >= MAX_RANGE - 1 else f"{least} to {high:g}"
