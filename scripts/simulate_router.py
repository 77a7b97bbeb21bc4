"""Simulate routing policies over replicas: round robin, least loaded, session hash, prefix.

    python scripts/simulate_router.py [--replicas 4,16,64] [--seconds 120] [--load 2] [--seed 0]

Traffic in the manner of public traces (Azure, BurstGPT): bursts (Gamma intervals), log-normal
lengths of prompts and answers, conversations of several turns whose prompts contain all earlier
ones, system prompts that tenants share (Zipf popularity). A replica prefills sequentially the
uncached part of each prompt (LRU cache of whole blocks) and decodes up to `MAX_SEQS` sequences at a
constant speed. `--load` is the part of the prefill capacity that the traffic would need without any
cache; above 1 it is feasible only with cache hits.

All policies run `engine_client.replicas.router`: `prefix` as in `serve --data-parallel-size`,
`prefix and session` as in `route`. `2 routers`: each request arrives at one of two routers that do
not communicate.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llaisys.server.engine_client.replicas.router import Conversation, PrefixRouter, Route

BLOCK = 64
CACHE_BLOCKS = 4_096  # per replica: 262,144 tokens
PREFILL_RATE = 8_000.0  # tokens/s of a replica
TOKEN_SECONDS = 0.02  # per generated token
MAX_SEQS = 64  # running sequences of a replica
TENANTS = 8  # per replica
BURSTINESS = 4.0  # variance of the intervals, relative to a Poisson process
TURNS = 5.0  # mean
THINK_SECONDS = 20.0  # between an answer and the next turn
MAX_TOKENS = 8_192
# (median, sigma) of log-normal lengths
SYSTEM, TURN, ANSWER = (1_000, 0.8), (100, 1.2), (180, 1.0)


@dataclass(order=True)
class Arrival:
    time: float
    number: int
    prompt: list[int] = field(compare=False)
    rng: random.Random = field(compare=False)  # of the conversation: the same in every policy
    session: int = field(compare=False)
    answer: int = field(compare=False)  # tokens


class Replica:
    """Cached blocks by the hash of their whole prefix, and the times of its two stages."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._prefill_free = 0.0
        self._ends: list[float] = []  # of running sequences

    def serve(self, arrival: Arrival) -> tuple[int, float, float]:
        """(cached tokens, time of the first token, end)."""
        start = max(arrival.time, self._prefill_free)
        while self._ends and self._ends[0] <= start:
            heapq.heappop(self._ends)
        if len(self._ends) >= MAX_SEQS:
            start = max(start, heapq.heappop(self._ends))
        cached = self._take(arrival.prompt)
        first = self._prefill_free = start + (len(arrival.prompt) - cached) / PREFILL_RATE
        end = first + arrival.answer * TOKEN_SECONDS
        heapq.heappush(self._ends, end)
        return cached, first, end

    def _take(self, prompt: list[int]) -> int:
        found, key, hit = 0, 0, True
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            key = hash((key, *prompt[start : start + BLOCK]))
            hit = hit and key in self._blocks
            found += BLOCK * hit
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > CACHE_BLOCKS:
            self._blocks.popitem(last=False)
        return found


class Traffic:
    """Arrivals in order; `answered` adds the next turn of a conversation."""

    def __init__(self, seed: int, replicas: int, load: float, seconds: float) -> None:
        rng = random.Random(seed)
        systems = [_text(rng, SYSTEM) for _ in range(TENANTS * replicas)]
        weights = [1 / (rank + 1) for rank in range(len(systems))]
        self._queue: list[Arrival] = []
        self._number = 0
        # Of a conversation: its prompts, with the earlier turns in each.
        system = sum(w * len(s) for w, s in zip(weights, systems, strict=True)) / sum(weights)
        tokens = TURNS * system + TURNS**2 * (_mean(TURN) + _mean(ANSWER))
        rate = load * replicas * PREFILL_RATE / tokens
        now = 0.0
        while (now := now + rng.gammavariate(1 / BURSTINESS, BURSTINESS / rate)) < seconds:
            session = rng.getrandbits(60)
            own = random.Random(session)
            self._push(now, [*rng.choices(systems, weights)[0], *_text(own, TURN)], own, session)

    def _push(self, time: float, prompt: list[int], rng: random.Random, session: int) -> None:
        self._number += 1
        arrival = Arrival(time, self._number, prompt, rng, session, _length(rng, ANSWER))
        heapq.heappush(self._queue, arrival)

    def __iter__(self) -> Iterator[Arrival]:
        while self._queue:
            yield heapq.heappop(self._queue)

    def answered(self, arrival: Arrival, time: float) -> None:
        rng = arrival.rng
        if rng.random() < 1 - 1 / TURNS and len(arrival.prompt) < 4 * MAX_TOKENS:
            answer = [rng.getrandbits(30) for _ in range(arrival.answer)]
            pause = rng.expovariate(1 / THINK_SECONDS)
            prompt = [*arrival.prompt, *answer, *_text(rng, TURN)]
            self._push(time + pause, prompt, rng, arrival.session)


