"""Tools and reasoning offline: `LLM.chat` and `LLM.read_answer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates
import numpy as np
import pytest
from engine_fakes import FakeAdapter
from model_files import write_tiny_tokenizer

from llaisys import LLM
from llaisys.common.sampling import SamplingParams
from llaisys.common.step import SamplingMetadata
from llaisys.tokenization import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": [{"type": "text", "text": "the weather?"}]}]


class ScriptedModel(FakeAdapter):
    """Generates `answer_ids` for every prompt, then EOS."""

    answer_ids: tuple[int, ...] = ()
    start = 0

    def sample(self, sampling: SamplingMetadata) -> Any:
        super().sample(sampling)
        assert sampling.positions is not None
        cls = type(self)
        cls.start = cls.start or int(sampling.positions[0])
        at = [int(position) - cls.start for position in sampling.positions]
        self._sampled = [cls.answer_ids[i] if i < len(cls.answer_ids) else 0 for i in at]
        return np.array(self._sampled, dtype=np.int32)


def ids_of(tokenizer: Tokenizer, *pieces: str) -> tuple[int, ...]:
    """Token ids of pieces, each a token name or a text."""
    found: list[int] = []
    for piece in pieces:
        known = tokenizer.token_id(piece) if len(piece) > 1 else None
        found += [known] if known is not None else tokenizer.encode(piece, add_special_tokens=False)
    return tuple(found)


@pytest.mark.parametrize(
    ("template", "tokens", "pieces", "reasoning"),
    [
        ("MISTRAL", "MISTRAL_TOKENS", ("[TOOL_CALLS]", ' [{"name": "weather"}]'), ""),
        (
            "R1_DISTILL",
            "QWEN_TOKENS",
            ("Hm.", "</think>", '{"name": "weather", "arguments": {}}'),
            "Hm.",
        ),
        ("LLAMA3", "LLAMA_TOKENS", ("<|python_tag|>", '{"name": "weather"}'), ""),
    ],
)
def test_read_answer_parses_tool_calls(
    tmp_path: Path, template: str, tokens: str, pieces: tuple[str, ...], reasoning: str
) -> None:
    more = getattr(chat_templates, tokens)
    write_tiny_tokenizer(tmp_path, getattr(chat_templates, template), more)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ScriptedModel.answer_ids, ScriptedModel.start = ids_of(tokenizer, *pieces), 0
    options: dict[str, Any] = {
        "adapter_class": ScriptedModel,
        "tokenizer": tokenizer,
        "warmup": False,
    }
    with LLM("mock", num_kv_blocks=256, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=80)
        (output,) = llm.chat(ASKED, params, tools=TOOLS)
        answer = llm.read_answer(output.outputs[0], tools=TOOLS)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", "{}")]
        assert answer.reasoning == reasoning
        ScriptedModel.start = 0
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
        follow = [*ASKED, answer.to_message(), result, {"role": "user", "content": "so?"}]
        text = tokenizer.decode_tokens(llm.encode_chat(follow, tools=TOOLS), False)
        assert "sunny" in text and "weather" in text
