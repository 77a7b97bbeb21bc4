from __future__ import annotations

import json
from typing import Any

from openai import NotFoundError, OpenAI
from pydantic import BaseModel
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


class Town(BaseModel):
    name: str
    population: int


TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def chat(url: str) -> None:
    api = client(url)
    first = api.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"}
    )
    assert first.output_text == HELLO and first.status == "completed"
    assert first.usage is not None and first.usage.total_tokens > first.usage.output_tokens > 0
    assert first.metadata == {"a": "b"}
    second = api.responses.create(model=MODEL, input=ASK_COUNT, previous_response_id=first.id)
    assert second.output_text == COUNT
    assert api.responses.retrieve(second.id).output_text == COUNT
    api.responses.delete(second.id)
    try:
        api.responses.retrieve(second.id)
        raise AssertionError("it is still there")
    except NotFoundError:
        pass
    short = api.responses.create(model=MODEL, input=ASK_COUNT, max_output_tokens=3, store=False)
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def stream(url: str) -> None:
    api = client(url)
    kinds, text, numbers = [], "", []
    with api.responses.stream(model=MODEL, input=ASK_COUNT) as events:
        for event in events:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = events.get_final_response()
    assert text == COUNT == final.output_text
    assert numbers == sorted(numbers)
    once = [kind for n, kind in enumerate(kinds) if kind not in kinds[:n]]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def tools(url: str) -> None:
    api = client(url)
    items: list[Any] = [{"role": "user", "content": ASK_WEATHER}]
    answer = api.responses.create(model=MODEL, input=items, tools=[TOOL])
    calls = [item for item in answer.output if item.type == "function_call"]
    assert len(calls) == 1 and json.loads(calls[0].arguments) == {"city": CITY}
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": WEATHER}
    items += [*answer.output, result]
    assert api.responses.create(model=MODEL, input=items, tools=[TOOL]).output_text == (
        WEATHER_ANSWER
    )
    follow: Any = [result]
    again = api.responses.create(
        model=MODEL, input=follow, tools=[TOOL], previous_response_id=answer.id
    )
    assert again.output_text == WEATHER_ANSWER
    with api.responses.stream(model=MODEL, input=ASK_WEATHER, tools=[TOOL]) as events:
        names = [event.type for event in events]
        final = events.get_final_response()
    assert "response.function_call_arguments.done" in names
    assert final.output[-1].type == "function_call"


def structured(url: str) -> None:
    answer = client(url).responses.parse(model=MODEL, input=ASK_TOWN, text_format=Town)
    assert answer.output_parsed == Town(**TOWN)


def reasoning(url: str) -> None:
    answer = client(url).responses.create(model=MODEL, input=ASK_THOUGHT)
    assert answer.output[0].type == "reasoning"
    assert answer.output[0].content and answer.output[0].content[0].text == THOUGHT
    assert answer.output_text == CONCLUSION


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured", "reasoning")})
