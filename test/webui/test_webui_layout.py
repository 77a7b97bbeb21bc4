"""The web page: phone layout, keyboard, accessible names, size of the files."""

from __future__ import annotations

import re
from typing import Any

from markdown_sample import DOCUMENT
from webui_fake_server import WEBUI, FakeServer, Reply
from webui_page import PageDriver


def test_phone_width_has_no_horizontal_scroll(browser: Any, fake: FakeServer) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True
    )
    tester = PageDriver(context, fake.url)
    page = tester.page
    fake.replies["wide"] = Reply.of(DOCUMENT + "\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 300)
    fake.replies["rejected"] = Reply([], status=429, error="z" * 300)
    wide = "Math.max(...['html', '#thread'].map((s) => document.querySelector(s).scrollWidth))"
    assert page.evaluate(wide) <= 360
    tester.ask("wide")
    assert page.evaluate(wide) <= 360
    tester.ask("rejected")
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
    tester.expected_errors = 1
    tester.check()
    context.close()


def test_keyboard_focus_order_and_accessible_names(tester: PageDriver, fake: FakeServer) -> None:
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


def test_file_sizes_and_requests_only_in_client_modules(
    tester: PageDriver, fake: FakeServer
) -> None:
    files = [path for path in WEBUI.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 170_000
    assert all(len(path.read_text().splitlines()) <= 300 for path in files if path.suffix == ".js")
    for path in files:
        text = path.read_text()
        if path.name != "api.js":
            assert not re.search(r"v1/|/metrics|tokenize", text), path.name
        if path.name not in ("api.js", "mcp.js"):
            assert "fetch(" not in text, path.name
        if path.suffix in (".html", ".css"):
            assert not re.search(r"https?://|@import|//[a-z]", text), path.name
    loaded = {url.removeprefix(fake.url) for url in tester.urls}
    names = {path.name for path in files if path.suffix in (".js", ".css")}
    assert names <= loaded, "a file that the page does not use"
