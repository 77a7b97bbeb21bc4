"""The web page in a real Chromium: against a fake server, whose answers a test decides, and against
the real one with the default model.

Needs playwright (in the `test` extra) and a browser: CHROMIUM=/path/to/it, or a Chromium or Chrome
in PATH, or the one of `playwright install chromium`. Without one every test fails and says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from webui_fake_server import WEBUI, FakeServer, Gate, Reply

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
ARGUMENTS = (
    "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
HOW_TO_GET_ONE = (
    "no browser for the web page's tests: install Chromium (Debian: apt-get install chromium; "
    "elsewhere: python -m playwright install --with-deps chromium), or set CHROMIUM=/path/to/it"
)
REFUSED = re.compile(r"Failed to load resource")  # Chromium's own note for every answer >= 400
TIMEOUT = 20_000  # ms; a busy machine is no failure


def find_browser(playwright: Any) -> str:
    named = os.environ.get("CHROMIUM")
    if named and not Path(named).is_file():
        pytest.fail(f"CHROMIUM={named}: there is no such file", pytrace=False)
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    own = playwright.chromium.executable_path
    if found is None and Path(own).is_file():
        found = own
    if found is None:
        pytest.fail(HOW_TO_GET_ONE, pytrace=False)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install 'llaisys[test]'", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(playwright), args=ARGUMENTS
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = FakeServer().start()
    yield server
    server.shutdown()


class Person:
    """A page and what people do with it. Anything on the console that nobody expects fails."""

    def __init__(self, context: Any, url: str) -> None:
        self.context = context
        self.url = url
        self.troubles: list[str] = []
        self.urls: list[str] = []
        self.expected = 0  # refused requests that the test brings about
        self.page = self.open()

    def open(self) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.urls.append(request.url))
        page.goto(self.url)
        page.locator("#model-name").filter(has_text=re.compile(r"\w")).wait_for()
        return page

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def check(self) -> None:
        refused = [text for text in self.troubles if REFUSED.search(text)]
        others = [text for text in self.troubles if not REFUSED.search(text)]
        assert not others
        assert len(refused) <= self.expected, refused
        outside = [url for url in self.urls if not url.startswith((self.url, "blob:", "data:"))]
        assert not outside

    def ask(self, text: str, wait: bool = True) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        if wait:
            self.idle()

    def idle(self) -> None:
        self.page.locator("#send").wait_for()

    def see(self, selector: str, text: str | None = None) -> Any:
        found = self.page.locator(selector, has_text=text).last
        found.wait_for()
        return found

    def none(self, selector: str, timeout: int = TIMEOUT) -> None:
        """Waits until nothing matches."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_count(0, timeout=timeout)

    def answer(self) -> str:
        return str(self.page.locator(".answer").last.inner_text()).strip()

    def until_answer(self, text: str) -> None:
        self.page.locator(".answer").last.filter(has_text=text).wait_for()

    def draft(self) -> str:
        return str(self.page.input_value("#prompt"))

    def titles(self) -> list[str]:
        return [str(text) for text in self.page.locator(".chat-title").all_inner_texts()]

    def stored(self) -> list[dict[str, Any]]:
        """Every chat in localStorage, the latest first."""
        chats = self.page.evaluate(
            "Object.entries(localStorage).filter(([k]) => k.startsWith('llaisys:chat:'))"
            ".map(([, v]) => JSON.parse(v)).sort((a, b) => b.updated - a.updated)"
        )
        return list(chats)

    def render(self, source: str, size: int | None = None) -> str:
        """The HTML that Markdown becomes, in pieces of `size` characters."""
        return str(
            self.page.evaluate(
                """async ([source, size]) => {
                  const { Markdown } = await import('./markdown.js');
                  const root = document.createElement('div');
                  const markdown = new Markdown(root);
                  for (let i = 0; i < source.length; i += size) {
                    markdown.push(source.slice(i, i + size));
                  }
                  markdown.end();
                  for (const bar of root.querySelectorAll('.code-bar button')) bar.remove();
                  root.normalize();
                  return root.innerHTML;
                }""",
                [source, size or len(source) or 1],
            )
        )