def _text(rng: random.Random, length: tuple[float, float]) -> list[int]:
    return [rng.getrandbits(30) for _ in range(_length(rng, length))]


def _length(rng: random.Random, length: tuple[float, float]) -> int:
    median, sigma = length
    return min(MAX_TOKENS, 1 + int(median * rng.lognormvariate(0, sigma)))


def _mean(length: tuple[float, float]) -> float:
    median, sigma = length
    return median * 2.718281828 ** (sigma**2 / 2)


class Policy:
    """Assigns requests to replicas. `routers`: each sees a random part of the requests."""

    def __init__(self, name: str, replicas: int, routers: int = 1) -> None:
        self.name = name
        self._replicas = range(replicas)
        self._routers = [PrefixRouter(BLOCK, CACHE_BLOCKS, replicas) for _ in range(routers)]
        self._rng = random.Random(1)
        self._count = 0
        self._begun: dict[int, int] = {}  # session -> tokens of its last prompt and answer

    def assign(self, arrival: Arrival) -> tuple[PrefixRouter, Route]:
        router = self._rng.choice(self._routers)
        key, allowed, conversation = str(arrival.session), list(self._replicas), None
        if self.name == "round robin":
            allowed = [self._count % len(self._replicas)]
        elif self.name == "least loaded":
            allowed = [min(allowed, key=lambda index: (router.load[index], self._rng.random()))]
        elif self.name == "session hash":
            allowed = [router.home(key, allowed)]
        elif self.name.startswith("prefix and session"):
            conversation = Conversation(key, self._begun.get(arrival.session, 0))
        self._count += 1
        self._begun[arrival.session] = len(arrival.prompt) + arrival.answer
        return router, router.assign(arrival.prompt, "", None, 1, allowed, conversation)


def policies(replicas: int) -> list[Policy]:
    names = ("round robin", "least loaded", "session hash", "prefix", "prefix and session")
    several = [Policy(f"{name}, 2 routers", replicas, 2) for name in names[3:]]
    return [*(Policy(name, replicas) for name in names), *several]


def simulate(policy: Policy, replicas: int, traffic: Traffic) -> tuple[float, float, float]:
    """(cached part of the prompt tokens, median and 99th percentile of TTFT in seconds)."""
    engines = [Replica() for _ in range(replicas)]
    work: list[tuple[float, int, partial[Any]]] = []  # (time of its end, number, removal)
    tokens = found = 0
    waits: list[float] = []
    for arrival in traffic:
        while work and work[0][0] <= arrival.time:
            heapq.heappop(work)[2]()
        router, route = policy.assign(arrival)
        cached, first, end = engines[route.replica].serve(arrival)
        decoding = replace(route, prompt_work=0)
        heapq.heappush(work, (first, 2 * arrival.number, partial(router.prefilled, route)))
        heapq.heappush(work, (end, 2 * arrival.number + 1, partial(router.done, decoding)))
        traffic.answered(arrival, end)
        tokens, found = tokens + len(arrival.prompt), found + cached
        waits.append(first - arrival.time)
    waits.sort()
    return found / tokens, waits[len(waits) // 2], waits[int(0.99 * len(waits))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="4,16,64")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--load", type=float, default=2.0, help="1: busy without any cache")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| replicas | policy | hit rate | first token, p50 | p99 |\n|---|---|---|---|---|")
    for replicas in map(int, options.replicas.split(",")):
        for policy in policies(replicas):
            traffic = Traffic(options.seed, replicas, options.load, options.seconds)
            hits, p50, p99 = simulate(policy, replicas, traffic)
            row = f"{replicas} | {policy.name} | {hits:.0%} | {p50:.2f} s | {p99:.2f} s"
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
