"""`llaisys chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.repetition import CHAT_DETECTION, DETECTED
from llaisys.entrypoints.cli_options import (
    SEED,
    add_lora_option,
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_of,
)

if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.entrypoints.llm import LLM

COMMAND = re.compile(r"/[a-z]+")  # a path such as /etc/hosts is not a command
GREETING = """\
Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands.
An answer has at most {limit} tokens (--max-tokens); /continue continues a longer one."""
HELP = """\
/continue      continue the last answer if it was cut off or stopped
/reset         start again; the system prompt stays (also /clear)
/system TEXT   the system prompt from now on; without TEXT, show it
/save FILE     write the conversation: Markdown, or JSON where FILE ends in .json
/exit          leave (also Ctrl-D)"""
HEADINGS = {"system": "System", "user": "You", "assistant": "Assistant"}


def add_command(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="Chat with a model in the terminal",
        description="Chat with a model in the terminal.",
    )
    chat.add_argument("--system", help="System prompt", metavar="TEXT")
    add_model_options(chat, without=SEED)
    add_lora_option(chat)
    add_sampling_options(chat)
    chat.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
    params = sampling_of(options)
    with open_llm(options) as llm:
        print(GREETING.format(limit=params.max_tokens))
        params = params.clone(repetition_detection=CHAT_DETECTION)
        defaults = params.with_defaults(llm.default_sampling)
        chat = Chat(llm, defaults, options.system, options.lora)
        while (text := _ask()) is not None:
            if COMMAND.fullmatch(text.partition(" ")[0]):
                chat.command(text)
            elif text:
                chat.answer(text)
    return 0


def _ask() -> str | None:
    """The next line; None at the end of the chat."""
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text == "/exit" else text


class _FailedAnswerError(LlaisysError):
    """The engine failed to finish an answer."""


class Chat:
    """A conversation. A turn that fails does not change it."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, lora: str | None = None
    ) -> None:
        self.llm = llm
        self.lora = lora  # name of a LoRA adapter
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []  # user, assistant, user, ...
        self._unfinished: list[int] = []  # prompt and answer ids of a cut off last answer
        self._saved: Path | None = None  # the file of this conversation, which may be overwritten

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def answer(self, text: str) -> None:
        """Print the answer as it arrives. Ctrl-C ends it and keeps the text so far."""
        question = {"role": "user", "content": text}
        messages = [*self.messages, question]
        answer = self._stream(lambda: self.llm.encode_chat(messages))
        if answer is not None:
            self.turns += [question, {"role": "assistant", "content": answer}]

    def resume(self) -> None:
        """Continue a cut off answer."""
        if not self._unfinished:
            print("the last answer is complete")
            return
        more = self._stream(lambda: self._unfinished)
        if more is not None:
            self.turns[-1] = {**self.turns[-1], "content": self.turns[-1]["content"] + more}

    def _stream(self, prompt: Callable[[], list[int]]) -> str | None:
        """Print and return the text that follows a prompt; None after an error."""
        parts: list[str] = []
        end, reason = None, None
        try:
            tokens = list(prompt())
            stream = self.llm.stream(list(tokens), self.params, is_chat=True, lora=self.lora)
            try:
                for part in stream:
                    parts.append(part.text)
                    tokens += part.token_ids
                    end, reason = part.finish_reason, part.stop_reason
                    print(part.text, end="", flush=True)
                    if end == "error" and part.output is not None:
                        raise _FailedAnswerError(str(part.output.outputs[0].error))
            except KeyboardInterrupt:
                stream.close()
                print(" [stopped]", end="")
                end = "length"
            else:
                if end == "length":
                    limit = "it repeats itself" if reason == DETECTED else "token limit"
                    print(f" [{limit}; /continue continues]", end="")
            print()
        except (InvalidInputError, _FailedAnswerError) as error:  # usually a full context
            print(f"{error}\n/reset starts again.")
            return None
        self._unfinished = tokens if end == "length" else []
        return "".join(parts)

    def command(self, line: str) -> None:
        """Run a line that begins with a command."""
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP)
        elif name in ("/reset", "/clear"):
            self.turns, self._unfinished, self._saved = [], [], None
        elif name == "/continue":
            self.resume()
        elif name == "/system":
            self.system = rest.strip() or self.system
            print(f"system prompt: {self.system or 'none'}")
        elif name == "/save":
            self.save(rest.strip())
        else:
            print(f"unknown command {name}; /help lists the commands")

    def save(self, name: str) -> None:
        """Write the conversation; never overwrite a file of another origin."""
        if not name:
            print("/save needs a file name")
            return
        path = Path(name).expanduser()
        if path.suffix == ".json":
            text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        else:
            parts = (f"## {HEADINGS[m['role']]}\n\n{m['content']}\n" for m in self.messages)
            text = "\n".join(parts)
        try:
            with path.open("w" if path == self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"not saved: {path}: {error.strerror}")
            return
        self._saved = path
        print(f"saved to {path}")
