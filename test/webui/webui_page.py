"""A browser, and a person at the web page: what the tests of this folder share.

Needs playwright (in the `test` extra) and a browser: CHROMIUM=/path/to/it, or a Chromium or Chrome
in PATH, or the one of `playwright install chromium`. Without one every test fails and says so.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

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
