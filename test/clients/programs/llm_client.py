from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()

import llm
from openai_tools import Town
from runner import run
from script import (
    ASK_COUNT,
    ASK_TOWN,
    ASK_WEATHER,
    COUNT,
    HELLO,
    KEY,
    MODEL,
    TOWN,
    WEATHER,
    WEATHER_ANSWER,
)


def model(url: str) -> Any:
    """As a user of `llm` names a server: in extra-openai-models.yaml."""
    entry = {
        "model_id": "ours",
        "model_name": MODEL,
        "api_base": f"{url}/v1",
        "api_key_name": "ours",
        "supports_tools": True,
        "supports_schema": True,
    }
    folder = Path(os.environ["LLM_USER_PATH"])
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    (folder / "keys.json").write_text(json.dumps({"ours": KEY}))
    return llm.get_model("ours")


def chat(url: str) -> None:
    assert model(url).prompt("Hi", stream=False).text() == HELLO


def stream(url: str) -> None:
    assert "".join(model(url).prompt(ASK_COUNT)) == COUNT


def get_weather(city: str) -> str:
    """The weather of a city."""
    return WEATHER


def tools(url: str) -> None:
    assert model(url).chain(ASK_WEATHER, tools=[get_weather]).text().endswith(WEATHER_ANSWER)


def structured(url: str) -> None:
    answer = model(url).prompt(ASK_TOWN, schema=Town, stream=False)
    assert Town.model_validate_json(answer.text()) == Town(**TOWN)


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured")})
