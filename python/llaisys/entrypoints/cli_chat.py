"""`llaisys chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.repetition import CHAT_DETECTION, DETECTED
from llaisys.common.validation import unknown_name
from llaisys.entrypoints.chat_input import ask, edit_lines
from llaisys.entrypoints.cli_options import (
    SEED,
    add_lora_option,
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_of,
)
from llaisys.entrypoints.terminal_markdown import (
    DIM,
    RESET,
    MarkdownWriter,
    has_styles,
    without_control,
)

if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.entrypoints.llm import LLM

COMMAND = re.compile(r"/[a-z]+")  # a path such as /etc/hosts is not a command
GREETING = """\
Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands.
An answer has at most {limit} tokens (--max-tokens); /continue continues a longer one."""
HELP = """\
/continue          continue the last answer if it was cut off or stopped
/model [NAME]      go on with another model; without NAME, show the model
/set [NAME VALUE]  change a sampling option, such as temperature 0.5; without NAME, show them
/system [TEXT]     the system prompt from now on; without TEXT, show it
/save FILE         write the conversation: Markdown, or JSON where FILE ends in .json
/reset             start again; the system prompt stays (also /clear)
/exit              leave (also Ctrl-D)

A question has several lines where a line ends in \\, or between two \"\"\"."""
COMMANDS = (*re.findall(r"^/[a-z]+", HELP, re.MULTILINE), "/clear", "/help")
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
    from llaisys.diagnostics import chat_history_path

    params = sampling_of(options)
    chat = Chat(options, params.clone(repetition_detection=CHAT_DETECTION))
    edit_lines(chat_history_path(), COMMANDS)
    try:
        print(GREETING.format(limit=params.max_tokens))
        while (text := ask()) is not None and text != "/exit":
            if COMMAND.fullmatch(text.partition(" ")[0]):
                chat.command(text)
            elif text:
                chat.answer(text)
    finally:
        chat.llm.close()
    return 0


class _FailedAnswerError(LlaisysError):
    """The engine failed to finish an answer."""


class Chat:
    """A conversation. A turn that fails does not change it."""

    def __init__(self, options: argparse.Namespace, params: SamplingParams) -> None:
        self._options = options
        self.llm: LLM = open_llm(options)
        self.params = params  # what the user chose; the model's defaults complete it
        self.system: str | None = options.system
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
        show = _Display()
        try:
            tokens = list(prompt())
            params = self.params.with_defaults(self.llm.default_sampling)
            stream = self.llm.stream(tokens[:], params, is_chat=True, lora=self._options.lora)
            try:
                for part in stream:
                    parts.append(part.text)
                    tokens += part.token_ids
                    end, reason = part.finish_reason, part.stop_reason
                    show.text(part.text, len(part.token_ids))
                    if end == "error" and part.output is not None:
                        raise _FailedAnswerError(str(part.output.outputs[0].error))
            except KeyboardInterrupt:
                stream.close()
                show.end(" [stopped]")
                end = "length"
            else:
                limit = "it repeats itself" if reason == DETECTED else "token limit"
                show.end(f" [{limit}; /continue continues]" if end == "length" else "")
        except (InvalidInputError, _FailedAnswerError) as error:  # usually a full context
            show.end("")
            print(f"{error}\n/reset starts again.")
            return None
        self._unfinished = tokens if end == "length" else []
        return "".join(parts)

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            print(HELP)
        elif name in ("/reset", "/clear"):
            self.turns, self._unfinished, self._saved = [], [], None
        elif name == "/continue":
            self.resume()
        elif name == "/model":
            self.change_model(rest)
        elif name == "/set":
            self.set(*rest.partition(" ")[::2])
        elif name == "/system":
            self.system = rest or self.system
            print(f"system prompt: {self.system or 'none'}")
        elif name == "/save":
            self.save(rest)
        else:
            print(f"unknown command {name}; /help lists the commands")

    def change_model(self, name: str) -> None:
        """Open another model; after a failure the one before is opened again."""
        if name:
            before, lora = self._options.model, self._options.lora
            self.llm.close()
            self._options.model, self._options.lora = name, None
            try:
                self.llm = open_llm(self._options)
            except LlaisysError as error:
                print(f"{error}")
                self._options.model, self._options.lora = before, lora
                self.llm = open_llm(self._options)
            self._unfinished = []
        print(f"model: {self.llm.model_path}")

    def set(self, name: str, value: str) -> None:
        """Change a sampling option; a name without a value gives it its default back."""
        from llaisys.common.sampling import FIELDS, SamplingParams

        name = name.lstrip("-").replace("-", "_")
        settable = {key: about for key, about in FIELDS.items() if about.flag is not None}
        if name and name not in settable:
            print(unknown_name("option", name, list(settable)))
            return
        if name:
            try:
                given = settable[name].kind.parse(value.strip()) if value.strip() else None
                chosen = {**self.params.to_wire(), name: given}
                if given is None:
                    del chosen[name]
                self.params = SamplingParams.from_wire(chosen)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                print(f"not changed: {error}")
                return
        used = self.params.with_defaults(self.llm.default_sampling).to_wire()
        del used["repetition_detection"]
        print("  ".join(f"{key} {value}" for key, value in used.items()))

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


class _Display:
    """Shows one answer: Markdown and speed in a terminal, else the text alone."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._markdown = MarkdownWriter(sys.stdout.write) if has_styles(sys.stdout) else None
        self._began = time.monotonic()
        self._first = 0.0  # time of the first token
        self._num_first = 0  # tokens that came at that time
        self._num_tokens = 0

    def text(self, text: str, num_tokens: int) -> None:
        if num_tokens and not self._num_tokens:
            self._first, self._num_first = time.monotonic(), num_tokens
        self._num_tokens += num_tokens
        if self._markdown is not None:
            self._markdown.feed(text)
        else:
            sys.stdout.write(without_control(text) if self._is_terminal else text)
        sys.stdout.flush()

    def end(self, note: str) -> None:
        """End the answer with a note and, in a terminal, its speed."""
        if self._markdown is not None:
            self._markdown.finish()
        print(note)
        if not self._is_terminal or not self._num_tokens:
            return
        line = f"[{self._num_tokens} tokens, first after {self._first - self._began:.2f} s"
        seconds, num_later = time.monotonic() - self._first, self._num_tokens - self._num_first
        if num_later and seconds > 0:
            line += f", then {num_later / seconds:.1f} per second"
        print(f"{DIM}{line}]{RESET}" if self._markdown is not None else line + "]")
