"""KV offload: against a reference, and over random events after which every block has the tokens of
its node."""

from __future__ import annotations

import pytest
from error_helpers import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from scheduler_helpers import add, answer, make_scheduler

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import BlockCopy
from llaisys.engine.block_manager import BlockManager

SIZE = 4
Prefix = tuple[int, ...]


def make_request(name: str, tokens: list[int], salt: str = "") -> Request:
    return Request(name, tokens, SamplingParams(), cache_salt=salt)


def use(manager: BlockManager, tokens: list[int], salt: str = "") -> tuple[int, int]:
    """Run a request; return (cached tokens, those from host memory)."""
    request = make_request("r", tokens, salt)
    match = manager.match_prefix(request)
    assert not match.pending and manager.can_allocate(request, match)
    manager.allocate(request, match)
    manager.host.take_copies()
    manager.commit(request, request.num_tokens)
    manager.free(request)
    manager.check_integrity()
    return match.num_tokens, match.num_host_tokens


# ---- what is kept, and for whom ------------------------------------------------------------------


def test_evicted_prefix_is_restored_from_host_slots():
    manager = BlockManager(4, SIZE, num_host_blocks=8)
    old = list(range(13))
    assert use(manager, old) == (0, 0)
    assert use(manager, list(range(100, 113))) == (0, 0)
    assert manager.host.num_used == 3  # all of `old`
    request = make_request("again", old)
    match = manager.match_prefix(request)
    assert (match.blocks, match.num_tokens, match.num_host_tokens) == ([-1, -1, -1], 12, 12)
    table = manager.allocate(request, match)
    copies = manager.host.take_copies()
    saved = [copy for copy in copies if copy.to_host]
    assert copies[: len(saved)] == saved  # blocks are saved before they are overwritten
    assert [(c.block, c.host_slot) for c in copies[len(saved) :]] == [
        (table[0], 2), (table[1], 1), (table[2], 0)  # ends were evicted before beginnings
    ]  # fmt: skip
    assert manager.host.take_copies() == []
    assert (manager.stats.hits, manager.stats.host_hits) == (12, 12)


def test_restored_blocks_are_pending_until_their_step_ends():
    manager = BlockManager(8, SIZE, num_host_blocks=8)
    use(manager, list(range(9)))
    use(manager, list(range(100, 132)))
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    manager.allocate(first, manager.match_prefix(first))
    assert manager.match_prefix(second).pending and manager.is_waiting_for_prefix(second)
    manager.commit(first, 9)
    assert not manager.is_waiting_for_prefix(second)
    match = manager.match_prefix(second)
    assert (match.num_tokens, match.num_host_tokens) == (8, 0)


def test_block_with_a_host_slot_is_not_copied_twice():
    manager = BlockManager(3, SIZE, num_host_blocks=8)
    first, second = list(range(9)), list(range(100, 109))
    for tokens in (first, second, first, second, first):
        use(manager, tokens)
    assert manager.host.num_saved == 4 and manager.host.num_used == 4
    assert manager.stats.host_hits == 24


def test_least_recently_used_host_slot_is_reused_first():
    manager = BlockManager(2, SIZE, num_host_blocks=2)
    one, two, three = ([n] * 5 for n in (1, 2, 3))
    use(manager, one)
    use(manager, two)  # one is saved
    use(manager, three)  # two is saved
    assert use(manager, one) == (4, 4)  # three takes the place of two: one was held
    assert use(manager, two) == (0, 0)
    assert use(manager, three) == (4, 4)


def test_pinned_host_slots_are_not_reused():
    manager = BlockManager(4, SIZE, num_host_blocks=2)
    use(manager, list(range(9)))
    use(manager, list(range(100, 116)))  # evicts both blocks, which fill the slots
    assert use(manager, list(range(9))) == (8, 8)


def test_salts_separate_host_slots():
    manager = BlockManager(2, SIZE, num_host_blocks=4)
    use(manager, [1] * 5, "x")
    use(manager, [2] * 8, "x")
    assert use(manager, [1] * 5, "y") == (0, 0)
    assert use(manager, [1] * 5, "x") == (4, 4)


def test_without_host_slots_or_prefix_cache_nothing_is_copied():
    for manager in (
        BlockManager(2, SIZE),
        BlockManager(2, SIZE, enable_prefix_caching=False, num_host_blocks=4),
    ):
        for tokens in ([1] * 5, [2] * 8, [1] * 5):
            assert use(manager, tokens) == (0, 0)
        assert manager.host.num_saved == manager.host.num_used == 0


