"""`llaisys route`: router processes in front of server processes, and deaths of both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from error_helpers import invalid_input
from http_helpers import reply
from prefork import preforked
from server_helpers import PACKAGE, Gate, ServerProcess, wait_for
from wire_helpers import sse_events

from llaisys.server.engine_client.replicas.router import PrefixRouter
from llaisys.server.route.app import prompt_of
from llaisys.server.route.config import RouteConfig

LONG = 100  # tokens


class Router:
    """A router process."""

    def __init__(self, *urls: str, port: int = 0, options: tuple[str, ...] = ()) -> None:
        arguments = ["route", *urls, "--port", str(port), "--reuse-port"]
        arguments += ["--probe-interval", "0.1", *options]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        self.process = preforked().start("llaisys.__main__", arguments, environment)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        line = self.process.stdout.readline()
        assert line.startswith("llaisys: routing"), line
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()

    def wait_up(self, count: int) -> Router:
        wait_for(lambda: self.metric("route_replica_up") == count, f"{count} replicas")
        return self

    def metric(self, name: str) -> float:
        """The sum over replicas; with several routers on the port, of any of them."""
        lines = httpx.get(f"{self.url}/metrics", verify=False).text.splitlines()
        found = [line for line in lines if line.startswith(f"llaisys:{name}")]
        return sum(float(line.split()[-1]) for line in found)


def wait_both_up(router: Router) -> None:
    """Until two routers on one port see two replicas; a connection reaches one of the two."""
    wait_for(lambda: all(router.metric("route_replica_up") == 2 for _ in range(16)), "both")


def ask(
    url: str, prompt: str, max_tokens: int, begun: set[str] | None = None, **options: Any
) -> list[int] | str:
    """Return the tokens of an answer on a new connection, or its error. The prompt is added to
    `begun` with the first token."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=60, verify=False, **options
        ) as response:
            if response.status_code != 200:
                return str(response.read())
            for event in sse_events(response):
                if event == "[DONE]":
                    return tokens
                data = json.loads(event)
                if "error" in data:
                    return str(data["error"]["code"])
                tokens += data["choices"][0].get("token_ids") or []
                if begun is not None and tokens:
                    begun.add(prompt)
    except httpx.HTTPError as error:
        return type(error).__name__
    return "ended early"


@contextlib.contextmanager
def gated_servers(folder: Path, count: int) -> Iterator[tuple[list[ServerProcess], list[Gate]]]:
    with contextlib.ExitStack() as stack:
        gates = []
        for number in range(count):
            (folder / str(number)).mkdir()
            gates.append(Gate(folder / str(number)))
        started = [stack.enter_context(ServerProcess(env=gate.env)) for gate in gates]
        yield [server.wait_ready() for server in started], gates


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[ServerProcess], list[Gate]]]:
    with gated_servers(tmp_path_factory.mktemp("route"), 2) as found:
        yield found


@pytest.fixture
def servers(scene: tuple[list[ServerProcess], list[Gate]]) -> list[ServerProcess]:
    return scene[0]


@pytest.fixture
def gates(scene: tuple[list[ServerProcess], list[Gate]]) -> Iterator[list[Gate]]:
    yield scene[1]
    for gate in scene[1]:
        gate.open()


def begin(
    pool: ThreadPoolExecutor, gates: list[Gate], servers: list[ServerProcess], url: str
) -> dict[str, Future[list[int] | str]]:
    """12 requests that have received tokens and go on when the gates are opened."""
    begun: set[str] = set()
    for gate in gates:
        gate.order("wait")
    prompts = [f"long {number}" for number in range(12)]
    answers = {prompt: pool.submit(ask, url, prompt, LONG, begun) for prompt in prompts}
    wait_for(lambda: sum(s.load for s in servers) == 12, "12 requests")
    assert min(server.load for server in servers) > 0

    def all_have_begun() -> bool:
        for gate in gates:
            gate.run_steps(1)
        return len(begun) == 12

    wait_for(all_have_begun, "the first token of each")
    return answers


def served(servers: list[ServerProcess]) -> list[float]:
    return [server.metric("request_success_total") for server in servers]


