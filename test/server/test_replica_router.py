"""Routing of prompts to replicas."""

from __future__ import annotations

import random

from llaisys.server.engine_client.replicas.router import ANSWER_COST, PrefixRouter, Route

BLOCK = 4


def router(replicas: int = 2, blocks: int = 1000) -> PrefixRouter:
    return PrefixRouter(BLOCK, blocks, replicas)


def assign(
    to: PrefixRouter, prompt: list[int], salt: str = "", max_tokens: int = 1, **options: set[int]
) -> Route:
    alive = options.get("alive", set(range(len(to.load))))
    return to.assign(prompt, salt, max_tokens, 1, alive)


def test_prompt_goes_to_the_cached_prefix() -> None:
    to = router(3)
    first = assign(to, list(range(40)))
    other = assign(to, list(range(100, 140)))
    assert other.replica != first.replica  # the least loaded
    to.done(first)
    to.done(other)
    again = assign(to, [*range(36), 7, 7, 7, 7])
    assert (again.replica, again.cached) == (first.replica, 36)
    assert (again.prompt_work, again.answer_work) == (4, ANSWER_COST)
    assert to.prefilled(again).prompt_work == 0
    assert to.load[again.replica] == ANSWER_COST


def test_only_full_blocks_with_equal_prefix_and_salt_match() -> None:
    to = router()
    assign(to, list(range(40)), salt="alice")
    assert assign(to, list(range(3)), salt="alice").cached == 0
    assert assign(to, list(range(40)), salt="bob").cached == 0
    assert assign(to, [9, *range(1, 40)], salt="alice").cached == 0
    assert assign(to, list(range(42)), salt="alice").cached == 40


def test_busy_replica_loses_to_an_idle_one() -> None:
    to = router()
    prompt = list(range(400))
    first = assign(to, prompt)
    to.done(first)
    while to.load[first.replica] <= len(prompt):  # the other one is idle
        assert assign(to, prompt).replica == first.replica
    assert assign(to, prompt).replica != first.replica


def test_ties_go_to_the_longer_cached_prefix() -> None:
    to = router()
    prompt = list(range(40))
    assert assign(to, prompt).replica == 0
    to.load[:] = [40, 0]  # its load equals the cached tokens
    assert assign(to, prompt).replica == 0


def test_done_work_is_subtracted_and_dead_replicas_are_skipped() -> None:
    to = router(3)
    routes = [assign(to, [i] * 50) for i in range(30)]
    assert all(to.load)
    for number, route in enumerate(routes):
        to.done(to.prefilled(route) if number % 2 else route)
    assert to.load == [0, 0, 0]
    known = assign(to, [0] * 50)
    to.clear(known.replica)
    assert assign(to, [0] * 50, alive={0, 1, 2} - {known.replica}).replica != known.replica
    assert to._matched(known.replica, to._keys([0] * 50, "")) == 0


def test_cached_blocks_are_evicted_in_lru_order() -> None:
    to = router(1, blocks=10)
    assign(to, list(range(0, 20)))
    assign(to, list(range(100, 120)))
    assert assign(to, list(range(0, 20))).cached == 20
    assign(to, list(range(200, 220)))  # evicts the second
    assert assign(to, list(range(0, 20))).cached == 20
    assert assign(to, list(range(100, 120))).cached == 0


def test_shared_prefixes_are_found_and_load_is_balanced() -> None:
    rng = random.Random(5)
    to = PrefixRouter(16, 2000, 4)
    prefixes = [[rng.randrange(50_000) for _ in range(800)] for _ in range(12)]
    open_routes: list[Route] = []
    tokens = known = 0
    for _ in range(1500):
        prompt = prefixes[rng.randrange(12)] + [rng.randrange(50_000) for _ in range(100)]
        route = to.assign(prompt, "", 64, 1, {0, 1, 2, 3})
        tokens, known = tokens + len(prompt), known + route.cached
        open_routes.append(route)
        if len(open_routes) > 40:
            to.done(open_routes.pop(rng.randrange(len(open_routes))))
        assert max(to.load) - min(to.load) <= 4 * (900 + 64 * ANSWER_COST)
    assert known / tokens > 0.7
