"""Blocks are counted, shared and evicted correctly; hashes only find candidates."""

from __future__ import annotations

from error_helpers import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.engine.block_manager import BlockManager

SIZE = 4


def make_request(name: str, tokens: list[int], salt: str = "") -> Request:
    return Request(name, tokens, SamplingParams(), cache_salt=salt)


def start(manager: BlockManager, request: Request) -> int:
    """Admit a request as the scheduler does; return the number of cached tokens."""
    match = manager.match_prefix(request)
    assert manager.can_allocate(request, match)
    manager.allocate(request, match)
    return match.num_tokens


def compute(manager: BlockManager, request: Request) -> None:
    manager.commit(request, request.num_tokens)


def numbers(manager: BlockManager) -> tuple[int, int, int]:
    """(free, used, cached)"""
    manager.check_integrity()
    return (
        manager.num_free_blocks - manager.num_cached_blocks,
        manager.num_used_blocks,
        manager.num_cached_blocks,
    )


def test_free_used_and_cached_add_up():
    manager = BlockManager(8, SIZE)
    request = make_request("a", list(range(10)))
    assert numbers(manager) == (8, 0, 0)
    start(manager, request)
    assert numbers(manager) == (5, 3, 0)
    compute(manager, request)
    manager.free(request)
    assert numbers(manager) == (6, 0, 2)  # the half full block is not cached
    manager.free(request)
    assert numbers(manager) == (6, 0, 2)


def test_equal_prefix_is_shared_and_the_last_token_is_always_computed():
    manager = BlockManager(16, SIZE)
    first = make_request("a", list(range(8)))
    start(manager, first)
    compute(manager, first)
    second = make_request("b", list(range(8)))
    assert start(manager, second) == 4  # not 8: the last token is computed
    assert manager.block_table(second)[0] == manager.block_table(first)[0]
    assert manager.block_table(second)[1] != manager.block_table(first)[1]
    longer = make_request("c", [*range(8), 50])
    assert start(manager, longer) == 8
    assert numbers(manager) == (16 - 4, 4, 0)
    assert manager.stats.hits == 12 and manager.stats.queries == 25


def test_nothing_is_shared_when_caching_is_off():
    manager = BlockManager(16, SIZE, enable_prefix_caching=False)
    for name in "ab":
        request = make_request(name, list(range(9)))
        assert start(manager, request) == 0
        compute(manager, request)
    assert numbers(manager) == (10, 6, 0)


def test_prefix_in_computation_is_waited_for():
    manager = BlockManager(16, SIZE)
    first, second = make_request("a", list(range(12))), make_request("b", [*range(8), 70, 71])
    start(manager, first)
    match = manager.match_prefix(second)
    assert match.pending and match.blocks == []
    assert manager.is_waiting_for_prefix(second)
    manager.commit(first, 5)
    assert not manager.is_waiting_for_prefix(second)
    assert manager.match_prefix(second).pending  # the second block is still missing
    manager.commit(first, 8)
    assert manager.match_prefix(second).num_tokens == 8
    assert not manager.match_prefix(second).pending


def test_cancelling_a_prefix_owner_releases_waiting_requests():
    manager = BlockManager(16, SIZE)
    first, second = make_request("a", list(range(12))), make_request("b", list(range(12)))
    start(manager, first)
    manager.commit(first, 4)
    assert manager.match_prefix(second).pending
    manager.free(first)
    assert not manager.is_waiting_for_prefix(second)
    assert start(manager, second) == 4
    numbers(manager)


def test_lru_eviction_removes_suffixes_before_prefixes():
    manager = BlockManager(4, SIZE)
    old, new = make_request("a", list(range(9))), make_request("b", [90, 91, 92, 93, 94])
    start(manager, old)
    compute(manager, old)
    manager.free(old)
    start(manager, new)  # takes the two free blocks
    compute(manager, new)
    manager.free(new)
    assert numbers(manager) == (1, 0, 3)
    other = make_request("c", list(range(200, 208)))
    start(manager, other)  # one free block and one eviction: the end of `old`
    assert manager.stats.evictions == 1
    again = make_request("d", list(range(9)))
    assert manager.match_prefix(again).num_tokens == 4
    numbers(manager)


def test_short_matches_are_not_used():
    manager = BlockManager(32, SIZE, min_match=8)
    first = make_request("a", list(range(17)))
    start(manager, first)
    compute(manager, first)
    short = make_request("b", [*range(4), 60, 61, 62, 63, 64])
    assert start(manager, short) == 0
    compute(manager, short)
    assert start(manager, make_request("c", [*range(8), 61])) == 8
    # What was computed behind the unused match can still be found.
    assert start(manager, make_request("d", [*range(4), 60, 61, 62, 63, 64])) == 8
    numbers(manager)


def test_salts_separate_prefixes():
    manager = BlockManager(32, SIZE)
    for name, salt, hit in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8), ("d", "", 0)):
        request = make_request(name, list(range(9)), salt)
        assert start(manager, request) == hit
        compute(manager, request)
    numbers(manager)


