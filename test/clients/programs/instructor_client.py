from __future__ import annotations

import instructor
from openai import OpenAI
from openai_tools import Town, ask
from runner import run
from script import ASK_TOWN, KEY, MODEL, TOWN


def forced(url: str) -> None:
    extract(url, instructor.Mode.TOOLS)


def structured(url: str) -> None:
    extract(url, instructor.Mode.JSON_SCHEMA)


def extract(url: str, mode: instructor.Mode) -> None:
    api = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    client = instructor.from_openai(api, mode=mode)
    town = client.chat.completions.create(
        model=MODEL, messages=ask(ASK_TOWN), response_model=Town, max_retries=0
    )
    assert town.model_dump() == TOWN  # it is of a class made of Town


run({"structured": structured, "forced": forced})
