"""What the model of `scripted_server` says. Imports nothing: clients read it with interpreters of
their own."""

from __future__ import annotations

MODEL = "scripted"
KEY = "sk-clients"
CONTEXT = 1 << 18  # agents send 100,000 characters, each a token or more
SCRIPT = "LLAISYS_TEST_SCRIPT"  # in the environment: the file of the rules

HELLO = "Hello from the script."
COUNT = "one two three four five six seven eight nine ten"
CITY = "Paris"
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = "sunny, 21 degrees"  # what the tool says
WEATHER_ANSWER = "It is sunny in Paris."
TOWN = {"name": "Paris", "population": 2100000}
TOWN_JSON = '{"name":"Paris","population":2100000}'
TOWN_CALL = (
    '<tool_call>\n{"name": "TOOL", "arguments": {"name": "Paris", "population": 2100000}}\n'
    "</tool_call>"
)
THOUGHT = "The user wants a thought."
CONCLUSION = "Forty-two."

ASK_COUNT = "Please count."
ASK_WEATHER = "What is the weather in Paris?"
ASK_TOWN = "TOWN: which one, and how large?"
ASK_THOUGHT = "Please think about it."

# The first rule whose words all stand in the prompt. "{tool}": the name of the first tool there.
RULES = [
    {"when": ["<tool_response>", "sunny"], "say": WEATHER_ANSWER},
    {"when": [ASK_WEATHER, "get_weather"], "say": WEATHER_CALL},
    {"when": [ASK_TOWN, "<tools>"], "say": TOWN_CALL},
    {"when": [ASK_TOWN], "say": TOWN_JSON},
    {"when": [ASK_THOUGHT], "say": f"<think>\n{THOUGHT}\n</think>\n\n{CONCLUSION}"},
    {"when": [ASK_COUNT], "say": COUNT},
]
