"""The web page against the real server with the default model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers import Gate, ServerProcess
from webui_fake_server import WEBUI
from webui_page import PageDriver, page_driver


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("webui")
    options = ("--webui", str(WEBUI), "--max-model-len", "1024")
    with ServerProcess(*options, real=True, session_file=folder / "sessions.sqlite3") as server:
        yield server.wait_ready()


@pytest.fixture
def real_tester(context: Any, real: Any) -> Iterator[PageDriver]:
    with page_driver(context, real.url + "/") as tester:
        yield tester


def fill_settings(tester: PageDriver, **values: str) -> None:
    tester.page.click("#settings-open")
    for name, value in values.items():
        tester.page.fill(f"#set-{name}", value)
    tester.page.keyboard.press("Escape")


def test_real_chat_continue_and_statistics(real_tester: PageDriver) -> None:
    page = real_tester.page
    fill_settings(real_tester, max_tokens="12", temperature="0")
    real_tester.ask("Count from one to twenty in words.")
    real_tester.see(".cut", "token limit")
    first = real_tester.stored()[0]["messages"][1]
    assert first["usage"]["completion"] == 12 and first["finish"] == "length"
    page.get_by_role("button", name="Continue").click()
    real_tester.idle()
    second = real_tester.stored()[0]["messages"][1]
    assert second["content"].startswith(first["content"]) and len(second["content"]) > len(
        first["content"]
    )
    page.click("#debug summary")
    real_tester.see("#debug-facts div:last-child", "%")
    facts = page.locator("#debug-facts").inner_text()
    assert "–" not in facts and "Draft acceptance" not in facts  # no speculative decoding


def test_real_prefix_reuse_is_shown(real_tester: PageDriver) -> None:
    fill_settings(
        real_tester,
        max_tokens="4",
        temperature="0",
        system="You know everything about rivers. " * 12,
    )
    real_tester.ask("Name one.")
    real_tester.ask("Name another.")
    assert real_tester.stored()[0]["messages"][3]["usage"]["cached"] > 0


def test_real_concurrent_chats_equal_single_requests(real_tester: PageDriver, real: Any) -> None:
    """Greedy answers of five chats that stream at once equal those of single requests."""
    page = real_tester.page
    prompts = [
        f"Write a short poem about the {thing}."
        for thing in ("sea", "moon", "wind", "fire", "snow")
    ]
    fill_settings(real_tester, max_tokens="24", temperature="0")
    page.click("#settings-open")
    page.get_by_role("button", name="Use for new chats").click()
    page.keyboard.press("Escape")
    for prompt in prompts:
        real_tester.ask(prompt, wait=False)
        real_tester.see(".message.user", prompt)
        page.click("#new-chat")
        real_tester.see("#empty")
    real_tester.none("#chats .pulse", timeout=60_000)
    shown = {chat["messages"][0]["content"]: chat["messages"][1]["content"]
             for chat in real_tester.stored() if chat["messages"]}  # fmt: skip
    with real.client() as client:
        for prompt in prompts:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 24,
                "temperature": 0,
            }
            alone = client.post("/v1/chat/completions", json=body).json()
            assert shown[prompt] == alone["choices"][0]["message"]["content"]


def test_real_cancel_frees_the_engine(real_tester: PageDriver, real: Any) -> None:
    fill_settings(real_tester, max_tokens="900")
    real_tester.ask("Tell me a very long story.", wait=False)
    real_tester.page.locator(".answer").filter(has_text=re.compile(r"\w{2}")).wait_for()
    real_tester.page.keyboard.press("Escape")
    real_tester.idle()
    text = real_tester.answer()
    real.wait_idle()
    assert real_tester.answer() == text


def test_real_rejection_names_the_field(real_tester: PageDriver) -> None:
    real_tester.expected_errors = 1
    fill_settings(real_tester, stop="x" * 2000)
    real_tester.ask("hello")
    card = real_tester.see(".failure", "stop")
    assert "web-" in card.inner_text() and real_tester.draft() == "hello"


def test_real_placeholders_are_the_server_defaults(real_tester: PageDriver, real: Any) -> None:
    with real.client() as client:
        defaults = client.get("/v1/models").json()["data"][0]["default_sampling_params"]
    page = real_tester.page
    page.click("#settings-open")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        shown = page.get_attribute(f"#set-{name}", "placeholder")
        assert shown == (f"{defaults[name]:g}" if name in defaults else "default"), name


def test_real_page_becomes_ready_when_the_model_is_loaded(context: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.order("load 1 4")
    with ServerProcess("--webui", str(WEBUI), env=gate.env) as server:

        def urls() -> list[str]:
            return [event["url"] for event in server.events() if event["message"] == "listening"]

        server.wait_for(lambda: bool(urls()), "the address in the log")
        page = context.new_page()
        page.goto(urls()[0])
        page.locator("#model-name", has_text="loading").wait_for()
        gate.open()
        page.locator("#model-name", has_text="fake").wait_for()
        page.close()


def test_real_content_security_policy(real_tester: PageDriver) -> None:
    headers = real_tester.page.request.get(real_tester.url).headers
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy and "script-src 'self'" in policy
