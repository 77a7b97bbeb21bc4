#!/usr/bin/env python3
"""Write docs/images/*.png: screenshots of the web page in Chromium, against the fake server.

    scripts/screenshots.py                  all of them
    scripts/screenshots.py phone dark       some of them

Needs playwright and a Chromium (CHROMIUM=..., or one in PATH).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test" / "webui"))
fake = importlib.import_module("webui_fake_server")

OUT = ROOT / "docs" / "images"
ARGUMENTS = "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run".split()

CACHE = """A **KV cache** keeps what attention has already computed, so that a new token costs one \
step instead of a pass over everything before it.

### Without it, and with it

| Tokens so far | Work without | Work with a cache |
|--:|--:|--:|
| 100 | 100 rows | 1 row |
| 1,000 | 1,000 rows | 1 row |
| 10,000 | 10,000 rows | 1 row |

Three things follow from it:

1. **Memory grows** with the context: about `2 × layers × heads × dim` numbers for each token.
2. **Prefixes can be shared.** Two chats that begin alike read the same blocks.
3. Eviction matters: blocks that no request uses go first, the oldest before the others.

> The cache changes what an answer costs, never what it says.
"""
CODE = """Walk both lists at once, and take the smaller head each time:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    \"\"\"Merge two sorted lists in linear time.\"\"\"
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:  # `<=` keeps it stable
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


print(merge([1, 4, 9], [2, 3, 10]))  # [1, 2, 3, 4, 9, 10]
```

It looks at every element once, so the time is `O(n + m)`. The standard library has the same thing,
lazily, as [heapq.merge](https://docs.python.org/3/library/heapq.html#heapq.merge).
"""
SEA = """<think>A town by the sea, two days. Keep it simple: walking, food, water.</think>Two slow \
days, nothing that needs a ticket.

| | Saturday | Sunday |
|---|---|---|
| Morning | Harbour walk, coffee by the boats | Swim before breakfast |
| Noon | Fish soup at the market | Bread, cheese, the old wall |
| Evening | Lighthouse at sunset | The late train home |

Bring a warm jacket: the wind turns after dark.
"""
ASK_CACHE = "Explain how a KV cache makes a language model faster"
ASK_CODE = "Write a Python function that merges two sorted lists"
ASK_SEA = "Plan a weekend in a town by the sea, as a table"


def main(names: list[str]) -> None:
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    browsers = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, browsers)), None)
    if path is None:
        sys.exit("error: no Chromium found; install it, or set CHROMIUM=/path/to/it")
    server = fake.FakeServer().start()
    server.replies = {
        ASK_CACHE: fake.Reply.of(CACHE, delay=0.004, usage=(412, 384)),
        ASK_CODE: fake.Reply.of(CODE, delay=0.004),
        ASK_SEA: fake.Reply.of(SEA, delay=0.004),
        "And what does it cost?": fake.Reply(
            [], status=429, error="the server is full: 320 of 320 sequences are open",
            retry_after=4,
        ),
    }  # fmt: skip
    OUT.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        for name, (size, scheme, state) in STATES.items():
            if names and name not in names:
                continue
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]},
                color_scheme=scheme,
                device_scale_factor=2 if size[0] < 500 else 1,
            )
            page.goto(server.url)
            page.wait_for_selector("#model-name:not(:empty)")
            state(page)
            page.mouse.move(size[0] / 2, 4)
            page.wait_for_timeout(250)
            page.screenshot(path=OUT / f"webui-{name}.png")
            print(f"docs/images/webui-{name}.png")
            page.close()
        browser.close()


def ask(page: Any, text: str, answered: bool = True) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    if answered:
        page.wait_for_selector(".message.last .facts", timeout=20_000)


def chats(page: Any) -> None:
    """Fill the chat list."""
    for text in (ASK_SEA, "Why is the sky blue?", "Translate “good morning” into five languages"):
        ask(page, text)
        page.click("#new-chat")


def chat(page: Any) -> None:
    chats(page)
    ask(page, ASK_CACHE)
    page.click("#debug summary")
    page.locator("#debug-facts", has_text="75 %").wait_for()


def code(page: Any) -> None:
    chats(page)
    ask(page, ASK_CODE)


def settings(page: Any) -> None:
    code(page)
    page.click("#settings-open")
    page.fill("#set-system", "You are a careful programmer. Answer with code first.")
    page.fill("#set-temperature", "0.7")
    page.fill("#set-max_tokens", "512")


def error(page: Any) -> None:
    chats(page)
    ask(page, "Why is the sky blue?")
    ask(page, "And what does it cost?", answered=False)
    page.wait_for_selector(".failure")


def empty(page: Any) -> None:
    page.focus("#prompt")


def phone(page: Any) -> None:
    ask(page, ASK_SEA)


def phone_list(page: Any) -> None:
    for text in (ASK_SEA, "Why is the sky blue?", ASK_CODE):
        ask(page, text)
        page.click("#new-chat-top")
    page.click("#sidebar-toggle")


DESK, PHONE = (1280, 800), (390, 780)
STATES: dict[str, tuple[tuple[int, int], Any, Callable[[Any], None]]] = {
    "empty": (DESK, "light", empty),
    "chat": (DESK, "light", chat),
    "code": (DESK, "light", code),
    "settings": (DESK, "light", settings),
    "error": (DESK, "light", error),
    "dark": (DESK, "dark", chat),
    "dark-code": (DESK, "dark", code),
    "phone": (PHONE, "light", phone),
    "phone-list": (PHONE, "dark", phone_list),
}

if __name__ == "__main__":
    main(sys.argv[1:])
