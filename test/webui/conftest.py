"""Fixtures: a browser, the fake server and a tab for all files, and a driver of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from webui_fake_server import FakeServer
from webui_page import ARGUMENTS, PageDriver, find_browser, page_driver

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


@cache
def open_stage() -> tuple[FakeServer, Any]:
    """The fake server and a browser context that has the files of the page cached."""
    opened.callback(open_stage.cache_clear)
    context = open_browser().new_context(
        viewport={"width": 1200, "height": 800}, color_scheme="light"
    )
    opened.callback(context.close)
    server = FakeServer().start()
    opened.callback(server.shutdown)
    return server, context


@pytest.fixture
def fake() -> FakeServer:
    server, _ = open_stage()
    server.reset()
    return server


@pytest.fixture
def context() -> Any:
    return open_stage()[1]


@pytest.fixture
def tester(context: Any, fake: FakeServer) -> Iterator[PageDriver]:
    with page_driver(context, fake.url) as tester:
        yield tester
