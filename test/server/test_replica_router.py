"""Which replica takes a prompt."""

from __future__ import annotations

import random

from llaisys.server.replicas.router import ANSWER_COST, PrefixRouter, Route

BLOCK = 4


def router(replicas: int = 2, blocks: int = 1000) -> PrefixRouter:
    return PrefixRouter(BLOCK, blocks, replicas)


def assign(
    to: PrefixRouter, prompt: list[int], salt: str = "", max_tokens: int = 1, **options: set[int]
) -> Route:
    alive = options.get("alive", set(range(len(to.load))))
    return to.assign(prompt, salt, max_tokens, 1, alive)


def test_a_prompt_goes_where_its_beginning_has_been_computed() -> None:
    to = router(3)
    first = assign(to, list(range(40)))
    other = assign(to, list(range(100, 140)))
    assert other.replica != first.replica  # the one with the least to do
    to.done(first)
    to.done(other)
    again = assign(to, [*range(36), 7, 7, 7, 7])
    assert (again.replica, again.cached) == (first.replica, 36)
    assert again.work == 4 + ANSWER_COST


def test_only_full_blocks_with_the_same_beginning_and_salt_count() -> None:
    to = router()
    assign(to, list(range(40)), salt="alice")
    assert assign(to, list(range(3)), salt="alice").cached == 0
    assert assign(to, list(range(40)), salt="bob").cached == 0
    assert assign(to, [9, *range(1, 40)], salt="alice").cached == 0
    assert assign(to, list(range(42)), salt="alice").cached == 40


def test_a_replica_that_would_be_done_later_all_the_same_does_not_get_more() -> None:
    to = router()
    prompt = list(range(400))
    first = assign(to, prompt)
    to.done(first)
    while to.load[first.replica] <= len(prompt):  # the other one has nothing to do
        assert assign(to, prompt).replica == first.replica
    assert assign(to, prompt).replica != first.replica


def test_of_equals_the_one_that_knows_more_is_taken() -> None:
    to = router()
    prompt = list(range(40))
    assert assign(to, prompt).replica == 0
    to.load[:] = [40, 0]  # as much to do as it would save
    assert assign(to, prompt).replica == 0


def test_work_that_is_done_counts_no_more_and_the_dead_get_none() -> None:
    to = router(3)
    routes = [assign(to, [i] * 50) for i in range(30)]
    assert all(to.load)
    for route in routes:
        to.done(route)
    assert to.load == [0, 0, 0]
    known = assign(to, [0] * 50)
    to.clear(known.replica)
    assert assign(to, [0] * 50, alive={0, 1, 2} - {known.replica}).replica != known.replica
    assert to._matched(known.replica, to._keys([0] * 50, "")) == 0


def test_what_a_cache_cannot_hold_is_forgotten_the_oldest_first() -> None:
    to = router(1, blocks=10)
    assign(to, list(range(0, 20)))
    assign(to, list(range(100, 120)))
    assert assign(to, list(range(0, 20))).cached == 20
    assign(to, list(range(200, 220)))  # in the place of the second
    assert assign(to, list(range(0, 20))).cached == 20
    assert assign(to, list(range(100, 120))).cached == 0


def test_shared_prefixes_are_found_and_load_stays_even() -> None:
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
