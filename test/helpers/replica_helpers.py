"""What tests of several replicas share."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor

from server_helpers import ServerProcess
from wire_helpers import sse_events

COMPLETIONS = "/v1/completions"


def pids(server: ServerProcess) -> dict[int, int]:
    """Return the processes of the replicas by index."""
    return {e["replica"]: e["pid"] for e in server.events() if e.get("message") == "replica up"}


def wait_up(server: ServerProcess) -> None:
    def all_up() -> bool:
        with server.client() as client:
            return client.get("/health").json().get("status") == "ok"

    server.wait_for(all_up, "all replicas")


def ask(server: ServerProcess, prompt: str, max_tokens: int) -> list[int] | str:
    """Return the tokens of an answer, or its error."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != 200:
            return str(response.read())
        for event in sse_events(response):
            if event == "[DONE]":
                break
            data = json.loads(event)
            if "error" in data:
                return str(data["error"]["message"])
            tokens += data["choices"][0].get("token_ids") or []
    return tokens


def ask_all(
    pool: ThreadPoolExecutor, server: ServerProcess, count: int, max_tokens: int
) -> dict[str, Future[list[int] | str]]:
    prompts = [f"question {number} of several" for number in range(count)]
    return {prompt: pool.submit(ask, server, prompt, max_tokens) for prompt in prompts}


def metric(server: ServerProcess, name: str) -> dict[int, float]:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"llaisys:{name}{{")]
    return {int(line.split('replica="')[1][0]): float(line.split()[-1]) for line in found}