def test_integrity_check_detects_a_lost_host_slot():
    manager = BlockManager(2, SIZE, num_host_blocks=4)
    manager.host.num_slots += 1
    with naming(RuntimeError, "total 5"):
        manager.check_integrity()


# ---- a step that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("was_launched", [False, True])
def test_failed_step_undoes_its_copies_unless_done(was_launched):
    scheduler = make_scheduler(blocks=4, num_host_blocks=8)
    manager = scheduler.block_manager
    for name, first in (("a", 0), ("b", 100)):
        add(scheduler, name, list(range(first, first + 13)), max_tokens=1)
        scheduler.update_from_output(answer(scheduler.schedule()))
    add(scheduler, "c", list(range(13)), max_tokens=1)
    plan = scheduler.schedule()
    assert {copy.to_host for copy in plan.block_copies} == {True, False}
    assert not scheduler.needs_sync(plan)
    slots = {copy.host_slot for copy in plan.block_copies if copy.to_host}
    if was_launched:
        scheduler.note_launched(plan)
    scheduler.fail_step(plan.step_id, "it failed")
    scheduler.check_integrity()
    used = {node.host_slot for node in manager.nodes}
    if was_launched:
        assert slots <= used
    else:
        assert manager.host.num_used == 3 and slots.isdisjoint(used)
    # What was saved before is still there.
    found = add(scheduler, "d", list(range(13)), max_tokens=1)
    scheduler.update_from_output(answer(scheduler.schedule()))
    assert (found.num_cached_tokens, found.num_host_cached_tokens) == (12, 12)


def test_short_last_chunk_marks_restored_blocks_ready():
    """The step fills no block, but its restored blocks can be shared."""
    scheduler = make_scheduler(blocks=4, num_host_blocks=8, budget=8)
    for name, first in (("a", 0), ("b", 100)):
        add(scheduler, name, list(range(first, first + 13)), max_tokens=1)
        while scheduler.has_unfinished():
            scheduler.update_from_output(answer(scheduler.schedule()))
    add(scheduler, "c", list(range(13)), max_tokens=3)
    scheduler.update_from_output(answer(scheduler.schedule()))
    other = make_request("d", list(range(13)))
    match = scheduler.block_manager.match_prefix(other)
    assert not match.pending and (match.num_tokens, match.num_host_tokens) == (12, 0)


def test_preempted_request_is_restored_from_host_memory():
    scheduler = make_scheduler(blocks=8, num_host_blocks=16, budget=64)
    first = add(scheduler, "a", list(range(16)), max_tokens=16)
    second = add(scheduler, "b", list(range(100, 112)), max_tokens=16)
    given = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        given.append(sum(plan.counts))
        scheduler.update_from_output(answer(plan))
        scheduler.block_manager.check_integrity()
    assert second.num_preemptions and first.num_output_tokens == second.num_output_tokens == 16
    # Tokens computed in all: each once, but for those of blocks that were not full.
    assert sum(given) <= 28 + 32 + second.num_preemptions * SIZE
    assert (second.num_cached_tokens, second.num_host_cached_tokens) == (0, 0)  # at first


# ---- the reference ------------------------------------------------------------------------------


class ReferenceNode:
    def __init__(self, parent: ReferenceNode | None, tokens: Prefix) -> None:
        self.parent, self.tokens = parent, tokens


