"""The web page: the chat list and its storage in the browser."""

from __future__ import annotations

import json
from pathlib import Path

from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver


def test_five_chats_stream_at_once_without_mixing(tester: PageDriver, fake: FakeServer) -> None:
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
    for k in range(1, 20):  # switch between chats while all grow
        for gate in gates:
            gate.release()
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


def test_rename_search_delete_and_undo(tester: PageDriver, fake: FakeServer) -> None:
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


def test_reload_restores_chats_and_draft(tester: PageDriver, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["long"] = Reply(["some ", "words ", "never"], gate=gate)
    tester.ask("first")
    tester.page.click("#new-chat")
    tester.ask("long", wait=False)
    gate.release(2)
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


def test_reload_before_first_token_keeps_the_question(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["slow"] = [Reply(["never"], gate=Gate()), Reply(["now"])]
    tester.ask("slow", wait=False)
    tester.see("#stop")
    tester.page.reload()
    tester.see(".bubble", "slow")
    tester.page.get_by_role("button", name="Answer", exact=True).click()
    tester.until_answer("now")


def test_export_and_import(tester: PageDriver, fake: FakeServer, tmp_path: Path) -> None:
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


def test_other_tabs_are_updated(tester: PageDriver, fake: FakeServer) -> None:
    other = tester.open()
    tester.ask("from here")
    other.locator(".chat-title", has_text="from here").wait_for()
    other.locator("button.chat", has_text="from here").click()
    other.locator(".answer", has_text="You said: from here").wait_for()
    other.close()


def test_full_storage_is_reported(tester: PageDriver, fake: FakeServer) -> None:
    tester.page.evaluate("localStorage.setItem('ballast', 'x'.repeat(5200000))")
    tester.ask("y" * 100_000)
    tester.see(".toast", "storage is full")
    tester.until_answer("You said")
