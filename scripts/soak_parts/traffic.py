"""Clients of every kind, each in a loop; `Seen` counts their results."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from soak_parts.server import KEYS, now

FAULT_GRACE = 20.0  # seconds after a fault in which errors are expected
PROMPTS = [[5 + i, 9, 17 + i, 33, 12 + i] for i in range(6)]
OTHER_PROTOCOLS: dict[str, dict[str, Any]] = {  # used when the server has them
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/api/chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "options": {"num_predict": 8},
    },
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 8}},
    "/completion": {"prompt": "hi", "n_predict": 8},
}


@dataclass
class Seen:
    """Results of the clients."""

    statuses: Counter[str] = field(default_factory=Counter)  # "actor status code"
    responses: Counter[str] = field(default_factory=Counter)  # complete responses by status
    failures: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    compared: int = 0
    completion_tokens: int = 0
    hangups: int = 0
    sessions: dict[str, int] = field(default_factory=dict)  # name -> number of confirmed messages
    deleted: set[str] = field(default_factory=set)
    health: list[float] = field(default_factory=list)


class Traffic:
    def __init__(self, url: str, models: list[str], seed: int, pause: float) -> None:
        self.models = models
        self.random = random.Random(seed)
        self.pause = pause
        self.seen = Seen()
        self.expected: dict[tuple[str, int, str], list[int]] = {}
        self.last_fault: dict[str, float] = {}  # kind -> end time
        self.stopping = asyncio.Event()
        self.protocols: list[str] = []
        self._clients = {
            name: httpx.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {key['key']}"},
                timeout=300,
                limits=httpx.Limits(max_keepalive_connections=4),
            )
            for name, key in KEYS.items()
        }

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def client(self, name: str | None = None) -> httpx.AsyncClient:
        return self._clients[name or self.random.choice(list(KEYS))]

    def recent(self, *kinds: str) -> bool:
        return any(now() - self.last_fault.get(kind, -1e9) < FAULT_GRACE for kind in kinds)

    # ---- reference run -------------------------------------------------------------------------

    def question(self, model: str, number: int, kind: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": PROMPTS[number],
            "max_tokens": 24,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if kind == "greedy":
            return body | {"temperature": 0}
        return body | {"temperature": 1.0, "top_p": 0.95, "seed": 1234 + number}

    async def quiet_run(self) -> None:
        """Record the reference tokens of every question without other load."""
        paths = (await self.client("alice").get("/openapi.json")).json()["paths"]
        self.protocols = [path for path in OTHER_PROTOCOLS if path in paths]
        for model in self.models:
            for number in range(len(PROMPTS)):
                for kind in ("greedy", "seeded"):
                    body = self.question(model, number, kind)
                    answer = await self.client("alice").post("/v1/completions", json=body)
                    answer.raise_for_status()
                    self.note("quiet", answer)
                    self.expected[model, number, kind] = answer.json()["choices"][0]["token_ids"]

    # ---- bookkeeping ---------------------------------------------------------------------------

    def note(self, actor: str, answer: httpx.Response, *allowed: int) -> bool:
        """Count a complete response and return whether it is a 200. Other statuses must be expected
        or follow a recent fault."""
        status = answer.status_code
        code = ""
        if status >= 400:
            try:
                body = answer.json()
                error = body.get("error", body)
                code = str(error.get("code") if isinstance(error, dict) else error)
            except ValueError:
                code = "not JSON"
        self.seen.statuses[f"{actor} {status} {code}".strip()] += 1
        self.seen.responses[str(status)] += 1
        if status == 200 or status == 201:
            usage = answer.json().get("usage") if actor in ("quiet", "compare", "chat") else None
            self.seen.completion_tokens += usage["completion_tokens"] if usage else 0
            return True
        explained = (
            status in allowed
            or status == 429
            or (status in (500, 503) and self.recent("kill"))
            or (code in ("session_storage_full", "session_storage_failed") and self.recent("disk"))
            or code in ("model_load_timeout", "models_busy")
        )
        if status == 429 and not answer.headers.get("retry-after", "").isdigit():
            explained = False
        if not explained and len(self.seen.failures) < 200:
            self.seen.failures.append(f"{actor}: {status} {code} {answer.text[:200]}")
        return False

    async def loop(self, actor: Callable[[], Awaitable[None]]) -> None:
        while not self.stopping.is_set():
            try:
                await actor()
            except (httpx.TransportError, httpx.StreamError) as error:
                name = actor.__name__
                self.seen.statuses[f"{name} {type(error).__name__}"] += 1
                if not self.recent("kill") and len(self.seen.failures) < 200:
                    self.seen.failures.append(f"{name}: {error!r}")
            await asyncio.sleep(self.random.expovariate(1 / self.pause))

    # ---- actors --------------------------------------------------------------------------------

    async def compare(self) -> None:
        """Compare tokens with the reference run."""
        key = (
            self.random.choice(self.models),
            self.random.randrange(len(PROMPTS)),
            self.random.choice(["greedy", "seeded"]),
        )
        body = self.question(*key)
        answer = await self.client().post("/v1/completions", json=body)
        if self.note("compare", answer):
            choice = answer.json()["choices"][0]
            self.seen.compared += 1
            if choice["token_ids"] != self.expected[key]:
                self.seen.mismatches.append(f"{key}: {choice['token_ids']}")

    async def chat(self) -> None:
        body = self.chat_body()
        self.note("chat", await self.client().post("/v1/chat/completions", json=body))

    def chat_body(self) -> dict[str, Any]:
        text = "word " * self.random.randint(1, 30)
        model = self.random.choice([name for name in self.models if name != "mock"])
        messages = [{"role": "user", "content": text}]
        return {"model": model, "messages": messages, "max_tokens": self.random.randint(1, 24)}

    async def streams(self) -> None:
        """Streams that are read to the end or closed midway."""
        body = self.chat_body() | {"stream": True, "max_tokens": 32}
        leave_after = self.random.choice([None, None, 0, 3])
        async with self.client().stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self.note("streams", answer)
                return
            count, last = 0, ""
            async for line in answer.aiter_lines():
                if leave_after is not None and count >= leave_after:
                    self.seen.hangups += 1
                    self.seen.statuses["streams disconnected"] += 1
                    return
                if line.startswith("data: "):
                    count, last = count + 1, line
            self.seen.statuses["streams 200"] += 1
            self.seen.responses["200"] += 1
            if last != "data: [DONE]":
                self.seen.failures.append(f"a stream ended with {last[:100]}")

    async def hangups(self) -> None:
        """Clients that disconnect before the response."""
        body = self.chat_body() | {"max_tokens": 200, "ignore_eos": True}
        try:
            await self.client().post(
                "/v1/chat/completions", json=body, timeout=self.random.uniform(0.01, 0.5)
            )
        except httpx.TimeoutException:
            self.seen.hangups += 1
            self.seen.statuses["requests disconnected"] += 1

    async def cancels(self) -> None:
        name = f"cancel-{self.random.getrandbits(48):x}"
        body = self.chat_body() | {"max_tokens": 400, "ignore_eos": True}
        client = self.client("alice")
        headers = {"X-Request-Id": name}
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=body, headers=headers)
        )
        await asyncio.sleep(self.random.uniform(0.05, 0.4))
        self.note("cancels", await client.post(f"/v1/requests/{name}/cancel"), 404)
        self.note("cancels", await asking)

    async def tokens(self) -> None:
        client, model = self.client(), self.random.choice(self.models[:1] + self.models[2:])
        text = "some text " * self.random.randint(1, 50)
        answer = await client.post("/tokenize", json={"model": model, "prompt": text})
        if self.note("tokens", answer):
            ids = answer.json()["tokens"]
            back = await client.post("/detokenize", json={"model": model, "tokens": ids})
            if self.note("tokens", back) and back.json()["prompt"] != text:
                self.seen.mismatches.append(f"tokens of {model} do not come back")

    async def wrong(self) -> None:
        """Requests that must be rejected."""
        client = self.client()
        body: Any = self.random.choice(
            [b"{", b'{"messages": 3}', b'{"messages": [], "temperature": 9}', b"[" * 2000]
        )
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/v1/chat/completions", content=body, headers=headers)
        self.note("wrong", answer, 400)
        unknown = {"model": "unknown", "prompt": "x"}
        self.note("wrong", await client.post("/v1/completions", json=unknown), 404)
        self.note("wrong", await httpx.AsyncClient(base_url=client.base_url).get("/v1/models"), 401)

    async def conversations(self) -> None:
        """Sessions of a few turns; some are deleted at the end."""
        client, name = self.client("alice"), f"soak-{self.random.getrandbits(48):x}"
        kept = 0
        for _ in range(self.random.randint(1, 4)):
            body = self.chat_body() | {"session_id": name, "max_tokens": 8}
            if kept:
                body.pop("model")  # stored in the session
            answer = await client.post("/v1/chat/completions", json=body)
            if self.note("conversations", answer):
                kept += 2
                self.seen.sessions[name] = kept
            await asyncio.sleep(self.random.random() * self.pause)
        unwanted = self.random.random() < 0.5 or len(self.seen.sessions) > 200
        if not kept or not unwanted:
            return
        if self.note("conversations", await client.delete(f"/v1/sessions/{name}")):
            del self.seen.sessions[name]
            self.seen.deleted.add(name)

    async def other_protocols(self) -> None:
        if not self.protocols:
            return
        path = self.random.choice(self.protocols)
        model = self.random.choice([name for name in self.models if name != "mock"])
        self.note(
            f"protocol {path}",
            await self.client().post(path, json=OTHER_PROTOCOLS[path] | {"model": model}),
        )

    async def look(self) -> None:
        client = self.client("carol")
        for path in ("/v1/models", "/v1/sessions", "/metrics", "/ready"):
            answer = await client.get(path)
            self.seen.statuses[f"look {answer.status_code}"] += 1
        began = now()
        health = await client.get("/health")
        self.seen.health.append(now() - began)
        if health.status_code != 200:
            self.seen.failures.append(f"/health: {health.text[:200]}")

    def actors(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            *(self.compare, self.compare, self.chat, self.streams, self.hangups, self.cancels),
            *(self.tokens, self.wrong, self.conversations, self.other_protocols, self.look),
        ]


def as_json(seen: Seen) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(vars(seen), default=sorted))
    return data
