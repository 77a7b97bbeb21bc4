from __future__ import annotations

from typing import Any

from ollama import Client, ResponseError
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


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return WEATHER


def client(url: str) -> Client:
    return Client(host=url, headers={"Authorization": f"Bearer {KEY}"})


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(url: str) -> None:
    api = client(url)
    options = {"temperature": 0, "num_ctx": 4096, "seed": 3, "repeat_penalty": 1.0}
    answer = api.chat(MODEL, ask("Hi"), options=options, keep_alive="5m")
    assert answer.message.content == HELLO and answer.done_reason == "stop"
    assert answer.eval_count and answer.total_duration and answer.prompt_eval_count
    assert api.generate(f"{MODEL}:latest", "Hi", system="Be kind.").response == HELLO
    assert api.generate(MODEL, ASK_COUNT, options={"num_predict": 3}).done_reason == "length"
    assert [model.model for model in api.list().models] == [MODEL]
    assert api.show(MODEL).capabilities == ["completion", "tools", "thinking"]
    assert [model.model for model in api.ps().models] == [MODEL]
    assert api.generate(MODEL).done_reason == "load"
    try:
        api.chat("nope", ask("Hi"))
        raise AssertionError("an unknown model answered")
    except ResponseError as error:
        assert error.status_code == 404 and "not served" in error.error


def stream(url: str) -> None:
    api = client(url)
    parts = list(api.chat(MODEL, ask(ASK_COUNT), stream=True))
    assert "".join(part.message.content or "" for part in parts) == COUNT
    assert parts[-1].done and not any(part.done for part in parts[:-1])
    texts = [part.response for part in api.generate(MODEL, ASK_COUNT, stream=True)]
    assert "".join(texts) == COUNT


def tools(url: str) -> None:
    api, messages = client(url), ask(ASK_WEATHER)
    answer = api.chat(MODEL, messages, tools=[get_weather])
    assert answer.message.tool_calls
    call = answer.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("get_weather", {"city": CITY})
    messages += [answer.message, {"role": "tool", "tool_name": call.name, "content": WEATHER}]
    assert api.chat(MODEL, messages, tools=[get_weather]).message.content == WEATHER_ANSWER
    parts = list(api.chat(MODEL, ask(ASK_WEATHER), tools=[get_weather], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": CITY}]


def structured(url: str) -> None:
    api = client(url)
    answer = api.chat(MODEL, ask(ASK_TOWN), format=Town.model_json_schema())
    assert Town.model_validate_json(answer.message.content or "") == Town(**TOWN)
    assert Town.model_validate_json(api.generate(MODEL, ASK_TOWN, format="json").response)


def reasoning(url: str) -> None:
    answer = client(url).chat(MODEL, ask(ASK_THOUGHT), think=True)
    assert (answer.message.thinking, answer.message.content) == (THOUGHT, CONCLUSION)


def vectors(url: str) -> None:
    api = client(url)
    one, two, again = api.embed(MODEL, ["one", "two", "one"]).embeddings
    assert one == again != two
    assert len(api.embeddings(MODEL, "one").embedding) == len(one)


SCENARIOS = ("chat", "stream", "tools", "structured", "reasoning", "vectors")
run({k: globals()[k] for k in SCENARIOS})
