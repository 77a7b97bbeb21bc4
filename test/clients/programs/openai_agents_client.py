from __future__ import annotations

import asyncio

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai_tools import Town
from runner import run
from script import (
    ASK_COUNT,
    ASK_TOWN,
    ASK_WEATHER,
    CITY,
    COUNT,
    HELLO,
    KEY,
    MODEL,
    TOWN,
    WEATHER,
    WEATHER_ANSWER,
)

set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == CITY
    return WEATHER


def agent(url: str, **options: object) -> Agent:
    api = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    model = OpenAIResponsesModel(MODEL, openai_client=api)
    return Agent(name="helper", instructions="Be kind.", model=model, **options)


def chat(url: str) -> None:
    assert asyncio.run(Runner.run(agent(url), "Hi")).final_output == HELLO


def stream(url: str) -> None:
    async def read() -> tuple[str, str]:
        result, text = Runner.run_streamed(agent(url), ASK_COUNT), ""
        async for event in result.stream_events():
            data = event.data if event.type == "raw_response_event" else None
            if data is not None and data.type == "response.output_text.delta":
                text += data.delta
        return text, result.final_output

    assert asyncio.run(read()) == (COUNT, COUNT)


def tools(url: str) -> None:
    helper = agent(url, tools=[get_weather])
    assert asyncio.run(Runner.run(helper, ASK_WEATHER)).final_output == WEATHER_ANSWER


def structured(url: str) -> None:
    town = asyncio.run(Runner.run(agent(url, output_type=Town), ASK_TOWN)).final_output
    assert town == Town(**TOWN)


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured")})