@pytest.fixture(scope="module")
def shelf(browser: Any, fake: FakeServer) -> Iterator[Any]:
    """A context whose cache has the page's files, and a page of it that can empty its storage."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
    janitor = context.new_page()
    janitor.goto(f"{fake.url}icon.svg")
    yield context, janitor
    context.close()


@pytest.fixture
def tester(shelf: Any, fake: FakeServer) -> Iterator[Person]:
    context, janitor = shelf
    fake.reset()
    janitor.evaluate("localStorage.clear()")
    tester = Person(context, fake.url)
    yield tester
    for page in context.pages:
        if page != janitor:
            page.close()
    tester.check()


# ---- asking --------------------------------------------------------------------------------------


def test_answer_is_shown_as_it_comes(tester: Person, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["hello"] = Reply(["Good ", "morning, ", "**you**."], gate=gate)
    tester.ask("hello", wait=False)
    tester.see("#stop")
    gate.let()
    tester.until_answer("Good")
    assert "morning" not in tester.answer()
    gate.let(2)
    tester.idle()
    assert tester.answer().startswith("Good morning, you.")
    assert tester.page.locator(".answer strong").inner_text() == "you"
    assert tester.draft() == "" and tester.page.locator("#send").is_disabled()
    body = fake.bodies("/v1/chat/completions")[0]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert "temperature" not in body  # the server's own defaults stand


def test_enter_sends_shift_enter_does_not_and_input_methods_are_left_alone(
    tester: Person, fake: FakeServer
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


def test_whole_answer_when_streaming_is_off(tester: Person, fake: FakeServer) -> None:
    tester.page.click("#settings-open")
    tester.page.click("#set-stream")
    tester.page.keyboard.press("Escape")
    tester.ask("hello")
    tester.until_answer("You said: hello")
    body = fake.bodies("/v1/chat/completions")[0]
    assert body["stream"] is False and "stream_options" not in body


@pytest.mark.parametrize("how", ["button", "escape"])
def test_cancel_stops_the_tokens(tester: Person, fake: FakeServer, how: str) -> None:
    gate = Gate()
    reply = fake.replies["count"] = Reply([f"{i} " for i in range(500)], gate=gate)
    tester.ask("count", wait=False)
    gate.let(5)
    tester.until_answer("0 1 2 3 4")
    if how == "button":
        tester.page.click("#stop")
    else:
        tester.page.keyboard.press("Escape")
    tester.idle()
    for _ in range(400):  # the server sees the closed connection when it sends
        if reply.gone.wait(0.05):
            break
        gate.let()
    gate.open()
    assert reply.gone.is_set(), "the connection was not closed"
    assert tester.answer() == "0 1 2 3 4"
    assert tester.stored()[0]["messages"][1]["finish"] == "stopped"
    tester.see(".cut button", "Continue")
    tester.ask("next")
    tester.until_answer("You said: next")


def test_cancel_before_the_first_token_gives_the_input_back(
    tester: Person, fake: FakeServer
) -> None:
    fake.replies["slow"] = Reply(["late"], gate=Gate())
    tester.ask("slow", wait=False)
    tester.see("#stop")
    tester.page.keyboard.press("Escape")
    tester.idle()
    assert tester.draft() == "slow"
    assert tester.page.locator(".message").count() == 0
    assert tester.page.locator(".failure").count() == 0


def test_regenerate_replaces_the_answer_and_undo_brings_it_back(
    tester: Person, fake: FakeServer
) -> None:
    fake.replies["dice"] = [Reply(["one"]), Reply(["two"])]
    tester.ask("dice")
    tester.page.get_by_label("Regenerate answer").click()
    tester.until_answer("two")
    tester.idle()
    assert len(fake.bodies("/v1/chat/completions")[1]["messages"]) == 1
    tester.page.get_by_role("button", name="Undo").click()
    tester.until_answer("one")
    assert [m["content"] for m in tester.stored()[0]["messages"]] == ["dice", "one"]


def test_copy_answer_and_code(tester: Person, fake: FakeServer) -> None:
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


def test_edit_a_message_and_go_on_from_there(tester: Person, fake: FakeServer) -> None:
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
    page.get_by_role("button", name="Undo").click()
    tester.until_answer("You said: second")
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    assert page.locator(".edit-text").input_value() == "second"
    page.keyboard.press("Escape")
    assert page.locator(".bubble").last.inner_text() == "second"


@pytest.mark.parametrize("known", [True, False])
def test_continue_a_cut_off_answer(tester: Person, fake: FakeServer, known: bool) -> None:
    """By continue_final_message; where the server refuses it, by the prompt's tokens."""
    fake.knows_continue = known
    fake.replies["story"] = Reply(["Once upon "], finish="length")
    fake.replies["+story" if known else "+tokens"] = Reply(["a **time**."])
    tester.ask("story")
    tester.see(".cut", "limit of tokens")
    tester.expected = 0 if known else 1
    tester.page.get_by_role("button", name="Continue").click()
    tester.until_answer("Once upon a time.")
    tester.idle()
    assert tester.page.locator(".cut").count() == 0
    assert tester.stored()[0]["messages"][1]["content"] == "Once upon a **time**."
    body = fake.bodies("/v1/chat/completions")[1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon "}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    if not known:
        body = fake.bodies("/v1/completions")[0]
        assert body["prompt"] == [1, 2, 3, 4, 5] and body["max_tokens"] == 8192 - 5


def test_branch_into_a_new_chat(tester: Person, fake: FakeServer) -> None:
    tester.ask("first")
    tester.ask("second")
    tester.page.locator(".assistant").first.hover()
    tester.page.get_by_label("Branch into a new chat").first.click()
    assert tester.page.locator(".message").count() == 2
    tester.ask("other")
    assert sorted(len(chat["messages"]) for chat in tester.stored()) == [4, 4]


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 429, 500, 503])
def test_refusal_is_shown_in_place_and_nothing_typed_is_lost(
    tester: Person, fake: FakeServer, status: int
) -> None:
    refusal = Reply([], status=status, error=f"reason {status}")
    refusal.retry_after = 1 if status in (429, 503) else None
    fake.replies["question"] = [refusal, Reply(["fine"])]
    tester.expected = 1
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


