"""The web page: reasoning content and tool calls, both collapsed."""

from __future__ import annotations

from typing import Any

from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver


def call(index: int, arguments: str = "", **others: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": arguments}
    if "id" in others:
        function["name"] = "weather"
    return {"tool_calls": [{"index": index, "function": function, **others}]}


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}


def test_reasoning_is_collapsed_and_sent_again_as_text(
    tester: PageDriver, fake: FakeServer
) -> None:
    gate = Gate()
    fake.replies["q"] = Reply([thought("Hm, "), thought("**well**."), "Forty-", "two."], gate=gate)
    tester.ask("q", wait=False)
    gate.release(2)
    thoughts = tester.page.locator(".answer .thoughts")
    thoughts.wait_for()
    assert not thoughts.get_attribute("open") and "Thinking" in thoughts.inner_text()
    gate.release(2)
    tester.idle()
    tester.until_answer("Forty-two.")
    assert "Thoughts" in thoughts.inner_text() and "well" not in tester.answer()
    thoughts.locator("summary").click()
    assert thoughts.locator("strong").inner_text() == "well"
    tester.ask("and?")
    sent = fake.bodies("/v1/chat/completions")[1]["messages"][1]
    assert sent["content"] == "<think>\nHm, **well**.\n</think>\n\nForty-two."


def test_calls_are_collapsed_stored_and_sent_again(tester: PageDriver, fake: FakeServer) -> None:
    pieces: list[Any] = ["I look.", call(0, id="call_1", type="function"), call(0, '{"city": ')]
    pieces += [call(0, '"<b>Paris"}'), call(1, id="call_2", type="function"), call(1, "no json")]
    fake.replies["q"] = Reply(pieces, finish="tool_calls")
    tester.ask("q")
    calls = tester.page.locator(".calls details")
    assert calls.count() == 2 and not calls.first.get_attribute("open")
    assert calls.first.locator("summary").inner_text() == "Calls weather"
    calls.first.locator("summary").click()
    assert '"city": "<b>Paris"' in calls.first.inner_text()
    calls.last.locator("summary").click()
    assert "no json" in calls.last.inner_text()
    tester.page.reload()
    tester.page.locator(".calls details").nth(1).wait_for()
    tester.ask("and?")
    sent = fake.bodies("/v1/chat/completions")[1]["messages"][1]
    assert [item["id"] for item in sent["tool_calls"]] == ["call_1", "call_2"]
    assert sent["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "<b>Paris"}',
    }


def test_answer_with_only_a_call_is_stored(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["q"] = Reply([call(0, "{}", id="call_1", type="function")], finish="tool_calls")
    tester.ask("q")
    assert tester.page.locator(".calls details").count() == 1
