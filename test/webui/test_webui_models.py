"""The web page with several models: load states and switching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess
from webui_fake_server import WEBUI
from webui_page import page_driver


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    paths = [tmp_path / "one", tmp_path / "two"]
    for seed, path in enumerate(paths):
        write_hf_model(path, tiny_config(), seed=seed)
    options = (*map(str, paths), "--webui", str(WEBUI), "--max-num-batched-tokens", "512")
    with ServerProcess(*options, real=True, session_file=tmp_path / "sessions") as process:
        yield process.wait_ready()


def test_chat_switches_to_an_unloaded_model(context: Any, server: ServerProcess) -> None:
    with server.client() as client:

        def state(name: str) -> str:
            cards = client.get("/v1/models").json()["data"]
            return str(next(card["state"] for card in cards if card["id"] == name))

        server.wait_for(lambda: state("one") == "ready", "the first model")
        assert state("two") == "unloaded"
        with page_driver(context, server.url + "/") as tester:
            page = tester.page
            tester.see("#model-name", "one")
            page.click("#settings-open")
            labels = page.locator("#set-model option").all_text_contents()
            assert labels == ["one", "two (unloaded)"]
            page.select_option("#set-model", "two")
            page.fill("#set-max_tokens", "3")
            page.keyboard.press("Escape")
            tester.see("#model-name", "two")
            tester.ask("hello")
            tester.idle()
            assert state("two") == "ready"
            page.click("#settings-open")
            server.wait_for(
                lambda: page.locator("#set-model option").all_text_contents() == ["one", "two"],
                "the page to show it",
            )
    asked = [event for event in server.events() if event.get("route") == "/v1/chat/completions"]
    assert [(event["model"], event["status"]) for event in asked] == [("two", 200)]
