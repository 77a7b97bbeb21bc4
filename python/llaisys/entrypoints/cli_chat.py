"""`llaisys chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from llaisys.common.errors import InvalidInputError
from llaisys.entrypoints.cli_options import (
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_of,
)

if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.entrypoints.llm import LLM


def add_command(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument("--system", help="the system prompt")
    add_model_options(chat)
    add_sampling_options(chat)
    chat.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    with open_llm(options) as llm:
        print("Ctrl-C stops an answer, Ctrl-D or /exit leaves, /clear starts again.")
        start = [{"role": "system", "content": options.system}] if options.system else []
        messages = list(start)
        while (text := _ask()) is not None:
            if text == "/clear":
                messages = list(start)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    answer = _stream_answer(llm, messages, sampling_of(options))
                except InvalidInputError as error:  # the context is full, mostly
                    messages.pop()
                    print(f"{error}\n/clear starts again.")
                    continue
                messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str | None:
    """The next line; None when the user leaves."""
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text == "/exit" else text


def _stream_answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    parts = []
    stream = llm.stream(messages, params)
    try:
        for part in stream:
            parts.append(part.text)
            print(part.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        print(" [stopped]", end="")
    print()
    return "".join(parts)
