"""`llaisys chat`: streamed answers, commands, a real terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import Terminal

from llaisys.entrypoints.cli import main

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


def test_help_lists_every_command_and_unknown_ones_are_reported(say: Say) -> None:
    printed = say("/help", "/nonsense now")
    for name in ("/continue", "/reset", "/system", "/save", "/exit"):
        assert name in printed
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
            terminal.read_until("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.wait() == 0
    assert saved(file)[0] == ("user", "hello")
