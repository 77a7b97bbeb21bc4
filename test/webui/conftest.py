"""Fixtures: a browser for all files, and per file the fake server and a driver of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from webui_fake_server import FakeServer
from webui_page import ARGUMENTS, PageDriver, find_browser

opened = ExitStack()


@cache
def open_browser() -> Any:
    """Closed by `opened`, after which the next call opens another one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install 'llaisys[test]'", pytrace=False)
    opened.callback(open_browser.cache_clear)
    playwright = opened.enter_context(sync_playwright())
    browser = playwright.chromium.launch(executable_path=find_browser(playwright), args=ARGUMENTS)
    opened.callback(browser.close)
    return browser


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Playwright leaves an event loop running, with which tests of other folders would fail."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        opened.close()


@pytest.fixture(scope="module")
def browser() -> Any:
    return open_browser()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = FakeServer().start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def shared_context(browser: Any, fake: FakeServer) -> Iterator[Any]:
    """A browser context with the page's files cached, and a page of it to clear localStorage."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
    storage_page = context.new_page()
    storage_page.goto(f"{fake.url}icon.svg")
    yield context, storage_page
    context.close()


@pytest.fixture
def tester(shared_context: Any, fake: FakeServer) -> Iterator[PageDriver]:
    context, storage_page = shared_context
    fake.reset()
    storage_page.evaluate("localStorage.clear()")
    tester = PageDriver(context, fake.url)
    yield tester
    for page in context.pages:
        if page != storage_page:
            page.close()
    tester.check()