class Reference:
    """One request at a time over lists, least recently used first; no hash, no reference count."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.cached: list[ReferenceNode] = []
        self.host: list[ReferenceNode] = []
        self.saved = self.evictions = 0

    def use(self, tokens: list[int]) -> tuple[int, int]:
        pieces = [tuple(tokens[i : i + SIZE]) for i in range(0, len(tokens), SIZE)]
        found: list[ReferenceNode] = []
        for piece in pieces[: (len(tokens) - 1) // SIZE]:
            node = self.find(found[-1] if found else None, piece)
            if node is None:
                break
            found.append(node)
        here = [node for node in found if node in self.cached]
        absent = [node for node in found if node not in self.cached]
        self.cached = [node for node in self.cached if node not in here]
        self.host = [node for node in self.host if node not in absent]
        needed = len(pieces) - len(here)
        while needed > self.num_blocks - len(here) - len(self.cached):
            self.evict(self.cached.pop(0), held=len(absent))
        self.host += reversed(absent)
        held, parent = list(found), found[-1] if found else None
        for piece in pieces[len(found) : len(tokens) // SIZE]:
            node = self.find(parent, piece)
            if node is None or node not in self.cached:  # else it has a block, and this one is free
                held.append(ReferenceNode(parent, piece) if node is None else node)
            parent = held[-1] if node is None else node
        self.cached += reversed(held)
        return len(found) * SIZE, len(absent) * SIZE

    def find(self, parent: ReferenceNode | None, piece: Prefix) -> ReferenceNode | None:
        known = self.cached + self.host
        return next((n for n in known if n.parent is parent and n.tokens == piece), None)

    def evict(self, node: ReferenceNode, held: int) -> None:
        self.evictions += 1
        if node in self.host:
            self.host.remove(node)
        elif len(self.host) + held < self.num_slots:
            self.saved += 1
        elif self.host:
            self.host.pop(0)
            self.saved += 1
        else:
            return
        self.host.append(node)


@settings(max_examples=100 if NIGHTLY else 50, deadline=None)
@given(
    sizes=st.tuples(st.integers(5, 9), st.integers(0, 7)),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=20),
    widen=st.booleans(),
)
def test_device_and_host_blocks_equal_the_reference(sizes, prompts, widen):
    manager, reference = BlockManager(sizes[0], SIZE, num_host_blocks=sizes[1]), Reference(*sizes)
    for prompt in prompts:
        tokens = [bit for bit in prompt for _ in range(2)][:20] if widen else prompt
        assert use(manager, tokens) == reference.use(tokens)
        assert manager.num_cached_blocks == len(reference.cached)
        assert manager.host.num_used == len(reference.host)
        assert manager.host.num_saved == reference.saved
        assert manager.stats.evictions == reference.evictions


# ---- what the memories hold ----------------------------------------------------------------------


class Memories:
    """A KV cache and host memory that store all tokens up to the end of each block."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}
        self.slots: dict[int, Prefix] = {}

    def copy(self, copies: list[BlockCopy]) -> None:
        for block, place, to_host in copies:
            if to_host:
                self.slots[place] = self.blocks[block]
            else:
                self.blocks[block] = self.slots[place]

    def check(self, table: list[int], tokens: list[int], num_computed: int) -> None:
        for index in range(num_computed // SIZE):
            assert self.blocks[table[index]] == tuple(tokens[: SIZE * (index + 1)])

    def write(self, table: list[int], tokens: list[int], num_computed: int) -> None:
        for index, block in enumerate(table):
            end = min(SIZE * (index + 1), num_computed)
            if end > SIZE * index:
                self.blocks[block] = tuple(tokens[:end])


@settings(max_examples=100 if NIGHTLY else 50, deadline=None)
@given(
    data=st.data(),
    slots=st.integers(0, 6),
    collide=st.booleans(),
    min_match=st.sampled_from([0, 0, 8]),
)
def test_random_events_restore_the_saved_blocks(data, slots, collide, min_match):
    """Several requests at once; each event is a step, which may fail before its copies."""
    hashing = {"hash_function": lambda parent, tokens: hash(tokens) % 2} if collide else {}
    manager = BlockManager(10, SIZE, min_match=min_match, num_host_blocks=slots, **hashing)
    memories = Memories()
    living: list[Request] = []
    for number in range(data.draw(st.integers(1, 30))):
        event = data.draw(st.sampled_from(["start", "start", "grow", "free"]))
        request = data.draw(st.sampled_from(living)) if living else None
        if event == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=18))
            request = make_request(str(number), tokens)
            match = manager.match_prefix(request)
            if match.pending or not manager.can_allocate(request, match):
                manager.forget_waiting(request)
                continue
            manager.allocate(request, match)
            request.num_computed_tokens = match.num_tokens
            living.append(request)
        elif request is None:
            continue
        elif event == "free":
            living.remove(request)
            manager.free(request)
            continue
        else:
            if request.num_computed_tokens == request.num_tokens:
                request.token_ids.append(data.draw(st.integers(0, 1)))
                if manager.append_slot(request, request.num_tokens) is None:
                    request.token_ids.pop()
                    continue
        copies = manager.host.take_copies()
        if data.draw(st.integers(0, 9)) == 0:  # the step fails, and ends its request
            manager.undo_copies(copies)
            living.remove(request)
            manager.free(request)
        else:
            memories.copy(copies)
            table = manager.block_table(request)
            memories.check(table, request.token_ids, request.num_computed_tokens)
            left = request.num_tokens - request.num_computed_tokens
            request.num_computed_tokens += data.draw(st.integers(1, left))
            memories.write(table, request.token_ids, request.num_computed_tokens)
            manager.commit(request, request.num_computed_tokens)
        manager.check_integrity()
    for request in living:
        manager.free(request)
    manager.check_integrity()
    assert manager.num_used_blocks == 0 and manager.host.num_used <= slots
