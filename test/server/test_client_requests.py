"""Requests as real clients send them: answered, with the fields that are ignored named, and refused
in strict mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from field_helpers import (
    CHAT,
    COMPLETIONS,
    FUNCTION,
    HI,
    MESSAGES,
    READ_FILE,
    RESPONSES,
    STRICT,
    names,
)
from server_helpers import ServerProcess

EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--no-ui", "--served-model-name", "fake") as process:
        yield process.wait_ready()


@dataclass(frozen=True)
class Shape:
    """A request of a client, and the fields of it that have no effect here."""

    path: str
    body: dict[str, Any]
    ignored: set[str] = field(default_factory=set)


SHAPES = {
    "Codex CLI": Shape(
        RESPONSES,
        {
            "model": "fake",
            "instructions": "You are Codex.",
            "input": [
                {
                    "type": "message", "role": "developer",
                    "content": [{"type": "input_text", "text": "<permissions>"}],
                    "internal_metadata": {"turn": 1},
                },
                {
                    "type": "message", "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                },
            ],
            "tools": [
                {"type": "function", **READ_FILE, "strict": False, "output_schema": None},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
                {
                    "type": "namespace", "name": "mcp__docs__", "description": "Docs.",
                    "tools": [{"type": "function", **READ_FILE}],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto", "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False, "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198-thread",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "0198"},
            "max_output_tokens": 4,
        },
        {
            *("client_metadata", "input[].internal_metadata", "reasoning.effort"),
            *("tools[].output_schema", "tools[1].type=custom", "tools[2].type=namespace"),
            "tools[3].type=web_search",
        },
    ),
    "Claude Code": Shape(
        f"{MESSAGES}?beta=true",
        {
            "model": "fake", "max_tokens": 1000, "stream": True,
            "system": [{"type": "text", "text": "You are Claude.", "cache_control": EPHEMERAL}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}],
                }
            ],
            "tools": [
                {"name": "Read", "description": "Read.", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                {"type": "computer_20250124", "name": "computer", "display_width_px": 1024},
            ],
            "metadata": {"user_id": "user_1", "session": "s"},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "betas": ["x"],
        },
        {
            *("context_management", "betas", "metadata.session", "thinking.budget_tokens"),
            *("output_config.effort", "tools[1].type=web_search_20250305"),
            "tools[2].type=computer_20250124",
        },
    ),
    "guidance": Shape(
        CHAT,
        {
            "model": "fake", "messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 5,
            "guided_decoding_backend": "guidance",
        },
        {"guided_decoding_backend"},
    ),
    "Continue": Shape(
        CHAT,
        {
            "model": "fake", "messages": HI, "max_tokens": 4, "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning": None, "prediction": None, "top_k": None,
        },
    ),
    "LibreChat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 4, "user": "66b1", "stream": True, "streaming": True,
            "promptPrefix": None, "modelLabel": "Nova", "resendFiles": True, "imageDetail": "auto",
            "include_reasoning": True,
        },
        {"streaming", "promptPrefix", "modelLabel", "resendFiles", "imageDetail"},
    ),
    "SillyTavern chat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi", "identifier": "chat-0"}],
            "max_tokens": 4, "temperature": 1, "top_p": 1, "top_a": 0, "stream": False, "stop": [],
            "logit_bias": {}, "reasoning_effort": "medium", "enable_web_search": False,
            "request_images": False, "custom_prompt_post_processing": "", "char_name": "Nova",
            "group_names": [],
        },
        {
            *("top_a", "enable_web_search", "request_images", "custom_prompt_post_processing"),
            *("char_name", "group_names", "messages[].identifier", "reasoning_effort"),
        },
    ),
    "SillyTavern text": Shape(
        COMPLETIONS,
        {
            "model": "fake", "prompt": "hi", "max_tokens": 4, "max_new_tokens": 4, "n_predict": 4,
            "temperature": 1, "typical_p": 1, "sampler_seed": -1, "seed": -1, "min_p": 0.1,
            "repetition_penalty": 1, "repetition_penalty_range": 0, "tfs": 1, "epsilon_cutoff": 0,
            "mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 5, "dry_multiplier": 0,
            "dry_sequence_breakers": '["\\n"]', "guidance_scale": 1, "negative_prompt": "",
            "ban_eos_token": False, "custom_token_bans": "", "banned_strings": [],
            "include_reasoning": True, "best_of": 1, "length_penalty": 1.2, "api_type": "vllm",
            "api_server": "http://localhost:8000",
        },
        {
            *("max_new_tokens", "sampler_seed", "repetition_penalty_range", "tfs"),
            *("epsilon_cutoff", "guidance_scale", "negative_prompt", "ban_eos_token"),
            *("custom_token_bans", "banned_strings", "api_type", "api_server"),
        },
    ),
    "GitHub Copilot chat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [
                {"role": "system", "content": "You.", "copilot_cache_control": EPHEMERAL},
                {"role": "user", "content": "hi"},
            ],
            "tools": [{**FUNCTION, "copilot_cache_control": EPHEMERAL}],
            "tool_choice": "auto", "max_tokens": 4, "temperature": 0.1, "top_p": 1, "n": 1,
            "stream": True,
            "snippy": {"enabled": False},
            "intent": False, "thinking_budget": 4000,
        },
        {
            *("messages[].copilot_cache_control", "tools[].copilot_cache_control", "snippy"),
            *("intent", "thinking_budget"),
        },
    ),
    "GitHub Copilot completion": Shape(
        COMPLETIONS,
        {
            "prompt": "def f(", "max_tokens": 4, "n": 1,
            "stop": ["\n"],
            "stream": True, "nwo": "a/b",
            "extra": {"language": "python", "next_indent": 0, "trim_by_indentation": True},
            "code_annotations": False,
        },
        {"nwo", "extra", "code_annotations"},
    ),
    "OpenRouter": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [
                *HI,
                {
                    "role": "assistant", "content": "hello", "refusal": None,
                    "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
                },
                *HI,
            ],
            "max_tokens": 4,
            "models": ["a/b", "c/d"],
            "provider": {"order": ["x"], "allow_fallbacks": True},
            "plugins": [{"id": "web", "max_results": 3}],
            "usage": {"include": True},
            "transforms": ["middle-out"],
            "reasoning": {"effort": "high", "exclude": False, "max_price": 1},
            "web_search_options": {"search_context_size": "low"},
            "response_format": {"type": "text", "y": None},
        },
        {
            *("models", "provider", "plugins", "usage", "transforms", "reasoning.effort"),
            *("reasoning.max_price", "messages[].reasoning_details", "web_search_options"),
            "response_format.y",
        },
    ),
    "OpenAI Agents SDK": Shape(
        RESPONSES,
        {
            "model": "fake",
            "input": [
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {
                    "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "x", "annotations": [], "hint": 1}
                    ],
                },
                {"role": "user", "content": "hi"},
            ],
            "tools": [
                {"type": "code_interpreter", "container": {"type": "auto"}},
                {"type": "file_search", "vector_store_ids": ["v"]},
            ],
            "tool_choice": "auto",
            "include": ["web_search_call.action.sources"],
            "max_output_tokens": 4, "conversation": None,
            "stream_options": {"include_obfuscation": True, "more": 1},
            "stream": True,
        },
        {
            *("input[].type=web_search_call", "input[].content[].hint", "include[0]"),
            *("tools[0].type=code_interpreter", "tools[1].type=file_search"),
            "stream_options.more",
        },
    ),
    "Anthropic SDK history": Shape(
        f"{MESSAGES}/count_tokens",
        {
            "model": "fake",
            "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
            "system": [{"type": "text", "text": "s", "index": 1}],
            "tool_choice": {"type": "auto", "reason": "x"},
            "tools": [{"name": "f", "input_schema": {}, "defer_loading": True, "version": 2}],
            "messages": [
                {"role": "user", "content": "hi", "id": "m"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "x", "index": 0},
                    ],
                },
                *HI,
            ],
        },
        {
            *("mcp_servers", "system[].index", "tool_choice.reason", "tools[].defer_loading"),
            *("tools[].version", "messages[].id", "messages[].content[].index"),
            "messages[].content[].type=server_tool_use",
            "messages[].content[].type=web_search_tool_result",
        },
    ),
    "Ollama chat": Shape(
        "/api/chat",
        {
            "model": "fake",
            "messages": [
                *HI,
                {
                    "role": "assistant", "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}, "x": 1}, "y": 2}],
                },
                {"role": "tool", "tool_name": "f", "content": "1", "when": 5},
            ],
            "tools": [{**FUNCTION, "x": None}, {"type": "web_search"}],
            "stream": False, "think": True,
            "options": {"num_predict": 4, "num_ctx": 8192, "cache_type": "q8", "top_k": None},
            "chat_id": "c", "frobnicate": None,
        },
        {
            *("think", "options.num_ctx", "options.cache_type", "chat_id", "frobnicate"),
            *("messages[].when", "messages[].tool_calls[].y", "tools[].x"),
            *("messages[].tool_calls[].function.x", "tools[1].type=web_search"),
        },
    ),
    "Ollama generate": Shape(
        "/api/generate",
        {"model": "fake", "prompt": "hi", "stream": False, "options": {"num_predict": 4}, "w": 1},
        {"w"},
    ),
    "Ollama embed": Shape(
        "/api/embed", {"model": "fake", "input": "hi", "options": {"num_ctx": 1}, "x": 1},
        {"options.num_ctx", "x"},
    ),
    "llama.cpp": Shape(
        "/completion",
        {"prompt": "hi", "n_predict": 4, "id_slot": 0, "cache_prompt": True, "x": None},
        {"x"},
    ),
    "llama.cpp template": Shape(
        "/apply-template",
        {"messages": HI, "reasoning_format": "auto", "tools": [{"type": "web_search"}]},
        {"reasoning_format", "tools[0].type=web_search"},
    ),
    "embeddings": Shape(
        "/v1/embeddings",
        {"model": "fake", "input": "hi", "input_type": "query", "task": None, "truncate": "END"},
        {"input_type", "task", "truncate"},
    ),
    "score": Shape("/v1/score", {"text_1": "a", "text_2": "b", "x": 1}, {"x"}),
    "rerank": Shape(
        "/v1/rerank",
        {"query": "a", "documents": [{"text": "b", "id": 7}], "max_chunks_per_doc": 1},
        {"documents[].id", "max_chunks_per_doc"},
    ),
    "tokenize": Shape("/tokenize", {"prompt": "hi", "x": 1}, {"x"}),
    "detokenize": Shape("/detokenize", {"tokens": [104, 105], "x": 1}, {"x"}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_client_requests_are_answered_and_ignored_fields_named(
    client: httpx.Client, shape: Shape
) -> None:
    response = client.post(shape.path, json=shape.body)
    assert response.status_code == 200, response.text
    assert names(response) == shape.ignored


# Without effect on this model, which does not reason; named in strict mode, too, and not refused.
SOFT = re.compile(r"reasoning(_|\.)effort|output_config\.effort|think")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_strict_mode_rejects_ignored_fields(client: httpx.Client, shape: Shape) -> None:
    response = client.post(shape.path, json=shape.body, headers=STRICT)
    hard = {name for name in shape.ignored if not SOFT.fullmatch(name)}
    own = {"options.num_ctx"}  # names that the protocol has, without effect
    assert response.status_code == (400 if hard - own else 200), response.text
