from __future__ import annotations

from typing import Any

from anthropic import Anthropic, BadRequestError
from runner import run
from script import (
    ASK_COUNT,
    ASK_THOUGHT,
    ASK_WEATHER,
    CITY,
    CONCLUSION,
    COUNT,
    HELLO,
    KEY,
    MODEL,
    THOUGHT,
    WEATHER,
    WEATHER_ANSWER,
)

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=KEY, max_retries=0)


def ask(text: Any) -> Any:
    return [{"role": "user", "content": text}]


def chat(url: str) -> None:
    api = client(url)
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    answer = api.messages.create(
        model=MODEL, max_tokens=100, messages=ask("Hi"), system=system, metadata={"user_id": "u"}
    )
    assert answer.content[0].text == HELLO and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0
    counted = api.messages.count_tokens(model=MODEL, messages=ask("Hi"), system=system)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    stopped = api.messages.create(
        model=MODEL, max_tokens=100, messages=ask(ASK_COUNT), stop_sequences=["four"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "four")
    cut = api.messages.create(model=MODEL, max_tokens=4, messages=ask(ASK_COUNT))
    assert cut.stop_reason == "max_tokens"
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    try:
        api.messages.create(model=MODEL, max_tokens=4, messages=ask([image]))
        raise AssertionError("an image was taken")
    except BadRequestError as error:
        assert "text model" in error.message


def stream(url: str) -> None:
    with client(url).messages.stream(
        model=MODEL, max_tokens=100, messages=ask(ASK_COUNT)
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == COUNT and final.content[0].text == COUNT
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0


def tools(url: str) -> None:
    api = client(url)
    messages = ask(ASK_WEATHER)
    answer = api.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": CITY})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages += [{"role": "assistant", "content": answer.content}, *ask([result])]
    answer = api.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert answer.content[0].text == WEATHER_ANSWER
    with api.messages.stream(
        model=MODEL, max_tokens=200, messages=ask(ASK_WEATHER), tools=[TOOL]
    ) as events:
        final = events.get_final_message()
    assert final.content[-1].type == "tool_use" and final.content[-1].input == {"city": CITY}


def reasoning(url: str) -> None:
    api = client(url)
    answer = api.messages.create(model=MODEL, max_tokens=200, messages=ask(ASK_THOUGHT))
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == THOUGHT and answer.content[1].text == CONCLUSION
    with api.messages.stream(
        model=MODEL,
        max_tokens=2000,
        messages=ask(ASK_THOUGHT),
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as events:
        final = events.get_final_message()
    assert final.content[0].thinking == THOUGHT and final.content[1].text == CONCLUSION


run({k: globals()[k] for k in ("chat", "stream", "tools", "reasoning")})
