"""Simulate the router of `serve --data-parallel-size`, compared with random and least-loaded.

    python scripts/simulate_router.py [--replicas 4,8,16,32,64] [--seconds 600] [--seed 0]

Conversations of many tenants: each tenant has a system prompt (Zipf popularity), each conversation
several turns, and the prompt of a turn contains all earlier ones. A replica serves requests
sequentially: the uncached part of the prompt (LRU cache of whole blocks) at prefill speed, then the
answer at batch decoding speed. Requests arrive at random times at a rate that would load the
replicas to `--load` without any cache; above 1 the load is feasible only with cache hits. The table
shows the cached fraction of prompt tokens and the time to first token.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from llaisys.server.replicas.router import PrefixRouter, Route

BLOCK = 64
CACHE_BLOCKS = 4_096  # per replica: 262,144 tokens
PREFILL_RATE = 8_000.0  # tokens/s
DECODE_RATE = 1_500.0  # tokens/s per replica, over its batch
SYSTEM_TOKENS = 1_500
TURN_TOKENS = 120
ANSWER_TOKENS = 200
TURNS = 6
THINK_SECONDS = 20.0  # between an answer and the next turn


@dataclass(order=True)
class Arrival:
    time: float
    number: int
    prompt: list[int] = field(compare=False)
    turns_left: int = field(compare=False)


class Cache:
    """Cached blocks of a replica, by the hash of their whole prefix."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, prompt: list[int]) -> int:
        """Number of cached tokens; caches the whole prompt."""
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
    """New conversations at random times, and follow-up turns of answered ones."""

    def __init__(self, rng: random.Random, tenants: int, rate: float, seconds: float) -> None:
        self._rng = rng
        self._systems = [
            [rng.getrandbits(30) for _ in range(SYSTEM_TOKENS)] for _ in range(tenants)
        ]
        self._weights = [1 / (rank + 1) for rank in range(tenants)]
        self._count = 0
        self.queue: list[Arrival] = []
        now = 0.0
        while (now := now + rng.expovariate(rate / TURNS)) < seconds:
            system = rng.choices(self._systems, self._weights)[0]
            self._push(now, [*system, *self._text(TURN_TOKENS)], TURNS - 1)

    def _text(self, tokens: int) -> list[int]:
        return [self._rng.getrandbits(30) for _ in range(tokens)]

    def _push(self, time: float, prompt: list[int], turns_left: int) -> None:
        self._count += 1
        heapq.heappush(self.queue, Arrival(time, self._count, prompt, turns_left))

    def answered(self, arrival: Arrival, time: float) -> None:
        if arrival.turns_left:
            more = self._text(ANSWER_TOKENS + TURN_TOKENS)
            pause = self._rng.expovariate(1 / THINK_SECONDS)
            self._push(time + pause, [*arrival.prompt, *more], arrival.turns_left - 1)


Policy = Callable[[list[int], PrefixRouter, random.Random], Route]


def prefix(prompt: list[int], router: PrefixRouter, rng: random.Random) -> Route:
    return router.assign(prompt, "", ANSWER_TOKENS, 1, range(len(router.load)))


def least_loaded(prompt: list[int], router: PrefixRouter, rng: random.Random) -> Route:
    least = min(range(len(router.load)), key=lambda replica: (router.load[replica], rng.random()))
    return _to(least, prompt, router)


def at_random(prompt: list[int], router: PrefixRouter, rng: random.Random) -> Route:
    return _to(rng.randrange(len(router.load)), prompt, router)


def _to(replica: int, prompt: list[int], router: PrefixRouter) -> Route:
    return router.assign(prompt, "", ANSWER_TOKENS, 1, (replica,))


POLICIES: dict[str, Policy] = {"random": at_random, "least loaded": least_loaded, "prefix": prefix}


def simulate(policy: Policy, replicas: int, seconds: float, seed: int, load: float) -> list[float]:
    """[cached fraction of prompt tokens, median and 99th percentile of TTFT in seconds]."""
    rng = random.Random(seed)
    prompt_tokens = SYSTEM_TOKENS + TURN_TOKENS + (TURNS - 1) / 2 * (TURN_TOKENS + ANSWER_TOKENS)
    alone = prompt_tokens / PREFILL_RATE + ANSWER_TOKENS / DECODE_RATE
    traffic = Traffic(rng, 8 * replicas, load * replicas / alone, seconds)
    router = PrefixRouter(BLOCK, CACHE_BLOCKS, replicas)
    caches = [Cache() for _ in range(replicas)]
    free_at = [0.0] * replicas
    open_routes: list[tuple[float, int, Route]] = []
    tokens = found = 0
    waits: list[float] = []
    while traffic.queue:
        arrival = heapq.heappop(traffic.queue)
        while open_routes and open_routes[0][0] <= arrival.time:
            router.done(heapq.heappop(open_routes)[2])
        route = policy(arrival.prompt, router, rng)
        known = caches[route.replica].take(arrival.prompt)
        start = max(arrival.time, free_at[route.replica])
        first = start + (len(arrival.prompt) - known) / PREFILL_RATE
        end = first + ANSWER_TOKENS / DECODE_RATE
        free_at[route.replica] = end
        heapq.heappush(open_routes, (end, arrival.number, route))
        traffic.answered(arrival, end)
        tokens, found = tokens + len(arrival.prompt), found + known
        waits.append(first - arrival.time)
    waits.sort()
    return [found / tokens, waits[len(waits) // 2], waits[int(0.99 * len(waits))]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="4,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--load", type=float, default=1.15, help="1: busy without any cache")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| replicas | policy | found | first token, p50 | p99 |\n|---|---|---|---|---|")
    for replicas in map(int, options.replicas.split(",")):
        for name, policy in POLICIES.items():
            hits, p50, p99 = simulate(policy, replicas, options.seconds, options.seed, options.load)
            print(f"| {replicas} | {name} | {hits:.0%} | {p50:.2f} s | {p99:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
