"""The web page: errors are shown where they occur, and typed text is never lost."""

from __future__ import annotations

import re

import pytest
from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver


@pytest.mark.parametrize("status", [400, 413, 429, 500, 503])
def test_http_error_is_shown_and_typed_text_is_restored(
    tester: PageDriver, fake: FakeServer, status: int
) -> None:
    rejected = Reply([], status=status, error=f"reason {status}")
    rejected.retry_after = 1 if status in (429, 503) else None
    fake.replies["question"] = [rejected, Reply(["fine"])]
    tester.expected_errors = 1
    tester.ask("before")
    tester.ask("question")
    card = tester.see(".failure", f"reason {status}")
    requests = re.search(r"web-[0-9a-f]{16}", card.inner_text())
    assert requests and str(status) in card.inner_text()
    assert tester.draft() == "question"
    assert tester.page.locator(".message").count() == 2
    card.get_by_role("button", name="Try again").click()  # waits until the countdown is over
    tester.until_answer("fine")
    tester.idle()
    assert tester.draft() == "" and tester.page.locator(".failure").count() == 0
    assert [m["content"] for m in tester.stored()[0]["messages"]][2:] == ["question", "fine"]


def test_offline_is_reported_and_the_question_can_be_retried(
    tester: PageDriver, fake: FakeServer
) -> None:
    tester.expected_errors = 5
    tester.context.set_offline(True)
    tester.ask("anyone?")
    tester.see(".failure", "offline")
    assert tester.draft() == "anyone?"
    tester.context.set_offline(False)
    tester.page.get_by_role("button", name="Try again").click()
    tester.until_answer("You said: anyone?")


@pytest.mark.parametrize("how", ["error", "drop"])
def test_failure_during_streaming_keeps_the_received_text(
    tester: PageDriver, fake: FakeServer, how: str
) -> None:
    end = {"fail_after": 2} if how == "error" else {"drop_after": 2}
    gate = Gate(2)
    pieces = ["half ", "an ", "answer"]
    fake.replies["q"] = Reply(pieces, error="the engine failed", gate=gate, **end)
    fake.replies["+q"] = Reply(["answer"])
    tester.expected_errors = 1
    tester.ask("q", wait=False)
    tester.until_answer("half an")
    gate.open()
    tester.idle()
    card = tester.see(".failure", "the engine failed" if how == "error" else "connection")
    assert "web-" in card.inner_text()
    assert tester.answer() == "half an"
    tester.page.get_by_role("button", name="Continue").click()
    tester.until_answer("half an answer")
    tester.idle()
    assert tester.page.locator(".failure").count() == 0


def test_failed_edit_and_regenerate_leave_the_chat_unchanged(
    tester: PageDriver, fake: FakeServer
) -> None:
    full = Reply([], status=429, error="full")
    fake.replies["q"] = [Reply(["good"]), full, Reply(["again"])]
    fake.replies["new"] = full
    tester.expected_errors = 2
    tester.ask("q")
    page = tester.page
    page.get_by_label("Edit message").click()
    page.locator(".edit-text").fill("new")
    page.keyboard.press("Enter")
    tester.see(".failure", "full")
    tester.until_answer("good")
    assert page.locator(".edit-text").input_value() == "new"  # the typed text is restored
    page.keyboard.press("Escape")
    page.get_by_label("Regenerate answer").click()
    tester.see(".failure button", "Try again")
    tester.until_answer("good")
    page.get_by_role("button", name="Try again").click()
    tester.until_answer("again")


def test_api_key_dialog_opens_when_the_server_requires_a_key(
    tester: PageDriver, fake: FakeServer
) -> None:
    fake.api_key = "sesame"
    tester.expected_errors = 20
    page = tester.page
    page.reload()
    page.locator("#key[open]").wait_for()
    assert not page.locator("#key-error").is_visible()  # no key was entered yet
    page.fill("#key-input", "open")
    page.keyboard.press("Enter")
    page.locator("#key-error", has_text="does not accept this key").wait_for()
    page.fill("#key-input", "sesame")
    page.keyboard.press("Enter")
    page.locator("#model-name", has_text="SmolLM2").wait_for()
    assert not page.locator("#key").is_visible()
    page.fill("#prompt", "hi")
    page.press("#prompt", "Enter")
    page.locator(".answer", has_text="You said: hi").wait_for()
    page.locator("#send").wait_for()
    fake.api_key = "changed"
    page.fill("#prompt", "more")
    page.press("#prompt", "Enter")
    page.locator("#key[open] #key-error", has_text="does not accept this key").wait_for()
    assert page.input_value("#prompt") == "more"
    assert "sesame" not in page.evaluate(
        "Object.values({...localStorage}).filter(v => v[0] == '{').join()"
    )


def test_page_shows_load_progress_and_becomes_ready(tester: PageDriver, fake: FakeServer) -> None:
    fake.loading = {"status": "loading"}
    tester.expected_errors = 100  # one per second
    page = tester.page
    page.reload()
    page.locator("#model-name", has_text=re.compile("loading the model…$")).wait_for()
    for stage, progress, shown in (
        ("fetching the model", None, "fetching the model…$"),
        ("loading weights", 0.0, "loading weights… 0 %$"),
        ("loading weights", 0.429, "loading weights… 42 %$"),
    ):
        fake.loading = {"status": "loading", "stage": stage, "progress": progress}
        page.locator("#model-name", has_text=re.compile(shown)).wait_for()
    fake.loading = None
    page.locator("#model-name", has_text="SmolLM2").wait_for()
    page.fill("#prompt", "hi")
    page.press("#prompt", "Enter")
    page.locator(".answer", has_text="You said: hi").wait_for()
