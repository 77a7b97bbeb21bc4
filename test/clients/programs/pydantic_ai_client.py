from __future__ import annotations

import asyncio
from typing import Any

from openai_tools import Town
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
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


def models(url: str) -> list[Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    return [kind(MODEL, provider=provider) for kind in (OpenAIChatModel, OpenAIResponsesModel)]


def chat(url: str) -> None:
    for model in models(url):
        assert Agent(model).run_sync("Hi").output == HELLO


def stream(url: str) -> None:
    async def read(model: Any) -> str:
        async with Agent(model).run_stream(ASK_COUNT) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    for model in models(url):
        assert asyncio.run(read(model)) == COUNT


def tools(url: str) -> None:
    for model in models(url):
        agent = Agent(model)

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """The weather of a city."""
            assert city == CITY
            return WEATHER

        assert agent.run_sync(ASK_WEATHER).output == WEATHER_ANSWER


def structured(url: str) -> None:
    for model in models(url):
        agent = Agent(model, output_type=NativeOutput(Town))
        assert agent.run_sync(ASK_TOWN).output == Town(**TOWN)


def forced(url: str) -> None:
    """Its default for objects: a tool that must be called."""
    for model in models(url):
        assert Agent(model, output_type=Town).run_sync(ASK_TOWN).output == Town(**TOWN)


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured", "forced")})
