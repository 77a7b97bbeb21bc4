from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai_tools import Town
from runner import run
from script import ASK_COUNT, ASK_TOWN, ASK_WEATHER, CITY, COUNT, HELLO, KEY, MODEL, TOWN, WEATHER


def model(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_retries=0,
    )


def chat(url: str) -> None:
    assert model(url).chat([ChatMessage(role="user", content="Hi")]).message.content == HELLO


def stream(url: str) -> None:
    parts = model(url).stream_chat([ChatMessage(role="user", content=ASK_COUNT)])
    assert "".join(part.delta or "" for part in parts) == COUNT


def get_weather(city: str) -> str:
    """The weather of a city."""
    return WEATHER


def tools(url: str) -> None:
    llm, tool = model(url), FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=ASK_WEATHER)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": CITY})


def forced(url: str) -> None:
    assert model(url).as_structured_llm(Town).complete(ASK_TOWN).raw == Town(**TOWN)


run({k: globals()[k] for k in ("chat", "stream", "tools", "forced")})