def test_offline_is_said_and_the_question_can_be_sent_again(
    tester: Person, fake: FakeServer
) -> None:
    tester.expected = 5
    tester.context.set_offline(True)
    tester.ask("anyone?")
    tester.see(".failure", "offline")
    assert tester.draft() == "anyone?"
    tester.context.set_offline(False)
    tester.page.get_by_role("button", name="Try again").click()
    tester.until_answer("You said: anyone?")


@pytest.mark.parametrize("how", ["error", "drop"])
def test_failure_in_the_middle_keeps_what_came(tester: Person, fake: FakeServer, how: str) -> None:
    end = {"fail_after": 2} if how == "error" else {"drop_after": 2}
    gate = Gate(2)
    pieces = ["half ", "an ", "answer"]
    fake.replies["q"] = Reply(pieces, error="the engine failed", gate=gate, **end)
    fake.replies["+q"] = Reply(["answer"])
    tester.expected = 1
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


def test_failed_edit_and_regenerate_leave_the_chat_as_it_was(
    tester: Person, fake: FakeServer
) -> None:
    full = Reply([], status=429, error="full")
    fake.replies["q"] = [Reply(["good"]), full, Reply(["again"])]
    fake.replies["new"] = full
    tester.expected = 2
    tester.ask("q")
    page = tester.page
    page.get_by_label("Edit message").click()
    page.locator(".edit-text").fill("new")
    page.keyboard.press("Enter")
    tester.see(".failure", "full")
    tester.until_answer("good")
    assert page.locator(".edit-text").input_value() == "new"  # the typed text is given back
    page.keyboard.press("Escape")
    page.get_by_label("Regenerate answer").click()
    tester.see(".failure button", "Try again")
    tester.until_answer("good")
    page.get_by_role("button", name="Try again").click()
    tester.until_answer("again")


def test_api_key_is_asked_for_when_the_server_wants_one(browser: Any, fake: FakeServer) -> None:
    fake.reset()
    fake.api_key = "sesame"
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(fake.url)
    page.locator("#key[open]").wait_for()
    page.fill("#key-input", "sesame")
    page.keyboard.press("Enter")
    page.locator("#model-name", has_text="SmolLM2").wait_for()
    page.fill("#prompt", "hi")
    page.press("#prompt", "Enter")
    page.locator(".answer", has_text="You said: hi").wait_for()
    page.locator("#send").wait_for()
    fake.api_key = "changed"
    page.fill("#prompt", "more")
    page.press("#prompt", "Enter")
    page.locator("#key[open]").wait_for()
    assert page.input_value("#prompt") == "more"
    assert "sesame" not in page.evaluate(
        "Object.values({...localStorage}).filter(v => v[0] == '{').join()"
    )
    context.close()


# ---- chats ---------------------------------------------------------------------------------------


def test_five_chats_stream_at_once_without_mixing(tester: Person, fake: FakeServer) -> None:
    page = tester.page
    gates = [Gate() for _ in range(5)]
    for i, gate in enumerate(gates):
        fake.replies[f"chat {i}"] = Reply([f"c{i}w{k} " for k in range(20)], gate=gate)
        tester.ask(f"chat {i}", wait=False)
        tester.see("#stop")
        if i < 4:
            page.click("#new-chat")
            tester.see("#send")
    assert page.locator("#chats .pulse").count() == 5
    for k in range(1, 20):  # all grow in turns while somebody switches between them
        for gate in gates:
            gate.let()
        shown = (k * 3) % 5
        page.locator("button.chat", has_text=f"chat {shown}").click()
        tester.until_answer(f"c{shown}w{k - 1} ")
        words = tester.answer().split()
        assert words == [f"c{shown}w{n}" for n in range(len(words))]
    for gate in gates:
        gate.open()
    tester.none("#chats .pulse")
    for i in range(5):
        page.locator("button.chat", has_text=f"chat {i}").click()
        assert tester.answer().split() == [f"c{i}w{k}" for k in range(20)]
        assert page.locator(".message").count() == 2
    texts = {chat["title"]: chat["messages"][1]["content"].strip() for chat in tester.stored()}
    assert texts == {f"chat {i}": " ".join(f"c{i}w{k}" for k in range(20)) for i in range(5)}


