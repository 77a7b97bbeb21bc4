from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
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


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return WEATHER


def model(url: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_retries=0, **options)


def chat(url: str) -> None:
    assert model(url).invoke("Hi").content == HELLO
    assert model(url, use_responses_api=True).invoke("Hi").text == HELLO


def stream(url: str) -> None:
    assert "".join(part.text for part in model(url).stream(ASK_COUNT)) == COUNT
    parts = model(url, use_responses_api=True).stream(ASK_COUNT)
    assert "".join(part.text for part in parts) == COUNT


def tools(url: str) -> None:
    bound = model(url).bind_tools([get_weather])
    messages = [HumanMessage(ASK_WEATHER)]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": CITY})
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert bound.invoke(messages).content == WEATHER_ANSWER


def structured(url: str) -> None:
    chain = model(url).with_structured_output(Town, method="json_schema")
    assert chain.invoke(ASK_TOWN) == Town(**TOWN)


def forced(url: str) -> None:
    chain = model(url).with_structured_output(Town, method="function_calling")
    assert chain.invoke(ASK_TOWN) == Town(**TOWN)


def vectors(url: str) -> None:
    """LangChain would download OpenAI's vocabulary to count tokens unless configured otherwise."""
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    one, two = embeddings.embed_documents(["one", "two"])
    assert embeddings.embed_query("one") == one != two


run({k: globals()[k] for k in ("chat", "stream", "tools", "structured", "forced", "vectors")})
