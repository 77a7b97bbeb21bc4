"""A tool and a schema as OpenAI's chat has them; several clients pass them on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Town(BaseModel):
    """A town."""

    name: str
    population: int


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
