"""Browser lookup and a driver of the web page for the tests of this folder.

Needs playwright (in the `test` extra) and a browser: CHROMIUM=/path/to/it, or a Chromium or Chrome
in PATH, or the one of `playwright install chromium`. Without a browser every test fails with that
message.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "chrome",
)
ARGUMENTS = (
    "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
NO_BROWSER = (
    "no browser for the web page's tests: install Chromium (Debian: apt-get install chromium; "
    "elsewhere: python -m playwright install --with-deps chromium), or set CHROMIUM=/path/to/it"
)
HTTP_ERROR = re.compile(r"Failed to load resource")  # logged by Chromium for every status >= 400
TIMEOUT = 20_000  # ms; generous for a loaded machine
EMPTY = "icon.svg"  # of the page's origin: shows its localStorage without the page


def find_browser(playwright: Any) -> str:
    named = os.environ.get("CHROMIUM")
    if named and not Path(named).is_file():
        pytest.fail(f"CHROMIUM={named}: there is no such file", pytrace=False)
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    own = playwright.chromium.executable_path
    if found is None and Path(own).is_file():
        found = own
    if found is None:
        pytest.fail(NO_BROWSER, pytrace=False)
    return found


class PageDriver:
    """A page and user actions on it. `check` fails on unexpected console messages."""

    def __init__(self, context: Any, url: str) -> None:
        self.context = context
        self.url = url
        self.problems: list[str] = []
        self.urls: list[str] = []
        self.expected_errors = 0  # HTTP errors that the test causes
        self.other_origins: tuple[str, ...] = ()  # that the page may call
        self._listeners: dict[str, Callable[[Any], None]] = {
            "console": self._console,
            "pageerror": lambda error: self.problems.append(str(error)),
            "dialog": lambda dialog: self.problems.append(f"dialog: {dialog.message}"),
            "request": lambda request: self.urls.append(request.url),
        }
        self.page = self.open()

    def open(self) -> Any:
        """A new tab, or the one that `page_driver` left."""
        left = [page for page in self.context.pages if page.url.endswith(EMPTY)]
        page = left[0] if left else self.context.new_page()
        page.set_default_timeout(TIMEOUT)
        for event, listener in self._listeners.items():
            page.on(event, listener)
        page.goto(self.url)
        page.locator("#model-name").filter(has_text=re.compile(r"\w")).wait_for()
        return page

    def leave(self) -> None:
        """Close all tabs but the first, which the next driver uses: a new one costs 0.5 s of CPU
        time."""
        page, *others = self.context.pages
        for other in others:
            other.close()
        for event, listener in self._listeners.items():
            page.remove_listener(event, listener)
        try:
            page.unroute_all()
            page.goto(self.url + EMPTY)
            page.evaluate("localStorage.clear(); sessionStorage.clear()")
        except Exception:  # it hangs
            page.close()
            raise

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def check(self) -> None:
        http_errors = [text for text in self.problems if HTTP_ERROR.search(text)]
        others = [text for text in self.problems if not HTTP_ERROR.search(text)]
        assert not others
        assert len(http_errors) <= self.expected_errors, http_errors
        own = (self.url, "blob:", "data:", *self.other_origins)
        outside = [url for url in self.urls if not url.startswith(own)]
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
        """Wait until nothing matches."""
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
        """Every chat in localStorage, latest first."""
        chats = self.page.evaluate(
            "Object.entries(localStorage).filter(([k]) => k.startsWith('llaisys:chat:'))"
            ".map(([, v]) => JSON.parse(v)).sort((a, b) => b.updated - a.updated)"
        )
        return list(chats)

    def render(self, source: str, size: int | None = None) -> str:
        """The HTML of Markdown that arrives in pieces of `size` characters."""
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


@contextlib.contextmanager
def page_driver(context: Any, url: str) -> Iterator[PageDriver]:
    tester = PageDriver(context, url)
    yield tester
    tester.leave()
    tester.check()