def test_rename_search_delete_and_undo(tester: Person, fake: FakeServer) -> None:
    page = tester.page
    for text in ("about whales", "about ferns", "about rivers"):
        tester.ask(text)
        page.click("#new-chat")
    row = page.locator("#chats li", has_text="about ferns")
    row.hover()
    row.get_by_label("Rename").click()
    page.locator(".rename").fill("Green things")
    page.keyboard.press("Enter")
    tester.see(".chat-title", "Green things")
    page.keyboard.press("Control+k")
    page.keyboard.type("FERNS said")  # found in the text, not in the name
    tester.see(".chat-title", "Green things")
    assert tester.titles() == ["Green things"]
    page.keyboard.press("Escape")
    assert len(tester.titles()) == 4
    row = page.locator("#chats li", has_text="about whales")
    row.hover()
    row.get_by_label("Delete").click()
    row.wait_for(state="detached")
    assert "about whales" not in [chat["title"] for chat in tester.stored()]
    page.get_by_role("button", name="Undo").click()
    tester.see(".chat-title", "about whales")
    tester.until_answer("You said: about whales")
    page.reload()
    tester.see(".chat-title", "Green things")
    assert "about whales" in tester.titles()


def test_reload_keeps_everything(tester: Person, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["long"] = Reply(["some ", "words ", "never"], gate=gate)
    tester.ask("first")
    tester.page.click("#new-chat")
    tester.ask("long", wait=False)
    gate.let(2)
    tester.until_answer("some words")
    tester.page.fill("#prompt", "half a thought")
    tester.page.reload()
    tester.until_answer("some words")
    tester.see(".cut", "Interrupted")
    assert tester.draft() == "half a thought"
    assert tester.titles() == ["long", "first"]
    gate.open()
    tester.page.locator("button.chat", has_text="first").click()
    tester.until_answer("You said: first")
    assert tester.draft() == ""


def test_a_reload_before_the_first_token_keeps_the_question(
    tester: Person, fake: FakeServer
) -> None:
    fake.replies["slow"] = [Reply(["never"], gate=Gate()), Reply(["now"])]
    tester.ask("slow", wait=False)
    tester.see("#stop")
    tester.page.reload()
    tester.see(".bubble", "slow")
    tester.page.get_by_role("button", name="Answer", exact=True).click()
    tester.until_answer("now")


def test_export_and_import(tester: Person, fake: FakeServer, tmp_path: Path) -> None:
    page = tester.page
    fake.replies["what"] = Reply(["**this**\n\n- and that"])
    tester.ask("what")

    def export(name: str) -> Path:
        page.click("#menu-open")
        with page.expect_download() as waiting:
            page.get_by_role("button", name=name).click()
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        return path

    assert export("as Markdown").read_text() == (
        "# what\n\n## You\n\nwhat\n\n## Assistant\n\n**this**\n\n- and that\n"
    )
    one = json.loads(export("as JSON").read_text())
    assert [m["content"] for m in one["chats"][0]["messages"]] == ["what", "**this**\n\n- and that"]
    everything = export("Export all")
    page.locator("#chats li").hover()
    page.get_by_role("button", name="Delete “what”").click()
    page.set_input_files("#import-file", everything)
    tester.see(".toast", "1 chat was imported")
    page.locator("button.chat", has_text="what").click()
    tester.until_answer("this")
    bad = tmp_path / "bad.json"
    bad.write_text('{"chats": 3}')
    page.set_input_files("#import-file", bad)
    tester.see(".toast", "not imported")


def test_other_tabs_follow(tester: Person, fake: FakeServer) -> None:
    other = tester.open()
    tester.ask("from here")
    other.locator(".chat-title", has_text="from here").wait_for()
    other.locator("button.chat", has_text="from here").click()
    other.locator(".answer", has_text="You said: from here").wait_for()
    other.close()


def test_full_storage_is_said(tester: Person, fake: FakeServer) -> None:
    tester.page.evaluate("localStorage.setItem('ballast', 'x'.repeat(5200000))")
    tester.ask("y" * 100_000)
    tester.see(".toast", "storage is full")
    tester.until_answer("You said")


# ---- settings and numbers ------------------------------------------------------------------------


def test_settings_belong_to_a_chat_and_reach_the_server(tester: Person, fake: FakeServer) -> None:
    page = tester.page
    page.keyboard.press("Control+,")
    page.locator("#settings[open]").wait_for()
    assert page.get_attribute("#set-temperature", "placeholder") == "1"
    page.select_option("#set-model", "another-model")
    for name, value in {
        "system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05",
        "max_tokens": "64", "seed": "7", "stop": "END\n\\n\\n",
    }.items():  # fmt: skip
        page.fill(f"#set-{name}", value)
    page.click("#set-reuse_prefix")
    page.keyboard.press("Escape")
    tester.ask("hello")
    body = fake.bodies("/v1/chat/completions")[0]
    assert body.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    assert body == {
        "model": "another-model", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "max_tokens": 64, "seed": 7, "stop": ["END", "\n\n"], "reuse_prefix": False,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    page.click("#new-chat")
    tester.ask("plain")
    assert "temperature" not in fake.bodies("/v1/chat/completions")[1]
    page.reload()
    page.locator("button.chat", has_text="hello").click()
    page.click("#settings-open")
    assert page.input_value("#set-stop") == "END\n\\n\\n"
    page.get_by_role("button", name="Use for new chats").click()
    page.fill("#set-temperature", "-3")  # marked, and not taken over
    page.keyboard.press("Escape")
    page.click("#new-chat")
    tester.ask("like the first")
    assert fake.bodies("/v1/chat/completions")[2]["seed"] == 7


def test_numbers_of_the_answer_and_of_the_server(tester: Person, fake: FakeServer) -> None:
    fake.replies["q"] = Reply(["a "] * 30, delay=0.005, usage=(80, 60))
    tester.ask("q")
    tester.page.click("#debug summary")
    facts = tester.see("#debug-facts", "KV in use").inner_text()
    tester.see("#debug-facts", "25 %")
    facts = dict(
        zip(
            tester.page.locator("#debug-facts dt").all_inner_texts(),
            tester.page.locator("#debug-facts dd").all_inner_texts(),
            strict=True,
        )
    )
    assert re.fullmatch(r"\d+ ms|\d\.\d\d s", facts["First token"])
    assert re.fullmatch(r"[\d.]+ tok/s", facts["Speed"])
    assert facts["Answer"] == "30 tokens" and facts["Prompt"] == "80 tokens"
    assert facts["Cached"] == "60 (75 %)" and facts["Prefix hits"] == "75 %"
    assert facts["Running"] == "2" and facts["Waiting"] == "1" and facts["KV in use"] == "25 %"
    fake.metrics["num_requests_waiting"] = 9.0
    try:
        tester.see("#debug-facts div", "9")
    finally:
        fake.metrics["num_requests_waiting"] = 1.0


def test_themes(tester: Person) -> None:
    page = tester.page
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    page.get_by_label("Theme: system").click()
    assert page.evaluate(paper) == light
    page.reload()
    page.get_by_label("Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == dark


# ---- what the model writes -----------------------------------------------------------------------

DOCUMENT = """# Title with `code`

A paragraph with **bold**, *italic*, ***both***, ~~gone~~, snake_case_names and 2 * 3 * 4.
Next line. A [link](https://example.org/a_b?c=1&d=(2)), <https://example.com> and https://example.net/x.

- one
- two
  - deeper **x**
    1. deepest
- three

  with a second paragraph

3. counted from three
4. on

> quoted
> > twice
> - and a list

| Left | Right | Mid |
|:--|--:|:-:|
| a | 1 | `x | y` |
| b \\| c | 22 |
not a row of its own

```python
def f(x):  # comment
    return "a" + '''open
still''' + 1
```

1. item with code:
   ```sh
   echo "hi" | cat
   ```
2. after

***

Trailing *unfinished **text with a [link](https://
"""


def test_markdown(tester: Person) -> None:
    html = tester.render(DOCUMENT)
    for part in (
        "<h1>Title with <code>code</code></h1>",
        "<strong>bold</strong>, <em>italic</em>, <em><strong>both</strong></em>, <del>gone</del>, "
        "snake_case_names and 2 * 3 * 4.<br>Next line.",
        'href="https://example.org/a_b?c=1&amp;d=(2)"',
        'href="https://example.net/x"',
        "<li><p>two</p><ul><li><p>deeper <strong>x</strong></p><ol><li><p>deepest</p></li></ol>",
        "<li><p>three</p><p>with a second paragraph</p></li>",
        '<ol start="3"><li><p>counted from three</p></li><li><p>on</p></li></ol>',
        "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote><ul><li><p>and a list</p>",
        '<th scope="col">Left</th><th class="right" scope="col">Right</th>',
        '<td>a</td><td class="right">1</td><td class="center"><code>x | y</code></td>',
        "<td>b | c</td>",
        '<span class="tok-k">def</span> <span class="tok-f">f</span>',
        '<span class="tok-c"># comment</span>',
        "<hr>",
        "Trailing *unfinished **text with a [link](https://",
    ):
        assert part in html, part
    assert re.search(
        r"item with code:</p><div class=\"code\">.*echo.*</div></li><li><p>after", html, re.S
    )


def test_markdown_in_pieces_is_the_same_as_whole(tester: Person) -> None:
    long = " ".join(f"word{i} **bold {i}** `code_{i}`" for i in range(300))
    awkward = "a `b ** c` *d* _e_ [f](g h) ![i](https://j.k/l) \\*m\\* <br>n * o\n" * 3
    edges = (
        "- \n- a\n\n\n1) b\n#\n##x\n| a\n|-\n",
        "x\n---\ny\r\nz\r\n",
        "+a\n-\n--\n*\n**\n_x\n12\n",
    )
    for source in (DOCUMENT, long, awkward, *edges):
        whole = tester.render(source)
        for size in (1, 2, 3, 7, 40):
            assert tester.render(source, size) == whole, (size, source[:40])


def test_no_text_makes_the_renderer_search_for_ever(tester: Person) -> None:
    """Each would take years if the cost of a paragraph were exponential in it."""
    for part in (
        "*a `b` ",
        "**a \\* `",
        "[a [b] `c` ",
        "_a *b ",
        "`a ``b ",
        "![x](",
        "| `a \\| ",
        "~~a ",
    ):
        assert tester.render(part * 1000)
        assert tester.render("- > " * 200 + part * 200, 100)


def test_thoughts_are_folded(tester: Person, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["q"] = Reply.of("<think>\nHm, **well**.\n</think>\n\nForty-two.", 3, gate=gate)
    tester.ask("q", wait=False)
    gate.let(8)
    tester.see(".thoughts summary", "Thinking")
    assert not tester.page.locator(".thoughts-text").is_visible()
    gate.open()
    tester.idle()
    tester.see(".thoughts summary", "Thoughts")
    assert tester.page.locator(".answer > .prose").inner_text() == "Forty-two."
    tester.page.click(".thoughts summary")
    assert tester.page.locator(".thoughts-text").inner_text() == "Hm, well."
    fake.replies["half"] = Reply.of("Let me see.\n</think>\nYes. A `</think>` here stays.", 3)
    tester.ask("half")
    assert tester.page.locator(".answer").last.locator("> .prose").inner_text() == (
        "Yes. A </think> here stays."
    )


CORPUS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg/onload=window.hacked=1><animate onbegin=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<style>*{background:url(//evil.example)}</style><link rel=stylesheet href=//evil.example>",
    "<a href='javascript:window.hacked=1'>x</a><form action=javascript:hacked=1><button>",
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt&colon;window.hacked=1) [x](\x01javascript:hacked=1) [x](java\tscript:hacked=1)",
    "[x](data:text/html;base64,PHNjcmlwdD5oYWNrZWQ9MTwvc2NyaXB0Pg==) [x](vbscript:x) [x](file:///etc)",
    "[x](//evil.example) [x](/v1/models) [x](blob:https://x/1)",
    '[x](https://a.example/"onmouseover="window.hacked=1)',
    '[x](https://a.example/ "t" onclick=hacked=1)',
    "![x](javascript:window.hacked=1) ![x](https://evil.example/pixel.png)",
    "[<img src=x onerror=hacked=1>](https://a.example) **<b onclick=hacked=1>x</b>**",
    "<https://a.example/\"onclick=hacked=1> <javascript:hacked=1>",
    "`<img src=x onerror=hacked=1>`",
    "```<img src=x onerror=hacked=1>\n<script>hacked=1</script>\n```",
    '```js" onclick="hacked=1\n</code></pre><script>hacked=1</script>\n```',
    "| <img src=x onerror=hacked=1>|b|\n|--|--|\n| <script>hacked=1</script> | [y](javascript:1)|",
    "# <script>hacked=1</script>\n> <img src=x onerror=hacked=1>\n- <svg onload=hacked=1>",
    "<think><img src=x onerror=hacked=1></think><script>hacked=1</script>",
    "</think><script>hacked=1</script>",
    "&lt;script&gt;hacked=1&lt;/script&gt; &#x3c;img src=x onerror=hacked=1&#x3e;",
    "__proto__ constructor {{constructor.constructor('hacked=1')()}} ${hacked=1}",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img onerror=hacked=1>'>",
    "\u202e<script>hacked=1</script>\u2066 \x00<script\x00>hacked=1</script>",
]  # fmt: skip
ALLOWED = {
    "p": [], "br": [], "em": [], "strong": [], "del": [], "code": [], "span": ["class"], "hr": [],
    "h1": [], "h2": [], "h3": [], "ul": [], "ol": ["start"], "li": [], "blockquote": [],
    "a": ["href", "rel", "target", "title"], "pre": ["aria-label", "tabindex"], "summary": [],
    "div": ["class", "tabindex", "role", "aria-label"], "details": ["class", "open"], "table": [],
    "thead": [], "tbody": [], "tr": [], "th": ["class", "scope"], "td": ["class"],
    "button": ["aria-label", "class", "title", "type"], "svg": ["aria-hidden", "class", "viewBox"],
    "path": ["class", "d"],
}  # fmt: skip


def test_what_the_model_or_the_user_writes_stays_text(tester: Person, fake: FakeServer) -> None:
    page = tester.page
    for payload in CORPUS:
        for size in (1, 1000):
            question = payload.replace("\x00", "").strip()
            fake.replies[question] = Reply.of(payload, size)
            tester.ask(question)
            assert tester.stored()[0]["messages"][-1]["content"] == payload
            page.locator(".thoughts").evaluate_all(
                "all => all.forEach((one) => { one.open = true })"
            )
    tester.see("#send")
    found = page.evaluate(
        """() => [...document.querySelectorAll('.answer *, .bubble *, #chats *')].map((e) =>
             [e.localName, [...e.attributes].map((a) => a.name), e.getAttribute('href')])"""
    )
    assert len(found) > 200
    chats = {"section": [], "h2": [], "ul": [], "li": ["class", "data-id"], "span": ["class"],
             "button": ["aria-label", "class", "title", "type", "aria-current"]}  # fmt: skip
    for name, attributes, href in found:
        allowed = {*ALLOWED.get(name, ["-"]), *chats.get(name, [])}
        assert name in ALLOWED or name in chats, name
        assert set(attributes) <= allowed, (name, attributes)
        assert href is None or href.startswith(("https://", "http://")), href
    page.mouse.move(600, 400)
    page.locator(".answer a").first.hover()
    assert page.evaluate("typeof window.hacked") == "undefined"
    tester.page.reload()
    tester.see(".message")
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_cost_of_a_token_does_not_grow_with_the_answer(tester: Person, fake: FakeServer) -> None:
    """Counted in nodes that are added, removed or changed, for each kind of block that can grow."""
    kinds = {
        "paragraphs": "".join(f"Some words **{i}** of a paragraph.\n\n" for i in range(400)),
        "one paragraph": " ".join(f"word {i} and `code` or *more*," for i in range(500)),
        "code": "```python\n" + "".join(f"x{i} = f({i}, 'a')  # {i}\n" for i in range(500)),
        "list": "".join(f"- item **{i}** of many\n" for i in range(500)),
        "table": "| a | b |\n|--|--|\n" + "".join(f"| {i} | *{i}* |\n" for i in range(500)),
    }
    for kind, source in kinds.items():
        costs = tester.page.evaluate(
            """async (source) => {
              const { Answer } = await import('./answer.js');
              const root = document.createElement('div');
              document.body.append(root);
              const answer = new Answer(root);
              const observer = new MutationObserver(() => {});
              const options = { childList: true, characterData: true, subtree: true };
              observer.observe(root, options);
              const costs = [];
              for (let i = 0; i < source.length; i += 4) {
                answer.push(source.slice(i, i + 4));
                costs.push(observer.takeRecords().reduce((sum, { addedNodes, removedNodes }) =>
                  sum + 1 + addedNodes.length + removedNodes.length, 0));
              }
              root.remove();
              return costs;
            }""",
            source,
        )
        tenth = len(costs) // 10
        early, late = costs[tenth : 2 * tenth], costs[-tenth:]
        assert max(late) <= max(early) + 10, kind
        assert sum(late) <= 1.2 * sum(early) + 10, kind
        assert max(costs) < 250, (kind, max(costs))


# ---- the page itself -----------------------------------------------------------------------------


def test_phone_width_has_no_sideways_scroll(browser: Any, fake: FakeServer) -> None:
    fake.reset()
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True
    )
    tester = Person(context, fake.url)
    page = tester.page
    fake.replies["wide"] = Reply.of(DOCUMENT + "\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 300)
    fake.replies["refused"] = Reply([], status=429, error="z" * 300)
    wide = "Math.max(...['html', '#thread'].map((s) => document.querySelector(s).scrollWidth))"
    assert page.evaluate(wide) <= 360
    tester.ask("wide")
    assert page.evaluate(wide) <= 360
    tester.ask("refused")
    tester.see(".failure")
    assert page.evaluate(wide) <= 360
    assert not page.locator("#sidebar").is_visible()
    page.click("#sidebar-toggle")
    tester.see("#sidebar .chat-title", "wide")
    assert page.evaluate("document.querySelector('#main').inert")
    page.click("#new-chat")
    page.locator("#sidebar").wait_for(state="hidden")
    page.click("#settings-open")
    page.locator("#settings[open]").wait_for()
    box = page.locator("#settings").bounding_box()
    assert box["x"] >= 0 and box["width"] <= 360
    page.keyboard.press("Escape")
    page.click("#debug summary")
    tester.see("#debug-facts", "25 %")
    assert page.evaluate(wide) <= 360
    for button in page.locator("#main button:visible").all():
        size = button.bounding_box()
        assert size["width"] >= 24 and size["height"] >= 24
    tester.expected = 1
    tester.check()
    context.close()


def test_keyboard_and_names(tester: Person, fake: FakeServer) -> None:
    page = tester.page
    tester.ask("hello")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+Shift+O")
    tester.see("#empty")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # the second chat of the list
    tester.until_answer("You said: hello")
    page.locator("#search").focus()
    page.evaluate(
        "window.seen = []; document.addEventListener('focusin', (e) => seen.push(e.target.id))"
    )
    for _ in range(40):
        page.keyboard.press("Tab")
    seen = page.evaluate("window.seen")
    order = [
        i for i in seen if i in ("sidebar-toggle", "theme", "menu-open", "settings-open", "prompt")
    ]
    assert order[:5] == ["sidebar-toggle", "theme", "menu-open", "settings-open", "prompt"]
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select, pre, summary')]
          .filter((e) => !e.ariaLabel && !e.labels?.length && !e.textContent.trim())
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("main").count() == 1 and page.locator("h1").count() == 1


def test_policy_forbids_inline_code_and_html_strings(tester: Person, fake: FakeServer) -> None:
    response = tester.page.request.get(fake.url)
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    broken = tester.page.evaluate(
        """() => new Promise((resolve) => {
          const seen = [];
          const note = (e) => seen.push(e.effectiveDirective);
          document.addEventListener('securitypolicyviolation', note);
          const element = document.createElement('p');
          element.setAttribute('style', 'color: red');
          const attempts = [() => { element.innerHTML = '<b onclick="hacked=1">x</b>'; },
            () => element.setAttribute('onclick', 'window.hacked = 1'),
            () => { document.createElement('script').text = 'window.hacked = 1'; }];
          for (const attempt of attempts) try { attempt(); } catch { seen.push('thrown'); }
          document.body.append(element);
          element.click();
          setTimeout(() => resolve([seen, typeof window.hacked]), 50);
        })"""
    )
    tester.troubles.clear()  # the browser tells about every one of them
    assert broken[1] == "undefined"
    assert broken[0].count("thrown") == 3 and "style-src-attr" in broken[0]
    source = "".join(path.read_text() for path in WEBUI.glob("*.*"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=\"", source
    )


def test_weight_and_only_one_module_knows_urls(tester: Person, fake: FakeServer) -> None:
    files = [path for path in WEBUI.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000
    assert all(len(path.read_text().splitlines()) <= 300 for path in files if path.suffix == ".js")
    for path in files:
        text = path.read_text()
        if path.name != "api.js":
            assert not re.search(r"v1/|\bfetch\(|/metrics|tokenize", text), path.name
        if path.suffix in (".html", ".css"):
            assert not re.search(r"https?://|@import|//[a-z]", text), path.name
    loaded = {url.removeprefix(fake.url) for url in tester.urls}
    names = {path.name for path in files if path.suffix in (".js", ".css")}
    assert names <= loaded, "a file that the page does not use"


# ---- the real server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from server_helpers import ServerProcess

    folder = tmp_path_factory.mktemp("webui")
    options = ("--webui", str(WEBUI), "--max-model-len", "1024")
    with ServerProcess(*options, real=True, session_file=folder / "sessions.sqlite3") as server:
        yield server.wait_ready()


@pytest.fixture
def real_tester(browser: Any, real: Any) -> Iterator[Person]:
    context = browser.new_context()
    tester = Person(context, real.url + "/")
    yield tester
    tester.check()
    context.close()


def settle(tester: Person, **values: str) -> None:
    tester.page.click("#settings-open")
    for name, value in values.items():
        tester.page.fill(f"#set-{name}", value)
    tester.page.keyboard.press("Escape")


def test_real_chat_continue_and_numbers(real_tester: Person) -> None:
    page = real_tester.page
    settle(real_tester, max_tokens="12", temperature="0")
    real_tester.ask("Count from one to twenty in words.")
    real_tester.see(".cut", "limit of tokens")
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
    assert "–" not in page.locator("#debug-facts").inner_text()


def test_real_prefix_reuse_is_shown(real_tester: Person) -> None:
    settle(
        real_tester,
        max_tokens="4",
        temperature="0",
        system="You know everything about rivers. " * 12,
    )
    real_tester.ask("Name one.")
    real_tester.ask("Name another.")
    assert real_tester.stored()[0]["messages"][3]["usage"]["cached"] > 0


def test_real_five_chats_at_once_are_what_each_is_alone(real_tester: Person, real: Any) -> None:
    """Greedy answers of five chats that stream together equal the ones the server gives alone."""
    page = real_tester.page
    prompts = [
        f"Write a short poem about the {thing}."
        for thing in ("sea", "moon", "wind", "fire", "snow")
    ]
    settle(real_tester, max_tokens="24", temperature="0")
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


def test_real_cancel_frees_the_engine(real_tester: Person, real: Any) -> None:
    settle(real_tester, max_tokens="900")
    real_tester.ask("Tell me a very long story.", wait=False)
    real_tester.page.locator(".answer").filter(has_text=re.compile(r"\w{2}")).wait_for()
    real_tester.page.keyboard.press("Escape")
    real_tester.idle()
    text = real_tester.answer()
    real.wait_idle()
    assert real_tester.answer() == text


def test_real_refusal_names_the_field(real_tester: Person) -> None:
    real_tester.expected = 1
    settle(real_tester, stop="x" * 2000)
    real_tester.ask("hello")
    card = real_tester.see(".failure", "stop")
    assert "web-" in card.inner_text() and real_tester.draft() == "hello"


def test_real_policy(real_tester: Person) -> None:
    headers = real_tester.page.request.get(real_tester.url).headers
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy and "script-src 'self'" in policy
