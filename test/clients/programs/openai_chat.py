from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from openai_tools import TOOL, Town, ask
from runner import run
from script import (
    ASK_COUNT,
    ASK_THOUGHT,
    ASK_TOWN,
    ASK_WEATHER,
    CITY,
    CONCLUSION,
    COUNT,
    HELLO,
    KEY,
    MODEL,
    THOUGHT,
    TOWN,
    WEATHER,
    WEATHER_ANSWER,
)


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def chat(url: str) -> None:
    answer = client(url).chat.completions.create(model=MODEL, messages=ask("Hi"))
    assert answer.choices[0].message.content == HELLO
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def stream(url: str) -> None:
    chunks = client(url).chat.completions.create(
        model=MODEL, messages=ask(ASK_COUNT), stream=True, stream_options={"include_usage": True}
    )
    parts = list(chunks)
    text = "".join(c.choices[0].delta.content or "" for c in parts if c.choices)
    assert text == COUNT and parts[-1].usage is not None


def tools(url: str) -> None:
    api, messages = client(url), ask(ASK_WEATHER)
    answer = api.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": CITY}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    answer = api.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == WEATHER_ANSWER
    with api.chat.completions.stream(model=MODEL, messages=ask(ASK_WEATHER), tools=[TOOL]) as parts:
        parts.until_done()
        final = parts.get_final_completion().choices[0].message
    assert final.tool_calls and json.loads(final.tool_calls[0].function.arguments) == {"city": CITY}


def structured(url: str) -> None:
    answer = client(url).chat.completions.parse(
        model=MODEL, messages=ask(ASK_TOWN), response_format=Town
    )
    assert answer.choices[0].message.parsed == Town(**TOWN)


def reasoning(url: str) -> None:
    answer = client(url).chat.completions.create(model=MODEL, messages=ask(ASK_THOUGHT))
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, CONCLUSION)


def vectors(url: str) -> None:
    api = client(url)
    found = api.embeddings.create(model=MODEL, input=["one", "two", "one"], dimensions=5)
    one, two, again = [entry.embedding for entry in found.data]
    assert len(one) == 5 and one == again != two and found.usage.total_tokens > 0


SCENARIOS = ("chat", "stream", "tools", "structured", "reasoning", "vectors")
run({k: globals()[k] for k in SCENARIOS})
