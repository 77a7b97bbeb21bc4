"""`llaisys chat`: streamed answers, commands, a real terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import Terminal

from llaisys.entrypoints.chat_input import ask
from llaisys.entrypoints.cli import main
from llaisys.entrypoints.cli_chat import COMMANDS

Say = Callable[..., str]
SETTINGS = ["--max-tokens", "3", "--temperature", "0"]


@pytest.fixture
def say(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a conversation with these input lines; returns the output."""

    def say(*lines: str, options: tuple[str, ...] = ()) -> str:
        remaining = iter([*lines, "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(remaining))
        assert main(["chat", model, *SETTINGS, *options]) == 0
        assert next(remaining, None) is None  # every line was consumed
        return capsys.readouterr().out

    return say


def saved(path: Path) -> list[tuple[str, str]]:
    messages = json.loads(path.read_text())["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_chat_keeps_history_until_reset(say: Say, tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.json" for name in "abc")
    printed = say(
        "hello", f"/save {first}", "again", f"/save {second}", "/reset", "anew", f"/save {third}"
    )
    assert "Ctrl-D" in printed
    turns = saved(second)
    assert [role for role, _ in turns] == ["user", "assistant"] * 2
    assert saved(first) == turns[:2] and turns[0] == ("user", "hello")
    assert [text for _, text in saved(third)][:1] == ["anew"] and len(saved(third)) == 2
    for _, answer in (turns[1], turns[3]):
        assert answer in printed


def test_chat_continues_after_full_context(say: Say) -> None:
    printed = say("x" * 600, "hello")
    assert "it must have at most 511" in printed and "/reset starts again.\n" in printed


def test_token_limit_is_shown_and_a_cut_off_answer_continues(say: Say, tmp_path: Path) -> None:
    whole, cut, more = (tmp_path / f"{name}.json" for name in ("whole", "cut", "more"))
    ignore_eos = ("--ignore-eos",)
    say("hello", f"/save {whole}", options=("--max-tokens", "9", *ignore_eos))
    printed = say(
        "/continue", "hello", f"/save {cut}", "/continue", "/continue", f"/save {more}",
        "/reset", "/continue", options=ignore_eos,
    )  # fmt: skip
    assert "at most 3 tokens (--max-tokens)" in printed
    assert printed.count("[token limit; /continue continues]") == 3
    assert printed.count("the last answer is complete") == 2
    assert saved(more) == saved(whole) and saved(cut) != saved(more)
    assert saved(more)[1][1].startswith(saved(cut)[1][1])


def test_question_of_several_lines(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    quotes = '"""'
    say(
        f"{quotes}one", "  two", f"three{quotes}", "four \\", "five", f"{quotes}six{quotes}",
        quotes, "seven", "", "eight", quotes, f"/save {file}",
    )  # fmt: skip
    questions = [text for role, text in saved(file) if role == "user"]
    assert questions == ["one\n  two\nthree", "four \nfive", "six", "seven\n\neight"]


def test_end_of_input_ends_a_question_of_several_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str | type[BaseException]] = ['"""a', "b", EOFError, "c\\", KeyboardInterrupt]
    lines += [KeyboardInterrupt, EOFError]
    remaining = iter(lines)

    def type_line(prompt: str) -> str:
        line = next(remaining)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    assert [ask() for _ in range(4)] == ["a\nb", "", None, None]


def test_sampling_options_are_shown_changed_and_checked(say: Say) -> None:
    printed = say(
        "/set", "/set temperature 0.25", "/set top-k 7", "/set temperature 1000", "/set top_k x",
        "/set temprature 1", "/set temperature", "/set repetition_detection {}",
    ).splitlines()  # fmt: skip
    shown = [line for line in printed if line.startswith("temperature") or "temperature " in line]
    assert "temperature 0.0" in shown[0] and "max_tokens 3" in shown[0]
    assert "temperature 0.25" in shown[1]
    assert "temperature 0.25" in shown[2] and "top_k 7" in shown[2]
    assert any("not changed: temperature is 1000" in line for line in printed)
    assert any("not changed: invalid literal" in line for line in printed)
    assert any("did you mean 'temperature'" in line for line in printed)
    assert "temperature 0.8" in shown[-1] and "top_k 7" in shown[-1]
    assert any("unknown option 'repetition_detection'" in line for line in printed)


def test_model_changes_and_a_failure_keeps_it(say: Say, model: str, tmp_path: Path) -> None:
    file, other = tmp_path / "chat.json", tmp_path / "other"
    shutil.copytree(model, other)
    printed = say(
        "/model", "hello", f"/model {other}", "again", f"/model {tmp_path}/missing", "/model",
        f"/save {file}",
    )  # fmt: skip
    shown = [line.removeprefix("model: ") for line in printed.splitlines() if "model: /" in line]
    assert shown == [model, str(other), str(other), str(other)]
    assert "missing' does not exist" in printed
    assert [role for role, _ in saved(file)] == ["user", "assistant"] * 2


def test_help_lists_every_command_and_unknown_ones_are_reported(say: Say) -> None:
    printed = say("/help", "/nonsense now")
    for name in COMMANDS:
        assert name in printed or name == "/help"
    assert "unknown command /nonsense; /help lists the commands" in printed


def test_line_starting_with_a_path_is_a_question(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    say("/etc/hosts is what?", f"/save {file}")
    assert saved(file)[0] == ("user", "/etc/hosts is what?")


def test_system_prompt_is_shown_changed_and_kept_by_reset(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    printed = say(
        "/system", "/system  Be brief. ", "hello", "/reset", "hi", f"/save {file}",
        options=("--system", "Be kind."),
    )  # fmt: skip
    assert "system prompt: Be kind.\n" in printed and "system prompt: Be brief.\n" in printed
    assert saved(file)[:2] == [("system", "Be brief."), ("user", "hi")]
    assert "system prompt: none" in say("/system")


def test_save_writes_markdown_and_never_overwrites_other_files(say: Say, tmp_path: Path) -> None:
    mine, other = tmp_path / "chat.md", tmp_path / "precious.md"
    other.write_text("precious")
    printed = say(
        "hello", f"/save {mine}", "more", f"/save {mine}", f"/save {other}", "/save",
        f"/save {tmp_path}/no/chat.md", "/reset", f"/save {mine}",
    )  # fmt: skip
    text = mine.read_text()
    assert text.startswith("## You\n\nhello\n\n## Assistant\n\n")
    assert "## You\n\nmore\n" in text
    assert other.read_text() == "precious"
    assert f"not saved: {other}: File exists" in printed
    assert "needs a file name" in printed
    assert "no/chat.md: No such file or directory" in printed
    assert f"not saved: {mine}: File exists" in printed  # another conversation after /reset


def test_chat_in_a_terminal(model: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with Terminal("chat", model, *SETTINGS) as terminal:
        terminal.read_until("/help lists the commands")
        terminal.read_until("> ")
        for line in ("hello", f"/save {file}"):
            terminal.type(line + "\n")
            terminal.read_until("\n")  # its echo
            answered = terminal.read_until("> ")
            assert ("tokens, first after" in answered) == (line == "hello")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.wait() == 0
    assert saved(file)[0] == ("user", "hello")


def test_lines_of_earlier_chats_are_recalled(model: str, tmp_path: Path) -> None:
    env = {"LLAISYS_CACHE": str(tmp_path)}
    for keys in ("/system Be brief.\n", "\x10\n"):  # Ctrl-P: the line before
        with Terminal("chat", model, *SETTINGS, env=env) as terminal:
            terminal.read_until("> ")
            terminal.type(keys)
            terminal.read_until("system prompt: Be brief.")
            terminal.read_until("> ")  # Ctrl-D before it may be lost with the terminal's mode
            terminal.type("\x04")
            assert terminal.wait() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
