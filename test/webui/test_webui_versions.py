"""The web page: versions of messages, edited answers, token probabilities, JSON answers."""

from __future__ import annotations

from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver

CHAT = "/v1/chat/completions"


def contents(tester: PageDriver) -> list[str]:
    return [message["content"] for message in tester.stored()[0]["messages"]]


def edit(tester: PageDriver, number: int, text: str) -> None:
    message = tester.page.locator(".message.user").nth(number)
    message.hover()
    message.get_by_label("Edit message").click()
    message.locator(".edit-text").fill(text)
    tester.page.keyboard.press("Enter")


def test_regenerated_answers_are_versions_with_their_follow_ups(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    fake.replies["dice"] = [Reply(["one"]), Reply(["two"]), Reply(["three"])]
    tester.ask("dice")
    tester.ask("and then?")
    page.get_by_label("Regenerate answer").first.click()
    tester.until_answer("two")
    tester.idle()
    assert len(fake.bodies(CHAT)[2]["messages"]) == 1
    assert contents(tester) == ["dice", "two"]
    tester.see(".count", "2 / 2")
    assert page.get_by_label("Later version").is_disabled()
    page.get_by_label("Earlier version").click()
    tester.see(".count", "1 / 2")
    assert contents(tester) == ["dice", "one", "and then?", "You said: and then?"]
    page.reload()  # versions are stored
    tester.see(".count", "1 / 2")
    page.get_by_label("Regenerate answer").first.click()
    tester.until_answer("three")
    tester.idle()
    tester.see(".count", "3 / 3")
    page.get_by_label("Earlier version").click()
    tester.until_answer("two")
    tester.ask("after two")
    assert fake.bodies(CHAT)[-1]["messages"][1]["content"] == "two"
    page.get_by_label("Earlier version").click()
    tester.until_answer("You said: and then?")


def test_failed_regeneration_adds_no_version(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["q"] = [Reply(["good"]), Reply([], status=500, error="broken")]
    tester.ask("q")
    tester.expected_errors = 1
    tester.page.get_by_label("Regenerate answer").click()
    tester.see(".failure", "broken")
    assert contents(tester) == ["q", "good"]
    assert tester.page.get_by_label("Earlier version").count() == 0


def test_edited_messages_are_versions_with_their_answers(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    fake.replies["first"] = [Reply(["one"]), Reply(["two"])]
    tester.ask("first")
    page.get_by_label("Regenerate answer").click()
    tester.until_answer("two")
    tester.idle()
    tester.ask("more")
    edit(tester, 0, "changed")
    tester.until_answer("You said: changed")
    tester.idle()
    assert contents(tester) == ["changed", "You said: changed"]
    assert fake.bodies(CHAT)[-1]["messages"] == [{"role": "user", "content": "changed"}]
    first = page.locator(".message").first
    assert first.locator(".count").inner_text() == "2 / 2"
    first.get_by_label("Earlier version").focus()
    page.keyboard.press("Enter")
    tester.see(".bubble", "first")
    assert contents(tester) == ["first", "two", "more", "You said: more"]
    assert page.locator(".count").all_inner_texts() == ["1 / 2", "2 / 2"]  # the answer's, too
    page.keyboard.press("Enter")  # the focus went to "Later version"
    tester.see(".bubble", "changed")
    page.reload()
    edit(tester, 0, "again")
    tester.until_answer("You said: again")
    tester.idle()
    assert page.locator(".count").all_inner_texts() == ["3 / 3"]
    first.get_by_label("Earlier version").click()
    first.get_by_label("Earlier version").click()
    tester.see(".bubble", "more")
    edit(tester, 1, "less")  # a version within a version
    tester.until_answer("You said: less")
    tester.idle()
    assert page.locator(".count").all_inner_texts() == ["1 / 3", "2 / 2", "2 / 2"]


def test_failed_or_stopped_edit_adds_no_version(tester: PageDriver, fake: FakeServer) -> None:
    tester.ask("q")
    fake.replies["changed"] = Reply([], status=500, error="broken")
    tester.expected_errors = 1
    edit(tester, 0, "changed")
    tester.see(".failure", "broken")
    assert contents(tester) == ["q", "You said: q"]
    assert tester.page.locator(".edit-text").input_value() == "changed"
    fake.replies["changed"] = Reply(["late"], gate=Gate())
    tester.page.keyboard.press("Enter")
    tester.page.click("#stop")
    tester.see(".edit-text")
    assert contents(tester) == ["q", "You said: q"]
    tester.page.keyboard.press("Escape")
    assert tester.page.locator(".count").count() == 0


def test_edited_answer_is_sent_with_the_next_request(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    tester.ask("first")
    tester.ask("second")
    page.get_by_label("Edit answer").first.click()
    page.locator(".edit-text").fill("**mine**")
    page.keyboard.press("Escape")
    assert "You said: first" in page.locator(".answer").first.inner_text()
    page.get_by_label("Edit answer").first.click()
    page.locator(".edit-text").fill("**mine**")
    page.get_by_role("button", name="Save").click()
    assert page.locator(".answer strong").inner_text() == "mine"
    tester.see(".facts", "edited")
    assert page.locator(".message").count() == 4
    tester.ask("third")
    assert fake.bodies(CHAT)[-1]["messages"][1]["content"] == "**mine**"


def test_token_probabilities_are_shown(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    page.click("#settings-open")
    page.click("#set-probabilities")
    page.keyboard.press("Escape")
    fake.replies["q"] = Reply(["Good ", "**day**"], logprob=-0.6931)
    tester.ask("q")
    body = fake.bodies(CHAT)[0]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 5)
    page.get_by_label("Token probabilities").click()
    assert page.locator(".token").all_inner_texts() == ["Good ", "**day**"]
    title = page.locator(".token").last.get_attribute("title")
    assert title == ' 50.0 %  "**day**"\n  5.0 %  "another"'
    assert not page.locator(".answer").is_visible()
    page.get_by_role("button", name="Token probabilities").click()
    assert page.locator(".answer strong").is_visible()


def test_json_answer_is_formatted(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["json"] = Reply.of('{"a":[1,{"b":"<i>"}]}')
    tester.ask("json")
    assert tester.page.locator(".code-language").inner_text() == "json"
    shown = tester.page.locator(".code code").inner_text()
    assert shown == '{\n  "a": [\n    1,\n    {\n      "b": "<i>"\n    }\n  ]\n}\n'
    fake.replies["nearly"] = Reply.of('{"a": oops}')
    tester.ask("nearly")
    assert tester.answer() == '{"a": oops}'


def test_penalties_and_custom_parameters_reach_the_server(
    tester: PageDriver, fake: FakeServer
) -> None:
    page = tester.page
    page.click("#settings-open")
    page.fill("#set-repetition_penalty", "1.1")
    page.fill("#set-presence_penalty", "0.5")
    page.fill("#set-frequency_penalty", "-0.5")
    page.fill("#set-custom", '{"ignore_eos": true, "top_k": 3}')
    page.keyboard.press("Escape")
    tester.ask("q")
    body = fake.bodies(CHAT)[0]
    assert body["repetition_penalty"] == 1.1
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.5, -0.5)
    assert (body["ignore_eos"], body["top_k"]) == (True, 3)
    page.click("#settings-open")
    page.fill("#set-custom", "[1, 2")
    page.locator("#set-custom").blur()
    assert page.locator("#set-custom:invalid").count() == 1
    page.keyboard.press("Escape")
    tester.ask("again")
    assert "ignore_eos" not in fake.bodies(CHAT)[1]