def test_two_routers_share_an_address_and_one_survives_kill_9(
    servers: list[ServerProcess], gates: list[Gate]
) -> None:
    urls = [server.url for server in servers]
    with Router(*urls) as first, Router(*urls, port=first.port) as second:
        wait_both_up(first)
        with ThreadPoolExecutor(16) as pool:
            open_requests = begin(pool, gates, servers, first.url)
            second.process.kill()
            second.process.wait()
            for gate in gates:
                gate.open()
            # New connections work at once, without a retry.
            for number in range(20):
                prompt = f"after the death {number}"
                assert ask(first.url, prompt, 3) == reply(prompt, 3)
            results = {prompt: answer.result() for prompt, answer in open_requests.items()}
        right = [p for p, tokens in results.items() if tokens == reply(p, LONG)]
        assert 0 < len(right) < 12  # the streams of the survivor go on, the others have ended
        assert {results[p] for p in results if p not in right} <= {"RemoteProtocolError"}
        for server in servers:  # the requests of the dead router were cancelled
            server.wait_idle()
        with Router(*urls, port=first.port) as third:  # a new one takes its part
            wait_both_up(third)
            prompts = [f"again {i}" for i in range(10)]
            assert [ask(third.url, p, 3) for p in prompts] == [reply(p, 3) for p in prompts]


def test_turns_of_a_conversation_go_to_one_replica_through_any_router(
    servers: list[ServerProcess],
) -> None:
    urls = [server.url for server in servers]
    with Router(*urls) as first, Router(*reversed(urls)) as second:  # another order of replicas
        first.wait_up(2), second.wait_up(2)
        for number in range(6):
            turns = [{"role": "user", "content": f"question {number} " * 40}]
            used: Counter[int] = Counter()
            for router in (first, second, first, second):
                before = served(servers)
                body = {"messages": turns, "max_tokens": 4}
                answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["message"]["content"] or "-"
                turns += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and then?"},
                ]
                after = served(servers)
                used[0 if after[0] > before[0] else 1] += 1
            assert len(used) == 1, used