def test_generated_blocks_can_be_found_too():
    manager = BlockManager(16, SIZE)
    first = make_request("a", [1, 2, 3])
    start(manager, first)
    first.token_ids += [4, 5, 6, 7, 8, 9]
    assert manager.append_slot(first, 9) == manager.block_table(first)[1:]
    manager.commit(first, 8)
    manager.free(first)
    assert start(manager, make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 70])) == 8


def test_out_of_blocks_is_a_value_and_changes_nothing():
    manager = BlockManager(2, SIZE)
    first = make_request("a", list(range(8)))
    start(manager, first)
    before = manager.block_table(first)
    assert manager.append_slot(first, 9) is None
    assert manager.block_table(first) == before
    second = make_request("b", [7])
    assert not manager.can_allocate(second, manager.match_prefix(second))
    numbers(manager)


def test_integrity_check_detects_a_lost_block():
    manager = BlockManager(8, SIZE)
    manager.num_blocks += 1
    with naming(RuntimeError, "total 9"):
        manager.check_integrity()


def test_colliding_hashes_do_not_mix_prefixes_up():
    manager = BlockManager(32, SIZE, hash_function=lambda parent, tokens: 0)
    table: dict[tuple[int, ...], int] = {}
    prompts = [
        [1, 2, 3, 4, 9, 9, 9, 9, 1],
        [5, 6, 7, 8, 9, 9, 9, 9, 1],
        [9, 9, 9, 9, 9, 9, 9, 9, 1],
    ]
    for index, prompt in enumerate(prompts):
        request = make_request(f"r{index}", prompt)
        assert start(manager, request) == 0
        compute(manager, request)
        for block in range(2):
            table[tuple(prompt[: 4 * block + 4])] = manager.block_table(request)[block]
    assert len(set(table.values())) == len(table)
    for index, prompt in enumerate(prompts):
        request = make_request(f"s{index}", prompt)
        assert start(manager, request) == 8
        blocks = manager.block_table(request)
        assert blocks[:2] == [table[tuple(prompt[:4])], table[tuple(prompt[:8])]]
    numbers(manager)


def test_colliding_hashes_do_not_mix_salts_up():
    manager = BlockManager(32, SIZE, hash_function=lambda parent, tokens: 0)
    for name, salt, hit in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8)):
        request = make_request(name, list(range(9)), salt)
        assert start(manager, request) == hit
        compute(manager, request)


def test_private_copy_does_not_mark_the_shared_block_ready():
    """Below min_match a request computes its own copy of a pending block."""
    manager = BlockManager(32, SIZE, min_match=8)
    owner = make_request("owner", list(range(9)))
    start(manager, owner)
    copy = make_request("copy", [*range(4), 50, 51, 52, 53, 54])
    assert start(manager, copy) == 0
    compute(manager, copy)  # its first block equals the owner's, which is not computed yet
    later = make_request("later", [*range(4), 50, 51, 52, 53, 99])
    assert manager.match_prefix(later).pending
    manager.free(copy)
    manager.check_integrity()
    compute(manager, owner)
    assert manager.match_prefix(later).num_tokens == 8
    assert start(manager, make_request("again", [*range(8), 77])) == 8
    numbers(manager)


@settings(max_examples=150 if NIGHTLY else 75, deadline=None)
@given(data=st.data(), collide=st.booleans(), min_match=st.sampled_from([0, 4, 8]))
def test_random_events_keep_block_counts_valid(data, collide, min_match):
    """Blocks shared by two requests have the same tokens and the same prefix."""
    hashing = {"hash_function": lambda parent, tokens: hash(tokens) % 2} if collide else {}
    manager = BlockManager(12, SIZE, min_match=min_match, **hashing)
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    living: list[Request] = []
    for number in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["start", "start", "grow", "free"]))
        if event == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=18))
            request = make_request(str(number), tokens)
            match = manager.match_prefix(request)
            if match.pending or not manager.can_allocate(request, match):
                manager.forget_waiting(request)
                continue
            manager.allocate(request, match)
            for index, block in enumerate(match.blocks):
                assert content[block] == tuple(tokens[: SIZE * (index + 1)])
            request.num_computed_tokens = match.num_tokens
            living.append(request)
        elif living:
            request = data.draw(st.sampled_from(living))
            if event == "free":
                living.remove(request)
                manager.free(request)
            else:
                if request.num_computed_tokens == request.num_tokens:
                    request.token_ids.append(data.draw(st.integers(0, 1)))
                    if manager.append_slot(request, request.num_tokens) is None:
                        request.token_ids.pop()
                        continue
                left = request.num_tokens - request.num_computed_tokens
                request.num_computed_tokens += data.draw(st.integers(1, left))
                for index in range(request.num_computed_tokens // SIZE):
                    block = manager.block_table(request)[index]
                    content[block] = tuple(request.token_ids[: SIZE * (index + 1)])
                manager.commit(request, request.num_computed_tokens)
        manager.check_integrity()
    for request in living:
        manager.free(request)
    assert manager.num_used_blocks == 0
    manager.check_integrity()
