"""Who holds which KV block, and which blocks still hold a prefix worth keeping.

A block is in exactly one of three states:

    free      nobody holds it, its content is worthless
    used      its reference count is above 0; several requests may hold the same full prompt block
    cached    nobody holds it, but a request with the same prefix may take it up again (LRU)

and free + used + cached = total, which `check_integrity` counts.

The prefix cache is a table of nodes, one per full block of tokens, keyed by a hash chained over the
blocks before it. A hash only finds candidates: a node is taken when its tokens are equal and its
parent is the very node that was matched before it, so colliding hashes cost time and nothing else.
A prompt's nodes enter the table when the prompt is admitted and become `ready` when computed; a
request that meets a node which is not ready waits for it instead of computing the same block.

A cached block that is given to someone else may go to a place in host memory (`HostBlocks`), from
which a later request brings it back into a block of its own: such a node is not ready before the
step that copies it is done. Copies are planned here, and made in their order before the step.

Pure bookkeeping: no tensors, no numpy, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from llaisys.common.request import Request
from llaisys.common.types import BlockCopy
from llaisys.engine.host_blocks import HostBlocks
from llaisys.engine.prefix_nodes import (
    HashFunction,
    Node,
    PrefixCacheStats,
    PrefixMatch,
    PrefixTable,
    Tokens,
    chain_hash,
    prefix_keys,
)


@dataclass(slots=True)
class _Holding:
    """What one request holds; blocks[i] covers tokens [i * block_size, (i + 1) * block_size)."""

    blocks: list[int]
    nodes: list[Node]  # of the leading full blocks; nodes[i].block != blocks[i]: another's node
    num_ready: int  # leading blocks that have been computed
    is_shifted: bool = False  # what it computes now has seen tokens that are gone: not to be shared


class BlockManager:
    """Hands out blocks. "Not now" is a return value; a broken invariant raises RuntimeError."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        min_match: int = 0,
        hash_function: HashFunction = chain_hash,
        context_len: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """`context_len`: tokens that one request holds at most, whatever it has; None: all.
        `num_host_blocks`: places in host memory for evicted blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_match = min_match
        self.context_len = num_blocks * block_size if context_len is None else context_len
        self.stats = PrefixCacheStats()
        self._hash = hash_function
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._node_of: list[Node | None] = [None] * num_blocks
        self._table = PrefixTable()
        self.host = HostBlocks(num_host_blocks if enable_prefix_caching else 0)
        self._holdings: dict[str, _Holding] = {}
        self._prefix_keys: dict[str, list[tuple[int, Tokens]]] = {}  # of waiting requests
        self._waits_for: dict[str, Node] = {}

    # ---- counting ------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_blocks(self, request: Request) -> int:
        """Blocks that a request needs to start."""
        return self.blocks_for(min(request.num_tokens, self.context_len))

    def block_table(self, request: Request) -> list[int]:
        """For tests and debuggers: the blocks that a request holds, in order; a copy."""
        holding = self._holdings.get(request.request_id)
        return list(holding.blocks) if holding else []

    def check_integrity(self) -> None:
        """Count everything anew; raises RuntimeError with the numbers when they do not add up."""
        held = [0] * self.num_blocks
        for holding in self._holdings.values():
            for block in holding.blocks:
                held[block] += 1
        used = sum(1 for count in held if count)
        free, cached = len(self._free), len(self._cached)
        outside = [*self._free, *self._cached]
        nodes = list(self._table)
        here = [node for node in nodes if node.block >= 0]
        if (
            held != self._references
            or free + used + cached != self.num_blocks
            or len(set(outside)) != len(outside)
            or any(held[block] for block in outside)
            or any(self._node_of[node.block] is not node for node in here)
            or sum(node is not None for node in self._node_of) != len(here)
            or not all(node.alive and (node.block >= 0 or node.host_slot >= 0) for node in nodes)
        ):
            raise RuntimeError(
                f"block accounting is broken: free {free} + used {used} + cached {cached} "
                f"!= total {self.num_blocks}, or a count differs "
                f"({sum(self._references)} references, {sum(held)} held, {len(nodes)} nodes)"
            )
        self.host.check_integrity(nodes)

    # ---- the prefix cache ----------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The cached blocks that the request could start from; changes no ownership.

        At least the last token is left to compute, so that there are logits to draw from; every
        token is when the logprobs of the prompt are wanted, or the mean of its hidden states.
        """
        match = PrefixMatch()
        if not self.enable_prefix_caching or request.needs_every_token:
            return match
        parent: Node | None = None
        reachable = 0
        for key, tokens in self._keys(request):
            node = self._table.find(key, parent, request.cache_salt, tokens)
            if node is None:
                break
            reachable += self.block_size
            if not match.pending and not node.is_pending:
                match.nodes.append(node)
            elif not match.pending:
                match.pending = True
                self._waits_for[request.request_id] = node
            parent = node
        if reachable < self.min_match:
            self._waits_for.pop(request.request_id, None)
            return PrefixMatch()
        match.blocks = [node.block for node in match.nodes]
        match.num_tokens = len(match.blocks) * self.block_size
        match.num_host_tokens = match.blocks.count(-1) * self.block_size
        return match

    def is_waiting_for_prefix(self, request: Request) -> bool:
        """Whether the block that stopped the last match is still being computed."""
        node = self._waits_for.get(request.request_id)
        return node is not None and node.alive and node.is_pending

    def forget_waiting(self, request: Request) -> None:
        """Drop what was remembered about a request that will not be admitted."""
        self._prefix_keys.pop(request.request_id, None)
        self._waits_for.pop(request.request_id, None)

    def reset_prefix_cache(self) -> int:
        """A contract that nothing in the product uses yet: turn every cached block into a free one,
        empty the host memory, and return the number of blocks. Blocks in use stay cached."""
        count = len(self._cached)
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._drop_node(block)
            self._free.append(block)
        for node in self.host.clear():
            self._table.drop(node)
        return count

    def undo_copies(self, copies: list[BlockCopy]) -> None:
        """A step failed, perhaps before it copied: what it was to save is not there. What it was to
        bring back belongs to its requests, which have not committed it."""
        for node in self.host.undo(copies):
            self._table.drop(node)

    def _keys(self, request: Request) -> list[tuple[int, Tokens]]:
        """(chained hash, tokens) of each full block of the first context but the last one, and but
        the one with the last token."""
        keys = self._prefix_keys.get(request.request_id)
        if keys is None:
            end = min(request.num_tokens, self.context_len) - 1
            tokens = request.token_ids[: end // self.block_size * self.block_size]
            keys = prefix_keys(tokens, self.block_size, request.cache_salt, self._hash)
            self._prefix_keys[request.request_id] = keys
        return keys

    def _put(self, node: Node, block: int) -> None:
        """The block is going to hold what the node stands for."""
        node.block, node.ready = block, False
        self._node_of[block] = node

    def _drop_node(self, block: int) -> None:
        """The block does not hold what its node stands for (any more), if it has one."""
        node = self._node_of[block]
        if node is not None:
            node.block, node.ready = -1, False
            self._node_of[block] = None
            self._table.drop(node)

    # ---- blocks of a request -------------------------------------------------------------------

    def can_allocate(self, request: Request, match: PrefixMatch, spare: int = 0) -> bool:
        """Whether the request fits behind the match, all of it or as much as it can hold at once,
        and leaves `spare` blocks."""
        revived = sum(1 for block in match.here if not self._references[block])
        needed = self.first_blocks(request) - len(match.here)
        return needed + revived + spare <= self.num_free_blocks

    def allocate(self, request: Request, match: PrefixMatch) -> list[int]:
        """Take the matched blocks and new ones for the rest of the request's tokens.

        `can_allocate` must have said yes since the last change. Returns the block table.
        """
        if request.request_id in self._holdings:
            raise RuntimeError(f"request {request.request_id} holds blocks already")
        for block in match.here:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        absent = [node for node in match.nodes if node.block < 0]
        self.host.hold(absent)
        fresh = self._take(self.first_blocks(request) - len(match.here))
        for node, block in zip(absent, fresh, strict=False):
            self._put(node, block)
        self.host.bring_back(absent)
        blocks = [*(node.block for node in match.nodes), *fresh[len(absent) :]]
        num_ready = match.blocks.index(-1) if absent else len(match.nodes)
        holding = _Holding(blocks, list(match.nodes), num_ready)
        self._holdings[request.request_id] = holding
        if self.enable_prefix_caching:
            self._announce(request, holding)
            if request.num_cached_tokens < 0:
                self.stats.requests += 1
                self.stats.queries += request.num_prompt_tokens
                self.stats.hits += match.num_tokens
                self.stats.host_hits += match.num_host_tokens
        self.forget_waiting(request)
        return list(blocks)

    def _announce(self, request: Request, holding: _Holding) -> None:
        """Enter the full blocks that this request is going to compute, not ready yet."""
        for index, (key, tokens) in enumerate(self._keys(request)):
            if index >= len(holding.nodes):
                self._enter(request, holding, key, tokens)

    def _enter(self, request: Request, holding: _Holding, key: int, tokens: Tokens) -> None:
        """Add the node of the request's next full block; an equal one with a block is taken over as
        the parent of what follows, while the request keeps its own copy of the block."""
        block, salt = holding.blocks[len(holding.nodes)], request.cache_salt
        parent = holding.nodes[-1] if holding.nodes else None
        node = self._table.find(key, parent, salt, tokens)
        if node is None:
            node = Node(key, parent, salt, tokens, block, False)
            self._table.add(node)
        if node.block < 0 or node.block == block:
            self._put(node, block)
        holding.nodes.append(node)

    def slots_left(self, request: Request, spare: int) -> int:
        """Tokens beyond the computed ones that the request's blocks can take, and those blocks that
        are free beyond `spare`."""
        blocks = len(self._holdings[request.request_id].blocks)
        blocks += max(0, self.num_free_blocks - spare)
        return blocks * self.block_size - request.position

    def append_slot(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for `num_tokens` tokens held in all: the added blocks, or None when there are
        not enough.

        None leaves everything as it was.
        """
        blocks = self._holdings[request.request_id].blocks
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return []
        if missing > self.num_free_blocks:
            return None
        added = self._take(missing)
        blocks.extend(added)
        return added

    def commit(self, request: Request, num_computed: int) -> None:
        """The first `num_computed` tokens have keys and values: their full blocks may be shared."""
        if not self.enable_prefix_caching:
            return
        holding = self._holdings.get(request.request_id)
        if holding is None or holding.is_shifted:
            return
        size = self.block_size
        for index in range(holding.num_ready, num_computed // size):
            if index == len(holding.nodes):
                parent = holding.nodes[-1] if holding.nodes else None
                tokens = tuple(request.token_ids[index * size : (index + 1) * size])
                key = self._hash(parent.key if parent else hash(request.cache_salt), tokens)
                self._enter(request, holding, key, tokens)
            if holding.nodes[index].block == holding.blocks[index]:
                holding.nodes[index].ready = True
            holding.num_ready = index + 1

    def shift(self, request: Request, kept: int, dropped: int) -> list[int] | None:
        """Let the tokens [kept, kept + dropped) of a request go whose blocks are full; `dropped` is
        a number of whole blocks. What lies behind them is to be moved and becomes the request's
        own: shared blocks are exchanged for new ones, the others leave the prefix cache.

            before   [0 .. kept) [kept .. kept + dropped) [kept + dropped .. end)
            after    [0 .. kept)                          [kept .. end - dropped)

        Returns the blocks from the one that holds token `kept` on, in their new order, or None when
        there are not enough for the copies; then everything is as it was. Blocks that were let go
        still hold what they did, and may be among those that are copied to: whoever moves the bytes
        reads first.
        """
        holding, size = self._holdings[request.request_id], self.block_size
        first, count = kept // size, dropped // size
        gone, moved = holding.blocks[first : first + count], holding.blocks[first + count :]
        num_shared = sum(self._references[block] > 1 for block in moved)
        num_freed = sum(self._references[block] == 1 for block in gone)
        if num_shared > self.num_free_blocks + num_freed:
            return None
        self._drop_unready(holding)
        self._let_go(gone)
        for index, block in enumerate(moved):
            if self._references[block] > 1:
                self._references[block] -= 1
                [moved[index]] = self._take(1)
            else:
                self._drop_node(block)
        holding.blocks[first:] = moved
        del holding.nodes[first:]
        holding.num_ready = min(holding.num_ready, first)
        holding.is_shifted = True
        return list(moved)

    def free(self, request: Request) -> None:
        """Give everything back; computed full blocks stay cached. Unknown requests are ignored."""
        self.forget_waiting(request)
        holding = self._holdings.pop(request.request_id, None)
        if holding is not None:
            self._drop_unready(holding)
            self._let_go(holding.blocks)

    def _drop_unready(self, holding: _Holding) -> None:
        """Nodes that were announced and will not be computed, or brought back."""
        for block in holding.blocks[holding.num_ready : len(holding.nodes)]:
            if (node := self._node_of[block]) is not None and not node.ready:
                self._drop_node(block)

    def _let_go(self, blocks: list[int]) -> None:
        """The last one first: a prefix outlives what follows it."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block] and self._node_of[block] is None:
                self._free.append(block)
            elif not self._references[block]:
                self._cached[block] = None

    def _take(self, count: int) -> list[int]:
        """Blocks for new content: free ones, then the least recently used cached ones."""
        kept = max(0, len(self._free) - count)
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        taken += [self._evict() for _ in range(count - len(taken))]
        for block in taken:
            self._references[block] += 1
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        node = self._node_of[block]
        assert node is not None  # or it were free
        displaced = self.host.save(node)
        if displaced is not None:
            self._table.drop(displaced)
        self._drop_node(block)
        self.stats.evictions += 1
        return block
