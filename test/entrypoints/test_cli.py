"""The command line, in process and as a subprocess."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import Terminal

from llaisys.common.types import CompletionOutput, RequestOutput, StreamOutput
from llaisys.common.version import __version__
from llaisys.entrypoints.cli import build_parser, main
from llaisys.tokenization import Tokenizer


def test_version_and_help_as_a_program() -> None:
    for option, text in (("--version", __version__), ("--help", "generate")):
        done = subprocess.run(
            [sys.executable, "-m", "llaisys", option], capture_output=True, text=True, check=True
        )
        assert text in done.stdout


# Modules whose import has ended, or the beginnings of log lines.
MOMENTS = {
    "llaisys": [
        "llaisys.common.interpreter",  # from here on, an interrupt prints nothing
        "llaisys.entrypoints.cli",
        "llaisys.server.http_server",  # next, the engine is started
        "fastapi",
        "worker pid=",  # next, the engine loads the model
        "listening url=",
    ],
    "llaisys.server": ["llaisys.common.interpreter", "llaisys.server.app"],
}


@pytest.mark.parametrize(
    ("program", "moment"), [(program, moment) for program in MOMENTS for moment in MOMENTS[program]]
)
def test_interrupt_during_the_start_prints_no_traceback(
    model: str, program: str, moment: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", program]
    command += ["serve"] if program == "llaisys" else []
    command += [model, "--port", "0", "--session-file", str(tmp_path / "s.db")]

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it

    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=restore
    ) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        assert process.stderr is not None
        errors, is_sent = [], False
        for line in process.stderr:
            if not is_sent and f" {moment}" in line:
                process.send_signal(signal.SIGINT)
                is_sent = True
            errors.append(line)
        timer.cancel()
    printed = "".join(line for line in errors if not line.startswith("import time:"))
    assert is_sent and "Traceback" not in printed and "KeyboardInterrupt" not in printed, printed
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys; from llaisys.entrypoints.cli import build_parser; build_parser(); "
        "print([m for m in ('numpy', 'fastapi', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_generate_prints_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", "--model", model, "--max-tokens", "5", "--temperature", "0"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "{}", "--port", "0"],
        ["serve", "--port", "0", "{}"],
        ["serve", "--port", "0", "-m", "{}"],
        ["chat", "{}"],
        ["chat", "--model", "{}"],
        ["chat", "--seed", "1", "{}"],
        ["pull", "-m", "{}"],
        ["bench", "latency", "{}"],
        ["bench", "latency", "-m", "{}"],
        ["bench", "throughput", "{}"],
        ["bench", "throughput", "--concurrency", "1", "--model", "{}"],
        ["bench", "speculative", "{}"],
        ["bench", "serve", "{}"],
        ["bench", "serve", "-m", "{}"],
    ],
)
def test_every_command_accepts_model_as_positional_and_flag(command: list[str]) -> None:
    parser = build_parser()
    assert parser.parse_args([word.format("some/model") for word in command]).model == "some/model"
    without = [word for word in command if word not in ("{}", "-m", "--model")]
    assert parser.parse_args(without).model is None


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["bench", "latency"], ["pull"]])
def test_model_given_twice_is_rejected(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["a", "-m", "b"], ["-m", "a", "b"], ["-m", "a", "--model", "b"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args([*command, *words])
        assert "MODEL is given twice: a and b" in capsys.readouterr().err


def test_generate_accepts_model_before_prompt(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("hello\n")
    settings = ["--max-tokens", "5", "--temperature", "0"]
    answers = set()
    for words in (
        [model, "hello"],
        ["-m", model, "hello"],
        ["hello", "--model", model],
        [model, "--file", str(source)],
        ["--file", str(source), "-m", model],
    ):
        assert main(["generate", *words, *settings]) == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1
    for words in ([model, "hello", "x"], ["-m", model, "hello", "x"], ["x", model, "--file", "f"]):
        assert main(["generate", *words, *settings]) == 1
        assert "is one too many" in capsys.readouterr().err


def test_generate_in_a_terminal_prints_the_same_text(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", model, "hello", "--max-tokens", "20", "--temperature", "0"]
    assert main(arguments) == 0
    with Terminal(*arguments) as terminal:
        assert terminal.wait() == 0
    assert "loading weights [" in terminal.output  # before any other output
    device, _, rest = terminal.screen.partition("\n")
    assert ", device cpu: " in device and rest == capsys.readouterr().out


def test_generate_in_a_terminal_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """White space around the answer is omitted, as in the non-streamed text."""
    parts = ["\n", " Good ", "mor", "ning", " \n", "you", " \n"]
    shown = []
    master, slave = pty.openpty()
    os.set_blocking(master, False)

    def receive() -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(master, 1 << 16).decode()
        return ""

    def stream(prompt: object, params: object, lora: str | None = None) -> Iterator[StreamOutput]:
        for number, text in enumerate(parts, 1):
            shown.append(receive())
            last = number == len(parts)
            choice = CompletionOutput(0, "", [], finish_reason="stop")
            output = RequestOutput("r", None, [1], [choice]) if last else None
            yield StreamOutput("r", 0, text, [1], "stop" if last else None, output=output)

    llm = SimpleNamespace(stream=stream, tokenizer=None, default_sampling={})
    monkeypatch.setattr(
        "llaisys.entrypoints.cli_generate.open_llm", lambda options: contextlib.nullcontext(llm)
    )
    with open(slave, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["generate", "hello"]) == 0
        assert shown == ["", "", "Good", " mor", "ning", "", " \r\nyou"]
        assert receive() == "\r\n"
    os.close(master)


def test_generate_reads_jsonl_and_writes_jsonl(model: str, tmp_path: Path) -> None:
    jobs = [
        {"prompt": "one", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 4, "n": 2},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(job) for job in jobs) + "\n\n")
    arguments = ["generate", "--file", str(source), "--output", str(target), "--json"]
    assert main([*arguments, "--model", model, "--temperature", "0"]) == 0
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first["usage"]["completion_tokens"] <= 3
    assert len(second["choices"]) == 2
    assert {"queue", "first_token", "total"} <= set(first["timings"])


def test_line_separators_inside_a_prompt_do_not_split_it(model: str, tmp_path: Path) -> None:
    """U+2028 and similar characters may be unescaped in JSON."""
    target = tmp_path / "out.jsonl"
    arguments = ["generate", "--output", str(target), "--json", "--raw", "--model", model]
    prompt = "a\u2028b\u2029c\x85d\x0ce"
    job = json.dumps({"prompt": prompt, "max_tokens": 2}, ensure_ascii=False)
    assert "\u2028" in job
    for name, text in (("in.jsonl", job), ("in.txt", prompt)):
        source = tmp_path / name
        source.write_text(text + "\n" + text + "\n", encoding="utf-8")
        assert main([*arguments, "--file", str(source), "--max-tokens", "2"]) == 0
        outputs = [json.loads(line) for line in target.read_text().split("\n") if line]
        sizes = [output["usage"]["prompt_tokens"] for output in outputs]
        assert sizes == [len(prompt.encode())] * 2


def test_failed_request_is_reported_and_others_are_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letter = Tokenizer.from_directory(model).encode("h", add_special_tokens=False)
    failing = {"prompt": "x", "allowed_token_ids": letter, "bad_words": ["hh"]}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps(failing))
    arguments = ["generate", "--file", str(source), "--json", "--max-tokens", "3"]
    assert main([*arguments, "--model", model]) == 1
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"error: {source}:3: ") and "no token left" in error
    reasons = [json.loads(line)["finish_reason"] for line in captured.out.splitlines()]
    assert reasons[0] != "error" and reasons[1:] == ["error"]


def test_unwritable_output_is_rejected_before_the_work(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("llaisys.entrypoints.cli_generate.open_llm", work)
    for target in (tmp_path / "no" / "out.txt", tmp_path):
        assert main(["generate", "hi", "--output", str(target), "--model", model]) == 1
        assert f"--output {target}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_output_file_is_unchanged_when_nothing_was_generated(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.txt"
    target.write_text("precious")
    source.write_text(json.dumps({"prompt": "x" * 5000}))
    arguments = ["generate", "--output", str(target), "--model", model]
    for bad in (["--file", str(source)], ["x", "--temperature", "nan"]):
        assert main([*arguments, *bad]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
        assert target.read_text() == "precious"


def test_generate_reads_standard_input(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-", "--raw", "--model", model, "--max-tokens", "2"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--max-tokens", "-5"], "max_tokens"),
        (["generate"], "no prompt"),
        (["generate", "--file", "/does/not/exist"], "--file"),
        (["bench", "latency", "--shape", "gpt-9"], "shape is 'gpt-9'; it must be one of"),
        (["bench", "throughput", "--concurrency", "many"], "concurrency is 'many'; it must be"),
        (["bench", "speculative", "--concurrency", "0"], "concurrency is '0'; it must be"),
        (["generate", "x", "--speculative-config", "{"], "speculative_config is '{'"),
        (["bench", "ops", "--dtype", "int3"], "dtype is 'int3'; it must be"),
        (["bench", "ops", "--threads", "-1"], "n_threads is -1; it must be an integer from 0"),
        (["bench", "ops", "--device", "cuda"], "device is 'cuda'; it must be cpu"),
        (["bench", "latency", "--tensor-parallel-size", "2"], "tensor_parallel_size is 2; it must"),
        (["bench", "latency", "--no-prefix-caching"], "enable_prefix_caching is False; it must be"),
        (["bench", "latency", "MODEL", "--max-model-len", "9"], "max_model_len is 9; it must be"),
        (["bench", "perplexity", "--file", "x", "--seed", "1"], "seed is 1; it must be left out"),
    ],
)
def test_user_errors_are_one_line_and_status_1(
    arguments: list[str], text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "generate":
        arguments = [*arguments, "--model", model]
    arguments = [model if argument == "MODEL" else argument for argument in arguments]
    assert main(arguments) == 1
    *before, error = capsys.readouterr().err.splitlines()
    assert all(", device " in line for line in before)
    assert error.startswith("error: ")
    assert text in error


def test_invalid_jsonl_error_has_file_and_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    for line, text in (
        ("{", "not JSON"),
        ("{}", "either"),
        ('{"prompt": "x", "topp": 1}', "topp"),
        ('{"prompt": "x", "top_p": 2}', "top_p is 2"),
        ('{"prompt": 5}', "prompt is 5; it must be a string"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages[0].content is of type int"),
    ):
        source.write_text('{"prompt": "fine"}\n' + line)
        assert main(["generate", "--file", str(source), "--model", model]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {source}:2: ") and text in error


def test_numpy_blas_has_one_thread() -> None:
    code = (
        "import os; from llaisys.entrypoints.cli import build_parser, main; main([]); "
        "print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    for given, expected in (({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")):
        inherited = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split()[-1] == expected


def test_env_and_pull(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "cpu kernels" in capsys.readouterr().out
    assert main(["pull", model]) == 0
    assert capsys.readouterr().out.strip() == model


def test_env_reports_why_there_are_no_kernels() -> None:
    command = [sys.executable, "-m", "llaisys", "env"]
    done = subprocess.run(
        command, env={**os.environ, "LLAISYS_CPU_ISA": "vax"}, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert re.search(r"cpu kernels.*none: .*vax", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["generate", "--max-tokens", "1", "hi"], "cpu", "cpu: set by LLAISYS_DEVICE"),
        (["generate", "--max-tokens", "1", "hi", "--device", "cpu"], "", "cpu: as requested"),
        (["chat"], "cpu", "cpu: set by LLAISYS_DEVICE"),
        # Two engines of the same model.
        (["bench", "speculative", "--concurrency", "1", "--new-tokens", "1", "--repeats", "1",
          "--speculative-config", '{"method": "ngram"}'], "cpu", "cpu: set by LLAISYS_DEVICE"),
    ],
)  # fmt: skip
def test_the_device_and_its_reason_are_one_line(
    words: list[str],
    environment: str,
    expected: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLAISYS_DEVICE", environment)
    monkeypatch.setattr("builtins.input", lambda prompt: "/exit")
    assert main([*words, "--model", model]) == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if "device" in line]
    assert lines == [f"model {model}, device {expected}"] and "device cpu" not in printed.out
