"""API keys with names and budgets: each limit with a fake clock, then over HTTP."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from error_helpers import invalid_input
from server_helpers import ServerProcess

from llaisys.common.errors import InvalidInputError
from llaisys.server.api_keys import ApiKey, named_keys, read_key_file
from llaisys.server.config import ServerConfig
from llaisys.server.errors import ApiError
from llaisys.server.http.key_budgets import KeyBudget, KeyRing, SlidingWindow


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(budget: KeyBudget, prompt_tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        budget.begin(prompt_tokens)
    assert caught.value.status == 429
    return caught.value


# ---- one key, fake clock -------------------------------------------------------------------------


def test_requests_per_minute_and_retry_after(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", requests_per_minute=3), clock)
    for pause in (0.0, 10.0, 20.0):  # at 1000, 1010 and 1030
        clock.now += pause
        budget.begin(5)
    clock.now = 1030.5
    assert refusal(budget).retry_after == 30  # the first leaves the minute at 1060
    clock.now = 1059.9
    assert refusal(budget).retry_after == 1
    clock.now = 1060.0
    budget.begin(5)
    assert refusal(budget).retry_after == 10
    assert budget.rejected == {"requests_per_minute": 3}
    assert budget.num_requests == 4


def test_retry_after_is_exact(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", requests_per_minute=1), clock)
    for start in (0.0, 0.25, 7.9):
        clock.now += start
        budget.begin(1)
        clock.now += 3.3
        wait = refusal(budget).retry_after
        assert wait is not None
        clock.now += wait - 1
        refusal(budget)
        clock.now += 1
    budget.begin(1)


def test_tokens_per_minute_of_prompts_and_answers(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", tokens_per_minute=100), clock)
    budget.begin(40)
    clock.now = 1010.0
    for _ in range(30):
        budget.spend(1)
    clock.now = 1020.0
    budget.begin(30)  # 100 of 100
    assert refusal(budget, 1).retry_after == 40  # when the first prompt leaves the window, at 1060
    assert refusal(budget, 41).retry_after == 50  # the answer must leave too: 1070
    clock.now = 1060.0
    budget.begin(40)
    assert budget.prompt_tokens == 110 and budget.generation_tokens == 30


def test_answer_over_the_limit_delays_the_next_request(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", tokens_per_minute=10), clock)
    budget.begin(5)
    budget.spend(95)
    assert refusal(budget, 0).retry_after == 60
    clock.now += 60
    budget.begin(10)


def test_prompt_over_the_limit_is_rejected_for_good(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", tokens_per_minute=10), clock)
    with invalid_input("prompt"):
        budget.begin(11)


def test_rejected_request_is_not_counted(clock: Clock) -> None:
    key = ApiKey("k", "a", requests_per_minute=2, tokens_per_minute=10)
    budget = KeyBudget(key, clock)
    budget.begin(8)
    for _ in range(5):
        assert refusal(budget, 8).code == "rate_limit_exceeded"
    clock.now += 60
    budget.begin(10)
    assert budget.num_requests == 2


def test_concurrent_sequences(clock: Clock) -> None:
    budget = KeyBudget(ApiKey("k", "a", max_concurrent=3), clock)
    with budget.reserve(2, retry_after=4):
        with pytest.raises(ApiError) as caught, budget.reserve(2, retry_after=4):
            pass
        assert caught.value.retry_after == 4
        with budget.reserve(1, retry_after=4):
            assert budget.open == 3
    assert budget.open == 0
    with pytest.raises(InvalidInputError), budget.reserve(4, retry_after=4):
        pass


def test_limits_of_keys_are_independent(clock: Clock) -> None:
    ring = KeyRing(named_keys([ApiKey("one", "a", requests_per_minute=1), "two"]), clock)
    owners = [ring.owner(f"Bearer {key}") for key in ("one", "two")]
    first, second = (ring.budget(owner or "") for owner in owners)
    first.begin(1)
    refusal(first)
    for _ in range(100):
        second.begin(10_000)
    assert [ring.name(owner or "") for owner in owners] == ["a", "key2"]


def test_window_merges_entries_and_keeps_the_sum(clock: Clock) -> None:
    window = SlidingWindow()
    for number in range(20_000):
        window.add(number * 0.01, 1)
    assert len(window._entries) < 1300
    assert window.used == sum(amount for _, amount in window._entries)
    assert 6000 <= window.used <= 6010


# ---- the file ------------------------------------------------------------------------------------


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return file


def test_reads_plain_key_file(tmp_path: Path) -> None:
    keys = named_keys(read_key_file(write(tmp_path, "one", "", "  two ", "one")))
    assert keys == (ApiKey("one", "key1", from_file=True), ApiKey("two", "key2", from_file=True))


def test_reads_names_and_budgets(tmp_path: Path) -> None:
    line = {"key": "k", "name": "team-a", "requests_per_minute": 5, "max_concurrent": 2}
    (key,) = read_key_file(write(tmp_path, "# ours", json.dumps(line)))
    assert (key.name, key.requests_per_minute, key.max_concurrent) == ("team-a", 5, 2)
    assert "'k'" not in repr(key)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"key": "sekret", "requests_per_minut": 1}', "did you mean 'requests_per_minute'?"),
        ('{"key": "sekret", "requests_per_minute": 0}', "requests_per_minute is 0; it must be"),
        ('{"key": "sekret", "tokens_per_minute": "5"}', "tokens_per_minute is '5'; it must be"),
        ('{"key": "sekret", "name": "a b"}', "name is 'a b'; it must be"),
        ('{"key": "sekret"', "starts like a JSON object"),
        ('{"name": "a"}', 'there is no "key"'),
        ("schlüssel", "ASCII"),
    ],
)
def test_error_names_the_line_and_never_the_key(tmp_path: Path, line: str, expected: str) -> None:
    file = write(tmp_path, "# a comment", line)
    with pytest.raises(InvalidInputError) as caught:
        read_key_file(file)
    assert expected in str(caught.value)
    assert f"{file} line 2" in str(caught.value)
    assert "sekret" not in str(caught.value)


def test_key_file_without_keys_is_rejected(tmp_path: Path) -> None:
    with invalid_input("api_key_file"):
        read_key_file(write(tmp_path, "# no keys"))


def test_duplicate_key_names_are_rejected() -> None:
    with invalid_input("api_keys"):
        ServerConfig(api_keys=(ApiKey("one", "a"), ApiKey("two", "a")))


def test_usage_survives_key_file_reload(clock: Clock) -> None:
    ring = KeyRing(named_keys([ApiKey("one", "a", requests_per_minute=1), "gone"]), clock)
    owner = ring.owner("Bearer one") or ""
    ring.budget(owner).begin(1)
    ring.replace(named_keys([ApiKey("one", "b", requests_per_minute=1)]))
    refusal(ring.budget(owner))
    assert ring.name(owner) == "b"
    assert ring.owner("Bearer gone") is None


# ---- through the server --------------------------------------------------------------------------

ASK = {"prompt": "hello", "max_tokens": 2, "temperature": 0}


def test_budgets_names_and_sighup_over_http(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        json.dumps({"key": "sekret-a", "name": "team-a", "requests_per_minute": 2}),
        json.dumps({"key": "sekret-b", "name": "team-b", "tokens_per_minute": 8}),
    )
    with ServerProcess("--api-key-file", str(file)) as server:
        server.wait_ready()
        with server.client("sekret-a") as a, server.client("sekret-b") as b:
            for _ in range(2):
                assert a.post("/v1/completions", json=ASK).status_code == 200
            refused = a.post("/v1/completions", json=ASK)
            assert refused.status_code == 429
            assert 55 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert a.get("/v1/models").status_code == 200  # not counted: no generation

            assert b.post("/v1/completions", json=ASK).status_code == 200  # 5 + 2 of 8
            streamed = b.post("/v1/completions", json=ASK | {"stream": True})
            assert streamed.status_code == 429
            assert 55 <= int(streamed.headers["retry-after"]) <= 60
            metrics = b.get("/metrics").text
            assert 'llaisys:key_requests_total{key="team-a"} 2.0' in metrics
            assert 'llaisys:key_generation_tokens_total{key="team-b"} 2.0' in metrics
            limit = 'key="team-b",limit="tokens_per_minute"'
            assert f"llaisys:key_rejected_total{{{limit}}} 1.0" in metrics

            file.write_text('{"key": "sekret-c", "name": "team-c"}\nsekret-a\n')
            server.process.send_signal(signal.SIGHUP)
            server.wait_for(lambda: b.get("/v1/models").status_code == 401, "the new keys")
            assert a.post("/v1/completions", json=ASK).status_code == 200  # no budget

            file.write_text("{")
            server.process.send_signal(signal.SIGHUP)
            kept = "invalid key file; keys unchanged"
            server.wait_for(lambda: any(kept in line for line in server.log), "the refusal")
            assert a.get("/v1/models").status_code == 200
        named = [event.get("key") for event in server.events() if event["message"] == "request"]
        assert {"team-a", "team-b", "key2"} <= set(named)
        assert "sekret" not in "\n".join(server.log)
