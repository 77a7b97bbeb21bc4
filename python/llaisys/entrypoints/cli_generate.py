"""`llaisys generate`: complete prompts."""

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
from llaisys.common.flags import OptionParser
from llaisys.common.validation import invalid_value
from llaisys.entrypoints.cli_options import (
    SEED,
    add_lora_option,
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_of,
)

if TYPE_CHECKING:
    from llaisys.common.types import RequestOutput
    from llaisys.entrypoints.llm import LLM, TokenStream


def add_command(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        usage="llaisys generate [MODEL] PROMPT [options]\n"
        "       llaisys generate [MODEL] --file FILE [options]",
        help="Complete prompts",
        description="Complete a prompt, the lines of a file, or the objects of a JSONL file "
        '({"prompt": ...} or {"messages": [...]}, sampling fields, "lora").',
    )
    generate.add_argument(
        "positions",
        nargs="*",
        metavar="PROMPT",
        help="Prompt, after MODEL if both are given; '-' reads standard input",
    )
    generate.add_argument(
        "--file", type=Path, metavar="FILE", help="File with a prompt per line, or .jsonl"
    )
    generate.add_argument(
        "--output", type=Path, metavar="FILE", help="Output file (default: standard output)"
    )
    generate.add_argument(
        "--json", action="store_true", help="Write JSON lines with usage and timings"
    )
    generate.add_argument(
        "--raw", action="store_true", help="Complete the text without a chat template"
    )
    add_model_options(generate, position=False, without=SEED)
    add_lora_option(generate)
    add_sampling_options(generate)
    _add_structured_options(generate)
    generate.set_defaults(run=_generate)


def _add_structured_options(parser: OptionParser) -> None:
    group = parser.add_argument_group("structured output, at most one")
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON schema of the output")
    group.add_argument("--json-object", action="store_true", help="Output is a JSON object")
    group.add_argument("--regex", metavar="PATTERN", help="Regular expression of the whole output")
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="Grammar of the output, GBNF or Lark"
    )
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="A possible output; repeatable"
    )


def _structured_outputs(options: argparse.Namespace) -> dict[str, Any]:
    """The structured_outputs field of SamplingParams, or no field."""
    given = {
        "json": None if options.json_schema is None else _read(options.json_schema),
        "json_object": options.json_object or None,
        "regex": options.regex,
        "grammar": None if options.grammar is None else _read(options.grammar),
        "choice": options.choice,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"structured_outputs": chosen} if chosen else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {error}",
            field="file", value=str(path), limit="a file with UTF-8 text",
        ) from error  # fmt: skip


def _generate(options: argparse.Namespace) -> int:
    _split_positional(options)
    jobs = list(_read_jobs(options))
    if not jobs:
        raise InvalidInputError("no prompt given: name one, or use --file or '-'", field="prompt")
    if options.output is not None:
        _check_writable(options.output)
    structured = _structured_outputs(options)
    with open_llm(options) as llm:
        prompts, params, loras = [], [], []
        for where, job in jobs:
            try:
                loras.append(job.pop("lora", options.lora))
                prompts.append(_prompt_of(job, llm, options.raw))
                chosen = sampling_of(options, **structured | job)
                params.append(chosen.with_defaults(llm.default_sampling))
            except InvalidInputError as error:
                raise error.with_prefix(where) from error
        one_text = len(jobs) == 1 and params[0].n == 1 and not options.json
        if one_text and options.output is None and sys.stdout.isatty():
            outputs = [_print_stream(llm.stream(prompts[0], params[0], lora=loras[0]))]
        else:
            show_progress = len(jobs) > 1 and sys.stderr.isatty()
            outputs = llm.generate(prompts, params, lora=loras, use_tqdm=show_progress)
            _write(outputs, options)
    return _report_failures([where for where, _ in jobs], outputs)


def _print_stream(stream: TokenStream) -> RequestOutput:
    """Print the text of `_write` as it arrives: white space once text follows it."""
    begun, space = False, ""
    try:
        for part in stream:
            text = space + part.text
            shown = text.rstrip()
            space = text[len(shown) :]
            if shown:
                print(shown if begun else shown.lstrip(), end="", flush=True)
                begun = True
            if part.output is not None:
                return part.output
        raise AssertionError("the stream ended without an output")
    finally:
        print()  # also after Ctrl-C


def _write(outputs: list[RequestOutput], options: argparse.Namespace) -> None:
    with _output(options.output) as out:  # opened after the work
        for output in outputs:
            if options.json:
                print(json.dumps(_as_json(output), ensure_ascii=False), file=out)
            else:
                texts = (choice.text.strip() for choice in output.outputs)
                print("\n---\n".join(texts), file=out)


def _split_positional(options: argparse.Namespace) -> None:
    """The last positional argument is the prompt, unless --file is given; MODEL may precede it."""
    given = list(options.positions)
    options.prompt = given.pop() if given and options.file is None else None
    if given and options.model is None:
        options.model = given.pop(0)
    if given:
        raise InvalidInputError(
            f"{given[-1]!r} is one too many: give MODEL once, and one PROMPT",
            field="model", value=given[-1], limit="given once",
        )  # fmt: skip


def _prompt_of(job: dict[str, Any], llm: LLM, raw: bool) -> Any:
    """Remove the prompt or the messages from a job and return it."""
    messages, prompt = job.pop("messages", None), job.pop("prompt", None)
    if messages is None:
        if not isinstance(prompt, str):
            raise invalid_value("prompt", prompt, "a string")
        if raw or llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}]
    return llm.encode_chat(messages)


def _report_failures(origins: list[str], outputs: list[RequestOutput]) -> int:
    """Print errors to standard error and return the exit status."""
    status = 0
    for where, output in zip(origins, outputs, strict=True):
        for choice in output.outputs:
            if choice.finish_reason == "error":
                print(f"error: {where}{choice.error}", file=sys.stderr)
                status = 1
    return status


def _read_jobs(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, job); a job is a prompt or messages, and sampling fields."""
    if options.prompt is not None:
        yield "", {"prompt": sys.stdin.read() if options.prompt == "-" else options.prompt}
    if options.file is None:
        return
    with _naming("file", options.file):
        # Not splitlines(): a JSON string or a prompt may contain U+2028 and the like.
        lines = options.file.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if options.file.suffix != ".jsonl":
            yield f"{options.file}:{number}: ", {"prompt": line}
            continue
        try:
            job = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(
                f"{options.file}:{number}: not JSON: {error}",
                field="file", value=str(options.file), limit="lines of JSON",
            ) from error  # fmt: skip
        if not isinstance(job, dict) or ("prompt" in job) == ("messages" in job):
            raise InvalidInputError(
                f"{options.file}:{number}: needs either 'prompt' or 'messages'",
                field="file", value=str(options.file), limit="objects with a prompt or messages",
            )  # fmt: skip
        yield f"{options.file}:{number}: ", job


@contextmanager
def _naming(option: str, path: Path) -> Iterator[None]:
    """Name the option and its file in errors of the file."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--{option} {path}: {error}", field=option) from error


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
    else:
        with _naming("output", path), path.open("w", encoding="utf-8") as file:
            yield file


def _check_writable(path: Path) -> None:
    """Check before the work that a file can be written, without changing it."""
    with _naming("output", path):
        if path.exists():
            path.open("a").close()
        elif not os.access(path.parent, os.W_OK):
            raise OSError(f"{path.parent} is not a folder that can be written")


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