def test_dead_and_draining_replicas_get_no_requests(tmp_path: Path) -> None:
    with (
        gated_servers(tmp_path, 3) as (servers, gates),
        Router(*[server.url for server in servers]) as router,
        ThreadPoolExecutor(12) as pool,
    ):
        router.wait_up(3)
        answers = begin(pool, gates, servers, router.url)
        servers[0].process.send_signal(signal.SIGTERM)  # drains: its requests are completed
        os.kill(servers[1].process.pid, signal.SIGKILL)
        for gate in gates:
            gate.open()
        for number in range(8):
            prompt = f"meanwhile {number}"
            assert ask(router.url, prompt, 3) == reply(prompt, 3)
        results = {prompt: answer.result() for prompt, answer in answers.items()}
        wrong = [text for prompt, text in results.items() if text != reply(prompt, LONG)]
        assert 0 < len(wrong) < 12 and set(wrong) == {"replica_lost"}
        assert servers[0].process.wait(30) == 0
        health = httpx.get(f"{router.url}/health").json()
        assert health == {"status": "degraded", "replicas_down": [0, 1]}
        servers[2].process.kill()
        wait_for(lambda: httpx.get(f"{router.url}/health").status_code == 503, "no replica")
        refused = httpx.post(f"{router.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_replica"


def test_disconnect_ends_the_request_on_its_replica(
    servers: list[ServerProcess], gates: list[Gate]
) -> None:
    with Router(*[server.url for server in servers]) as router:
        router.wait_up(2)
        body = {"prompt": "long", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body) as response:
            next(sse_events(response))
            for gate in gates:
                gate.order("wait")
        for server in servers:  # whose engine stands still
            server.wait_for(lambda server=server: server.load == 0, "the end of the request")
        for gate in gates:
            gate.open()
        wait_for(lambda: router.metric("route_replica_load") == 0, "no open work")


def test_everything_else_is_passed_on(servers: list[ServerProcess]) -> None:
    with Router(
        *[server.url for server in servers], options=("--max-body-bytes", "1000")
    ) as router:
        router.wait_up(2)
        direct = httpx.get(f"{servers[0].url}/v1/models").json()
        assert httpx.get(f"{router.url}/v1/models?x=1").json().keys() == direct.keys()
        head = httpx.head(f"{router.url}/")
        assert head.status_code == 200 and "html" in head.headers["content-type"]
        bad = httpx.post(
            f"{router.url}/v1/completions", content=b"{", headers={"X-Request-Id": "mine",
            "Content-Type": "application/json"},
        )  # fmt: skip
        assert bad.status_code == 400 and bad.json()["error"]["request_id"] == "mine"
        assert bad.headers.get_list("x-request-id") == ["mine"]
        assert httpx.get(f"{router.url}/nothing").status_code == 404
        large = httpx.post(f"{router.url}/v1/completions", json={"prompt": "x" * 2000})
        assert large.status_code == 413
        session = httpx.post(f"{router.url}/v1/sessions", json={"title": "t"}).json()
        assert httpx.get(f"{router.url}/v1/sessions/{session['id']}").status_code == 200


def test_sigterm_completes_open_requests(servers: list[ServerProcess], gates: list[Gate]) -> None:
    with Router(*[server.url for server in servers]) as router, ThreadPoolExecutor(1) as pool:
        router.wait_up(2)
        for gate in gates:
            gate.order("wait")
        answer = pool.submit(ask, router.url, "to the end", 60)
        wait_for(lambda: sum(s.load for s in servers) == 1, "a request")
        router.process.terminate()
        for gate in gates:
            gate.open()
        assert answer.result() == reply("to the end", 60)
        assert router.process.wait(30) == 0


def test_prompts_and_conversations_are_found_in_bodies() -> None:
    def found(fields: Any, path: str = "/v1/chat/completions", session: str | None = None) -> Any:
        return prompt_of(path, json.dumps(fields).encode(), "key", session)

    user = {"role": "user", "content": "hello " * 20}
    first = found({"messages": [user], "max_tokens": 7, "n": 2})
    assert (first.max_tokens, first.choices, first.conversation.earlier_tokens) == (7, 2, 0)
    turns = [user, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    second = found({"messages": turns})
    assert second.conversation.key == first.conversation.key
    assert 0 < second.conversation.earlier_tokens < len(second.units)
    assert list(second.units[: len(first.units) - 1]) == list(first.units[:-1])
    assert found({"messages": turns}, session="s").conversation.key == "key\0s"
    assert found({"prompt": "x", "prompt_cache_key": "c"}).conversation.key == "key\0c"
    assert list(found({"prompt": [1, 2, 3]}).units) == [1, 2, 3]
    assert found({"input": "x"}, "/v1/responses") is None  # stored there
    assert found({"input": "x", "store": False}, "/v1/responses") is not None
    without: list[Any] = [[], {"prompt": ""}, {"messages": []}, {"model": "m"}]
    assert [found(fields) for fields in without] == [None] * 4
    assert prompt_of("/v1/completions", b"{", "key", None) is None
    for odd in ({"messages": [1, "x"]}, {"prompt": ["a", "b"], "n": "x"}, {"input": {"a": [None]}}):
        assert found(odd).choices == 1


def test_homes_are_spread_and_stay_when_another_replica_dies() -> None:
    names = [f"http://10.0.0.{i}" for i in range(8)]
    to, other = PrefixRouter(64, 10, 8, names), PrefixRouter(64, 10, 8, names[::-1])
    everyone = set(range(8))
    homes = {f"c{i}": to.home(f"c{i}", everyone) for i in range(800)}
    assert min(Counter(homes.values()).values()) > 60
    for key, home in homes.items():
        assert other.home(key, everyone) == 7 - home
        assert to.home(key, everyone - {3}) == home or home == 3


@pytest.mark.parametrize(
    "url", ["", "10.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/v1"]
)
def test_replica_urls_are_checked(url: str) -> None:
    with invalid_input("replicas"):
        RouteConfig(replicas=(url,))
    with invalid_input("replicas"):
        RouteConfig(replicas=("http://a", "http://a"))
