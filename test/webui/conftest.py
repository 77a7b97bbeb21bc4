"""Fixtures per test file: a browser, the fake server and a driver of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from webui_fake_server import FakeServer
from webui_page import ARGUMENTS, PageDriver, find_browser


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
