"""Translation of Anthropic's and Ollama's bodies to a chat, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from llaisys.chat.reader import AnswerReader
from llaisys.common.types import CompletionOutput, StreamOutput, Usage
from llaisys.server.anthropic.formatter import AnthropicFormatter
from llaisys.server.anthropic.schemas import MessagesRequest
from llaisys.server.ollama.schemas import ChatRequest, GenerateRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def anthropic(**fields: Any) -> dict[str, Any]:
    return MessagesRequest.model_validate({"messages": MESSAGES, **fields}).to_chat()


def ollama(**fields: Any) -> dict[str, Any]:
    return ChatRequest.model_validate({"model": "m", "messages": MESSAGES, **fields}).to_chat()


def refusal(kind: Any, **fields: Any) -> str:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(fields)
    return str(error.value)


# ---- Anthropic -----------------------------------------------------------------------------------


def test_anthropic_sampling_fields_map_to_openai() -> None:
    chat = anthropic(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["a", ""], stream=True,
        metadata={"user_id": "u"}, system=[{"type": "text", "text": "s"}], service_tier="auto",
    )  # fmt: skip
    assert chat["max_tokens"] == 9 and chat["stop"] == ["a"] and chat["user"] == "u"
    assert (chat["temperature"], chat["top_k"], chat["top_p"]) == (0.5, 3, 0.9)
    assert chat["messages"] == [{"role": "system", "content": "s"}, *MESSAGES]
    assert "continue_final_message" not in chat


def test_assistant_prefill_is_continued() -> None:
    chat = anthropic(messages=[*MESSAGES, {"role": "assistant", "content": "Well,"}])
    assert chat["continue_final_message"] is True


def test_message_content_is_text_or_blocks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert anthropic(messages=[{"role": "user", "content": parts}])["messages"] == [
        {"role": "user", "content": "a\nb"}
    ]
    for kind in ("image", "document"):
        body = [{"role": "user", "content": [{"type": kind, "source": {"data": "x"}}]}]
        text = refusal(MessagesRequest, messages=body)
        assert "messages[0].content[0]" in text and "text model" in text


def test_anthropic_stream_opens_and_closes_blocks() -> None:
    formatter = AnthropicFormatter(AnswerReader(), "m", 7, "r")
    output = CompletionOutput(0, "hello", finish_reason="stop", stop_reason="END")
    first = StreamOutput("r", 0, "hel", [1], None, None, None, None)
    last = StreamOutput("r", 0, "lo", [2], "stop", None, "END", whole(output))
    events = [json.loads(event.split(b"data: ")[1]) for part in (first, last)
              for event in formatter.format_delta(0, part)]  # fmt: skip
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert events[-2]["usage"]["cache_read_input_tokens"] == 2


def whole(output: CompletionOutput) -> Any:
    from llaisys.common.types import RequestOutput

    return RequestOutput("r", None, [1] * 7, [output], Usage(7, 2, 2))


def test_empty_answer_has_a_block() -> None:
    formatter = AnthropicFormatter(AnswerReader(), "m", 7, "r")
    end = StreamOutput("r", 0, "", [], "stop", None, None, whole(CompletionOutput(0)))
    kinds = [event.split(b"\n")[0] for event in formatter.format_delta(0, end)]
    assert b"event: content_block_start" in kinds and b"event: content_block_stop" in kinds


# ---- Ollama --------------------------------------------------------------------------------------


def test_ollama_options_are_mapped_ignored_or_rejected() -> None:
    options = {
        "num_predict": 5, "temperature": 0, "repeat_penalty": 1.1, "seed": 3, "stop": "x",
        "num_ctx": 4096, "num_gpu": 99, "mirostat": 0, "top_k": None,
    }  # fmt: skip
    chat = ollama(options=options)
    assert chat["max_tokens"] == 5 and chat["repetition_penalty"] == 1.1
    assert (chat["seed"], chat["stop"], chat["temperature"]) == (3, ["x"], 0)
    assert not {"num_ctx", "num_gpu", "top_k"} & set(chat) and chat["mirostat"] == 0
    for unlimited in (-1, -2):
        assert "max_tokens" not in ollama(options={"num_predict": unlimited})
    names = {"repeat_last_n": 64, "mirostat": 2, "mirostat_tau": 3}
    assert ollama(options=names).items() >= names.items()
    assert set(ollama(options={"nonsense": 1})) == set(ollama())


def test_ollama_streams_by_default() -> None:
    assert ollama()["stream"] is True and ollama(stream=False)["stream"] is False
    assert ollama(model="m:latest")["model"] == "m" and ollama(model="m:8b")["model"] == "m:8b"


def test_ollama_generate_prompt_becomes_a_message() -> None:
    body = GenerateRequest.model_validate({"model": "m", "prompt": "p", "system": "s"})
    assert body.to_chat()["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "p"},
    ]
    for fields in ({"images": ["x"]}, {"template": "x"}):
        assert next(iter(fields)) in refusal(GenerateRequest, model="m", prompt="p", **fields)
