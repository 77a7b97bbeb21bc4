#!/usr/bin/env python3
"""Write docs/images/webui-*.png: the web page with a real server and the default model.

    scripts/screenshots.py                  all of them
    scripts/screenshots.py phone dark       some of them

Starts `llaisys serve` and Chromium (CHROMIUM=..., or one in PATH); needs playwright. The chats
are greedy (temperature 0), so the answers are those of the model. Speeds are those of the machine.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "images"
ARGUMENTS = "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run".split()
GREEDY = "localStorage.setItem('llaisys:defaults', '{\"temperature\": 0}')"
ANSWER_MS = 120_000
# The same text font on machines with different desktops.
FONTS = """<?xml version="1.0"?><fontconfig><include>/etc/fonts/fonts.conf</include>
<match target="pattern"><test name="family"><string>sans-serif</string></test>
<edit name="family" mode="prepend" binding="strong"><string>Liberation Sans</string></edit>
</match></fontconfig>"""

ASK_CODE = "Write a Python function that checks whether a number is prime"
ASK_LIST = "Give three tips for better sleep"
ASK_TABLE = "List the three states of matter with an example, as a table"
ASK_TEXT = "What is photosynthesis?"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server that runs inside the `with` block."""
    command = [sys.executable, "-m", "llaisys.server", "--port", "0"]
    command += ["--session-file", str(folder / "sessions.sqlite3"), "--webui", str(ROOT / "webui")]
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("llaisys: serving"):
                    yield line.split()[-1]
                    return
            sys.exit("error: the server did not start")
        finally:
            process.terminate()


def main(names: list[str]) -> None:
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    browsers = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, browsers)), None)
    if path is None:
        sys.exit("error: no Chromium found; install it, or set CHROMIUM=/path/to/it")
    OUT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as url,
        sync_playwright() as playwright,
    ):
        fonts = Path(folder) / "fonts.conf"
        fonts.write_text(FONTS)
        browser = playwright.chromium.launch(
            executable_path=path,
            args=ARGUMENTS,
            env={**os.environ, "FONTCONFIG_FILE": str(fonts)},
        )
        for name, (size, scheme, state) in STATES.items():
            if names and name not in names:
                continue
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]},
                color_scheme=scheme,
                device_scale_factor=2 if size[0] < 500 else 1,
            )
            page.add_init_script(GREEDY)
            page.goto(url)
            page.wait_for_selector("#sampling:visible")
            state(page)
            page.mouse.move(size[0] / 2, 4)
            page.wait_for_timeout(250)
            page.screenshot(path=OUT / f"webui-{name}.png")
            print(f"docs/images/webui-{name}.png")
            page.close()
        browser.close()


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.locator(".message.last:not(.writing) .tools").wait_for(timeout=ANSWER_MS)


def chats(page: Any, *texts: str) -> None:
    """Fill the chat list."""
    for text in texts:
        ask(page, text)
        page.click("#new-chat")


def chat(page: Any) -> None:
    chats(page, ASK_TEXT, ASK_LIST)
    ask(page, ASK_CODE)
    page.click("#debug summary")
    page.locator("#debug-facts dd", has_text="%").first.wait_for()


def dark(page: Any) -> None:
    chats(page, ASK_CODE)
    ask(page, ASK_LIST)
    ask(page, ASK_TEXT)


def settings(page: Any) -> None:
    ask(page, ASK_TEXT)
    page.click("#settings-open")


def phone(page: Any) -> None:
    ask(page, ASK_TABLE)


DESK, TALL, PHONE = (1280, 800), (1280, 860), (390, 844)
STATES: dict[str, tuple[tuple[int, int], Any, Callable[[Any], None]]] = {
    "chat": (TALL, "light", chat),
    "dark": (DESK, "dark", dark),
    "settings": (DESK, "light", settings),
    "phone": (PHONE, "light", phone),
}

if __name__ == "__main__":
    main(sys.argv[1:])
