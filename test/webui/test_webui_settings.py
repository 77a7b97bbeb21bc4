"""The web page: chat settings, statistics, themes."""

from __future__ import annotations

import re

from webui_fake_server import MODEL, FakeServer, Reply
from webui_page import PageDriver


def test_settings_are_per_chat_and_sent_to_the_server(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    page.keyboard.press("Control+,")
    page.locator("#settings[open]").wait_for()
    assert page.get_attribute("#set-temperature", "placeholder") == "1"
    page.select_option("#set-model", "another-model")
    for name, value in {
        "system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05",
        "max_tokens": "64", "seed": "7", "stop": "END\n\\n\\n",
    }.items():  # fmt: skip
        page.fill(f"#set-{name}", value)
    page.click("#set-reuse_prefix")
    page.keyboard.press("Escape")
    tester.ask("hello")
    body = fake.bodies("/v1/chat/completions")[0]
    assert body.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    assert body == {
        "model": "another-model", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "max_tokens": 64, "seed": 7, "stop": ["END", "\n\n"], "reuse_prefix": False,
        "stream": True, "stream_options": {"include_usage": True}, "drop_old_turns": True,
        "repetition_detection": {"max_pattern_size": 64, "min_pattern_size": 4, "min_count": 6},
    }  # fmt: skip
    page.click("#new-chat")
    tester.ask("plain")
    assert "temperature" not in fake.bodies("/v1/chat/completions")[1]
    page.reload()
    page.locator("button.chat", has_text="hello").click()
    page.click("#settings-open")
    assert page.input_value("#set-stop") == "END\n\\n\\n"
    page.get_by_role("button", name="Use for new chats").click()
    page.fill("#set-temperature", "-3")  # invalid: not saved
    page.keyboard.press("Escape")
    page.click("#new-chat")
    tester.ask("like the first")
    assert fake.bodies("/v1/chat/completions")[2]["seed"] == 7


def test_sampling_and_token_limit_are_shown(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    tester.see("#sampling", "temperature 1 · top-p 1 · max 1,024 tokens")
    page.click("#sampling")
    tester.see("#settings .hint", "where a field is empty: temperature 1, top-p 1.")
    assert page.evaluate("document.activeElement.id") == "set-max_tokens"
    page.keyboard.type("50")
    page.fill("#set-temperature", "0.2")
    page.fill("#set-top_k", "3")
    page.keyboard.press("Escape")
    tester.see("#sampling", "temperature 0.2 · top-p 1 · max 50 tokens")
    assert "top-k\u00a03" in page.get_attribute("#sampling", "title")
    page.click("#settings-open")
    page.fill("#set-max_tokens", "0")
    page.keyboard.press("Escape")
    tester.see("#sampling", "no token limit")
    page.click("#new-chat")
    tester.see("#sampling", "max 1,024 tokens")


def test_answers_have_a_default_token_limit(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    page.click("#settings-open")
    assert page.get_attribute("#set-max_tokens", "placeholder") == "1024"
    page.keyboard.press("Escape")
    tester.ask("default")
    fake.model_defaults["max_tokens"] = 77
    try:
        page.reload()
        tester.see("#model-name", "SmolLM2")
        page.click("#settings-open")
        assert page.get_attribute("#set-max_tokens", "placeholder") == "77"
        page.keyboard.press("Escape")
        tester.ask("of the server")
        page.click("#settings-open")
        page.fill("#set-max_tokens", "5")
        page.keyboard.press("Escape")
        tester.ask("of the chat")
    finally:
        del fake.model_defaults["max_tokens"]
    limits = [body["max_tokens"] for body in fake.bodies("/v1/chat/completions")]
    assert limits == [1024, 77, 5]


def test_answers_have_a_token_limit_unless_it_is_zero(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    fake.replies["story"] = Reply(["Once upon "], finish="length")
    fake.replies["+story"] = Reply(["a time."])
    tester.ask("story")
    tester.see(".cut", "token limit reached")
    page.get_by_role("button", name="Continue").click()
    tester.until_answer("Once upon a time.")
    tester.idle()
    page.click("#settings-open")
    assert page.get_attribute("#set-max_tokens", "placeholder") == "1024"
    for value in ("50", "0"):
        page.fill("#set-max_tokens", value)
        page.keyboard.press("Escape")
        tester.ask("hello")
        page.click("#settings-open")
    page.fill("#set-max_tokens", "")
    page.fill("#set-custom", '{"max_completion_tokens": 7}')
    page.keyboard.press("Escape")
    tester.ask("hello")
    limits = [body.get("max_tokens") for body in fake.bodies("/v1/chat/completions")]
    assert limits == [1024, 1024, 50, None, None]


def test_model_is_chosen_in_the_header(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    page.select_option("#model-picker", "another-model")
    tester.see("#model-name", "another-model")
    tester.ask("hello")
    page.click("#new-chat")
    tester.see("#model-name", MODEL)
    tester.ask("plain")
    models = [body.get("model") for body in fake.bodies("/v1/chat/completions")]
    assert models == ["another-model", None]
    page.locator("button.chat", has_text="hello").click()
    assert page.input_value("#model-picker") == "another-model"
    page.select_option("#model-picker", MODEL)
    page.reload()
    tester.see("#model-name", MODEL)


def test_statistics_of_the_answer_and_the_server(tester: PageDriver, fake: FakeServer) -> None:
    fake.replies["q"] = Reply(["a "] * 30, delay=0.005, usage=(80, 60))
    tester.ask("q")
    tester.page.click("#debug summary")
    facts = tester.see("#debug-facts", "KV cache used").inner_text()
    tester.see("#debug-facts", "25 %")
    facts = dict(
        zip(
            tester.page.locator("#debug-facts dt").all_inner_texts(),
            tester.page.locator("#debug-facts dd").all_inner_texts(),
            strict=True,
        )
    )
    assert re.fullmatch(r"\d+ ms|\d\.\d\d s", facts["First token"])
    assert re.fullmatch(r"[\d.]+ tok/s", facts["Speed"])
    assert facts["Answer"] == "30 tokens" and facts["Prompt"] == "80 tokens"
    assert facts["Cached"] == "60 (75 %)" and facts["Prefix cache hits"] == "75 %"
    assert facts["Draft acceptance"] == "75 %" and facts["Tokens per step"] == "2.50"
    assert facts["Acceptance per position"] == "90 · 60 %"
    assert facts["Running"] == "2" and facts["Waiting"] == "1" and facts["KV cache used"] == "25 %"
    assert "GPU memory" not in facts
    before = dict(fake.metrics)
    gpu = {"gpu_memory_used_bytes": 3e9, "gpu_memory_total_bytes": 1e10, "gpu_usage_perc": 0.4}
    fake.metrics |= gpu | {"num_requests_waiting": 9.0}
    try:
        tester.see("#debug-facts div", "9")
        tester.see("#debug-facts", "GPU memory")
        tester.see("#debug-facts", "30 %")
        tester.see("#debug-facts", "40 %")
    finally:
        fake.metrics = before


def test_themes(tester: PageDriver) -> None:
    page = tester.page
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    page.get_by_label("Theme: system").click()
    assert page.evaluate(paper) == light
    page.reload()
    page.get_by_label("Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == dark
