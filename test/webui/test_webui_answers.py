"""The web page: answers that stream, stop, are edited, continued and branched."""

from __future__ import annotations

import pytest
from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver


def test_answer_streams(tester: PageDriver, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["hello"] = Reply(["Good ", "morning, ", "**you**."], gate=gate)
    tester.ask("hello", wait=False)
    tester.see("#stop")
    gate.release()
    tester.until_answer("Good")
    assert "morning" not in tester.answer()
    gate.release(2)
    tester.idle()
    assert tester.answer().startswith("Good morning, you.")
    assert tester.page.locator(".answer strong").inner_text() == "you"
    assert tester.draft() == "" and tester.page.locator("#send").is_disabled()
    body = fake.bodies("/v1/chat/completions")[0]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert "temperature" not in body  # the server's defaults apply


def test_enter_sends_but_not_with_shift_or_during_composition(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("two")
    page.evaluate(
        "document.querySelector('#prompt').dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert tester.draft() == "one\ntwo" and not fake.requests
    page.press("#prompt", "Enter")
    tester.idle()
    assert fake.bodies("/v1/chat/completions")[0]["messages"][0]["content"] == "one\ntwo"
    assert page.locator(".bubble").inner_text() == "one\ntwo"


def test_answer_without_streaming(tester: PageDriver, fake: FakeServer) -> None:
    tester.page.click("#settings-open")
    tester.page.click("#set-stream")
    tester.page.keyboard.press("Escape")
    tester.ask("hello")
    tester.until_answer("You said: hello")
    body = fake.bodies("/v1/chat/completions")[0]
    assert body["stream"] is False and "stream_options" not in body


@pytest.mark.parametrize("how", ["button", "escape"])
def test_cancel_stops_generation(tester: PageDriver, fake: FakeServer, how: str) -> None:
    gate = Gate()
    reply = fake.replies["count"] = Reply([f"{i} " for i in range(500)], gate=gate)
    tester.ask("count", wait=False)
    gate.release(5)
    tester.until_answer("0 1 2 3 4")
    if how == "button":
        tester.page.click("#stop")
    else:
        tester.page.keyboard.press("Escape")
    tester.idle()
    for _ in range(400):  # the server detects the closed connection when it sends
        if reply.gone.wait(0.05):
            break
        gate.release()
    gate.open()
    assert reply.gone.is_set(), "the connection was not closed"
    assert tester.answer() == "0 1 2 3 4"
    assert tester.stored()[0]["messages"][1]["finish"] == "stopped"
    tester.see(".cut button", "Continue")
    tester.ask("next")
    tester.until_answer("You said: next")


def test_cancel_before_first_token_restores_the_input(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["slow"] = Reply(["late"], gate=Gate())
    tester.ask("slow", wait=False)
    tester.see("#stop")
    tester.page.keyboard.press("Escape")
    tester.idle()
    assert tester.draft() == "slow"
    assert tester.page.locator(".message").count() == 0
    assert tester.page.locator(".failure").count() == 0


def test_copy_answer_and_code(tester: PageDriver, fake: FakeServer) -> None:
    tester.context.grant_permissions(["clipboard-read", "clipboard-write"])
    fake.replies["code"] = Reply.of("So:\n\n```js\nlet a = 1;\n\nf(a)\n```\n")
    tester.ask("code")
    page = tester.page
    page.get_by_label("Copy answer").click()
    assert (
        page.evaluate("navigator.clipboard.readText()") == "So:\n\n```js\nlet a = 1;\n\nf(a)\n```\n"
    )
    page.get_by_label("Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "let a = 1;\n\nf(a)\n"
    assert page.locator(".code-language").inner_text() == "js"


def test_edited_message_replaces_the_messages_after_it(
    tester: PageDriver, fake: FakeServer
) -> None:
    tester.ask("first")
    tester.ask("second")
    page = tester.page
    page.locator(".user").first.hover()
    page.get_by_label("Edit message").first.click()
    page.locator(".edit-text").fill("changed")
    page.keyboard.press("Enter")
    tester.until_answer("You said: changed")
    tester.idle()
    assert page.locator(".message").count() == 2
    assert fake.bodies("/v1/chat/completions")[2]["messages"] == [
        {"role": "user", "content": "changed"}
    ]
    page.get_by_label("Earlier version").click()
    tester.until_answer("You said: second")
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    assert page.locator(".edit-text").input_value() == "second"
    page.keyboard.press("Escape")
    assert page.locator(".bubble").last.inner_text() == "second"


def test_continue_a_cut_off_answer(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["story"] = Reply(["Once upon "], finish="length")
    fake.replies["+story"] = Reply(["a **time**."])
    tester.ask("story")
    tester.see(".cut", "token limit")
    tester.page.get_by_role("button", name="Continue").click()
    tester.until_answer("Once upon a time.")
    tester.idle()
    assert tester.page.locator(".cut").count() == 0
    assert tester.stored()[0]["messages"][1]["content"] == "Once upon a **time**."
    body = fake.bodies("/v1/chat/completions")[1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon "}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_branch_into_a_new_chat(tester: PageDriver, fake: FakeServer) -> None:
    tester.ask("first")
    tester.ask("second")
    tester.page.locator(".assistant").first.hover()
    tester.page.get_by_label("Branch into a new chat").first.click()
    assert tester.page.locator(".message").count() == 2
    tester.ask("other")
    assert sorted(len(chat["messages"]) for chat in tester.stored()) == [4, 4]
