"""The web page: attached text files, and chats stored on the server."""

from __future__ import annotations

from typing import Any

from webui_fake_server import FakeServer, Reply
from webui_page import PageDriver

CHAT = "/v1/chat/completions"


def attach(tester: PageDriver, *files: tuple[str, bytes]) -> None:
    tester.page.set_input_files(
        "#file-input",
        [{"name": name, "mimeType": "text/plain", "buffer": data} for name, data in files],
    )


def toggle_keep(tester: PageDriver) -> None:
    tester.page.click("#settings-open")
    tester.page.click("#set-keep")
    tester.page.keyboard.press("Escape")


def until(tester: PageDriver, condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        tester.page.wait_for_timeout(25)
    raise AssertionError("timed out")


def test_files_are_sent_before_the_text_and_shown_collapsed(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    attach(tester, ("a.py", b"print('```')\n"), ("b.txt", "Grüße".encode()))
    assert page.locator(".file span").all_inner_texts() == ["a.py · 13 bytes", "b.txt · 7 bytes"]
    page.get_by_label("Remove b.txt").click()
    page.reload()  # attachments are stored with the chat
    tester.see(".file", "a.py")
    tester.ask("Explain")
    content = fake.bodies(CHAT)[0]["messages"][0]["content"]
    assert content == "a.py:\n````\nprint('```')\n````\n\nExplain"
    assert page.locator(".file").count() == 0
    assert page.locator(".bubble").inner_text() == "Explain"
    page.click(".sent-file summary")
    assert page.locator(".sent-file pre").inner_text() == "print('```')\n"


def test_sent_files_are_above_the_text_and_leave_its_width(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    tester.ask("Explain all of these files")
    attach(tester, *((f"a-long-name-of-a-file-{i}.txt", b"x") for i in range(8)))
    tester.ask("Explain all of these files")
    alone, beside = (bubble.bounding_box() for bubble in page.locator(".bubble").all())
    assert beside["width"] == alone["width"] and beside["height"] == alone["height"]
    files = page.locator(".sent-files").bounding_box()
    thread = page.locator("#messages").bounding_box()
    assert files["y"] + files["height"] <= beside["y"]
    assert files["x"] >= thread["x"] and files["width"] <= thread["width"]


def test_file_without_text_is_sent_and_restored_on_failure(
    tester: PageDriver, fake: FakeServer
) -> None:
    tester.expected_errors = 1
    attach(tester, ("notes.md", b"# Notes"))
    fake.replies["notes.md:\n```\n# Notes\n```"] = Reply([], status=500, error="broken")
    tester.page.click("#send")
    tester.see(".failure", "broken")
    tester.see(".file", "notes.md")


def test_binary_and_large_files_are_rejected(tester: PageDriver) -> None:
    attach(tester, ("photo.png", b"\x89PNG\r\n\x1a\n\0\0"))
    tester.see("#toast", "photo.png was not attached: it is not a text file")
    attach(tester, ("big.txt", b"a" * (257 << 10)))
    tester.see("#toast", "it has 257 kB; the limit is 256 kB")
    attach(tester, *((f"{i}.txt", b"x") for i in range(11)))
    tester.see("#toast", "a message may have 10 files")
    assert tester.page.locator(".file").count() == 10


def test_chat_is_stored_on_the_server_while_keep_is_on(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    tester.ask("not kept")
    toggle_keep(tester)
    until(tester, lambda: fake.sessions)
    ((name, session),) = fake.sessions.items()
    assert [m["content"] for m in session["messages"]] == ["not kept", "You said: not kept"]
    tester.ask("more")
    until(tester, lambda: len(fake.sessions[name]["messages"]) == 4)
    page.get_by_label("Edit answer").first.click()
    page.locator(".edit-text").fill("mine")
    page.get_by_role("button", name="Save").click()
    until(tester, lambda: fake.sessions[name]["messages"][1]["content"] == "mine")
    page.locator("#chats li").first.hover()
    page.get_by_label("Delete", exact=False).first.click()
    until(tester, lambda: not fake.sessions)
    page.get_by_role("button", name="Undo").click()
    until(tester, lambda: fake.sessions)
    toggle_keep(tester)
    until(tester, lambda: not fake.sessions)
    assert page.locator(".message").count() == 4


def test_session_of_another_browser_can_be_opened(tester: PageDriver, fake: FakeServer) -> None:
    fake.sessions["theirs"] = {
        "title": "From elsewhere",
        "updated": 1,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "**hi**"},
        ],
    }
    page = tester.page
    page.reload()
    page.locator("#chats section", has_text="On the server").get_by_text("From elsewhere").click()
    assert page.locator(".answer strong").inner_text() == "hi"
    tester.none("#chats h2:has-text('On the server')")
    tester.ask("next")
    until(tester, lambda: len(fake.sessions["theirs"]["messages"]) == 5)
    assert fake.bodies(CHAT)[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_tool_calls_are_stored_on_the_server(tester: PageDriver, fake: FakeServer) -> None:
    """A session comes from another browser, with parsed arguments, and is written back."""
    made = {"name": "add", "arguments": {"a": 2}}
    calls = [{"id": name, "type": "function", "function": made} for name in ("one", "two")]
    fake.sessions["theirs"] = {
        "title": "Sums",
        "updated": 1,
        "messages": [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "two", "content": "<b>5</b>"},
            {"role": "tool", "tool_call_id": "one", "content": "6"},
            {"role": "assistant", "content": "Five."},
        ],
    }
    page = tester.page
    page.reload()
    page.locator("#chats section", has_text="On the server").get_by_text("Sums").click()
    tester.until_answer("Five.")
    for summary in page.locator(".calls summary").all():
        summary.click()
    assert page.locator(".calls .result").all_inner_texts() == ["6", "<b>5</b>"]
    tester.ask("next")
    until(tester, lambda: len(fake.sessions["theirs"]["messages"]) == 7)
    stored = fake.sessions["theirs"]["messages"]
    assert stored[:5] == fake.bodies(CHAT)[0]["messages"][:5]
    assert [m["content"] for m in stored if m["role"] == "tool"] == ["6", "<b>5</b>"]
    assert [made["function"]["arguments"] for made in stored[1]["tool_calls"]] == ['{"a":2}'] * 2


def test_versions_are_stored_on_the_server(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    tester.ask("first")
    tester.ask("second")
    page.locator(".user").first.hover()
    page.get_by_label("Edit message").first.click()
    page.locator(".edit-text").fill("changed")
    page.keyboard.press("Enter")
    tester.until_answer("You said: changed")
    tester.idle()
    toggle_keep(tester)
    until(tester, lambda: fake.sessions)
    page.evaluate("localStorage.clear()")  # as another browser
    fake.sessions["damaged"] = {**next(iter(fake.sessions.values())), "client_state": "[{"}
    page = tester.page = tester.open()
    page.locator("#chats section", has_text="On the server").get_by_text("changed").first.click()
    page.get_by_label("Earlier version").click()
    assert page.locator(".bubble").all_inner_texts() == ["first", "second"]
    until(tester, lambda: len(fake.bodies("/v1/sessions/" + next(iter(fake.sessions)))) == 2)
    stored = next(iter(fake.sessions.values()))
    assert [m["content"] for m in stored["messages"]][::2] == ["first", "second"]
    page.locator("#chats section", has_text="On the server").get_by_text("changed").click()
    tester.until_answer("You said: changed")
    assert page.locator(".count").count() == 0


def test_failed_session_write_is_reported(tester: PageDriver, fake: FakeServer) -> None:
    toggle_keep(tester)
    tester.expected_errors = 1
    fake.sessions_full = True
    tester.ask("hello")
    tester.see("#toast", "not up to date: the sessions are full")
