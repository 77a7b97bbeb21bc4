from __future__ import annotations

import json
from typing import Any

import litellm
from openai_tools import TOOL, Town, ask
from runner import run
from script import ASK_COUNT, ASK_TOWN, ASK_WEATHER, CITY, COUNT, HELLO, KEY, MODEL, TOWN


def options(url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}


def chat(url: str) -> None:
    answer = litellm.completion(messages=ask("Hi"), **options(url))
    assert answer.choices[0].message.content == HELLO
    through = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": KEY}
    answer = litellm.completion(messages=ask("Hi"), max_tokens=100, **through)
    assert answer.choices[0].message.content == HELLO
    through = {"model": f"ollama_chat/{MODEL}", "api_base": url, "api_key": KEY}
    assert litellm.completion(messages=ask("Hi"), **through).choices[0].message.content == HELLO


def stream(url: str) -> None:
    parts = litellm.completion(messages=ask(ASK_COUNT), stream=True, **options(url))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == COUNT


def tools(url: str) -> None:
    answer = litellm.completion(messages=ask(ASK_WEATHER), tools=[TOOL], **options(url))
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": CITY}


def structured(url: str) -> None:
    answer = litellm.completion(messages=ask(ASK_TOWN), response_format=Town, **options(url))
    assert Town.model_validate_json(answer.choices[0].message.content) == Town(**TOWN)


def vectors(url: str) -> None:
    found = litellm.embedding(input=["one", "two"], encoding_format="float", **options(url))
    assert len(found.data) == 2 and found.data[0]["embedding"] != found.data[1]["embedding"]


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured", "vectors")})
