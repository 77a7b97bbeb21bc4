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

Pure bookkeeping: no tensors, no numpy, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from llaisys.common.types import Request

Tokens = tuple[int, ...]
HashFunction = Callable[[int, Tokens], int]


def chain_hash(parent: int, tokens: Tokens) -> int:
    """The hash of a block of tokens after the prefix that `parent` stands for."""
    return hash((parent, tokens))


class _Node:
    """One full block of tokens behind a certain prefix."""

    __slots__ = ("alive", "block", "key", "parent", "ready", "salt", "tokens")

    def __init__(
        self, key: int, parent: _Node | None, salt: str, tokens: Tokens, block: int, ready: bool
    ) -> None:
        self.key = key
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.ready = ready  # the block's keys and values have been computed
        self.alive = True  # in the table

    def matches(self, parent: _Node | None, salt: str, tokens: Tokens) -> bool:
        return self.parent is parent and self.salt == salt and self.tokens == tokens


@dataclass(slots=True)
class PrefixMatch:
    """The longest usable cached prefix of a request: a plan, nothing is held by it."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # len(blocks) * block_size
    pending: bool = False  # the next block is being computed by a running request: wait
    nodes: list[_Node] = field(default_factory=list)


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at admission, the first one of each request only."""

    requests: int = 0
    queries: int = 0  # prompt tokens looked up
    hits: int = 0  # prompt tokens found
    evictions: int = 0  # cached blocks given to someone else

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


@dataclass(slots=True)
class _Holding:
    """What one request holds; blocks[i] covers tokens [i * block_size, (i + 1) * block_size)."""

    blocks: list[int]
    nodes: list[_Node]  # of the leading full blocks; nodes[i].block != blocks[i]: another's node
    num_ready: int  # leading blocks that have been computed


class BlockManager:
    """Hands out blocks. "Not now" is a return value; a broken invariant raises RuntimeError."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        min_match: int = 0,
        hash_function: HashFunction = chain_hash,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_match = min_match
        self.stats = PrefixCacheStats()
        self._hash = hash_function
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._node_of: list[_Node | None] = [None] * num_blocks
        self._table: dict[int, list[_Node]] = {}
        self._holdings: dict[str, _Holding] = {}
        self._prefix_keys: dict[str, list[tuple[int, Tokens]]] = {}  # of waiting requests
        self._waits_for: dict[str, _Node] = {}

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
        nodes = [node for bucket in self._table.values() for node in bucket]
        if (
            held != self._references
            or free + used + cached != self.num_blocks
            or len(set(outside)) != len(outside)
            or any(held[block] for block in outside)
            or any(self._node_of[node.block] is not node or not node.alive for node in nodes)
            or sum(node is not None for node in self._node_of) != len(nodes)
        ):
            raise RuntimeError(
                f"block accounting is broken: free {free} + used {used} + cached {cached} "
                f"!= total {self.num_blocks}, or a count differs "
                f"({sum(self._references)} references, {sum(held)} held, {len(nodes)} nodes)"
            )

    # ---- the prefix cache ----------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The cached blocks that the request could start from; changes no ownership.

        At least the last token is left to compute, so that there are logits to draw from.
        """
        match = PrefixMatch()
        if not self.enable_prefix_caching:
            return match
        parent: _Node | None = None
        reachable = 0
        for key, tokens in self._keys(request):
            node = self._find(key, parent, request.cache_salt, tokens)
            if node is None:
                break
            reachable += self.block_size
            if node.ready and not match.pending:
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
        return match

    def is_waiting_for_prefix(self, request: Request) -> bool:
        """Whether the block that stopped the last match is still being computed."""
        node = self._waits_for.get(request.request_id)
        return node is not None and node.alive and not node.ready

    def forget_waiting(self, request: Request) -> None:
        """Drop what was remembered about a request that will not be admitted."""
        self._prefix_keys.pop(request.request_id, None)
        self._waits_for.pop(request.request_id, None)

    def reset_prefix_cache(self) -> int:
        """A contract that nothing in the product uses yet: turn every cached block into a free one,
        and return their number. Blocks in use stay cached."""
        count = len(self._cached)
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._drop_node(block)
            self._free.append(block)
        return count

    def _keys(self, request: Request) -> list[tuple[int, Tokens]]:
        """(chained hash, tokens) of each full block but the one with the last token."""
        keys = self._prefix_keys.get(request.request_id)
        if keys is None:
            size, tokens = self.block_size, request.token_ids
            keys, parent = [], hash(request.cache_salt)
            for start in range(0, (len(tokens) - 1) // size * size, size):
                block_tokens = tuple(tokens[start : start + size])
                parent = self._hash(parent, block_tokens)
                keys.append((parent, block_tokens))
            self._prefix_keys[request.request_id] = keys
        return keys

    def _find(self, key: int, parent: _Node | None, salt: str, tokens: Tokens) -> _Node | None:
        for node in self._table.get(key, ()):
            if node.matches(parent, salt, tokens):
                return node
        return None

    def _drop_node(self, block: int) -> None:
        node = self._node_of[block]
        if node is None:
            return
        bucket = self._table[node.key]
        bucket.remove(node)
        if not bucket:
            del self._table[node.key]
        node.alive = False
        node.parent = None  # a dead chain must not keep its ancestors
        self._node_of[block] = None

    # ---- blocks of a request -------------------------------------------------------------------

    def can_allocate(self, request: Request, match: PrefixMatch, spare: int = 0) -> bool:
        """Whether all tokens of the request fit behind the match and leave `spare` blocks."""
        revived = sum(1 for block in match.blocks if not self._references[block])
        needed = self.blocks_for(request.num_tokens) - len(match.blocks)
        return needed + revived + spare <= self.num_free_blocks

    def allocate(self, request: Request, match: PrefixMatch) -> list[int]:
        """Take the matched blocks and new ones for the rest of the request's tokens.

        `can_allocate` must have said yes since the last change. Returns the block table.
        """
        if request.request_id in self._holdings:
            raise RuntimeError(f"request {request.request_id} holds blocks already")
        for block in match.blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        needed = self.blocks_for(request.num_tokens) - len(match.blocks)
        blocks = [*match.blocks, *(self._take() for _ in range(needed))]
        holding = _Holding(blocks, list(match.nodes), len(match.nodes))
        self._holdings[request.request_id] = holding
        if self.enable_prefix_caching:
            self._announce(request, holding)
            if request.num_cached_tokens < 0:
                self.stats.requests += 1
                self.stats.queries += request.num_prompt_tokens
                self.stats.hits += match.num_tokens
        self.forget_waiting(request)
        return list(blocks)

    def _announce(self, request: Request, holding: _Holding) -> None:
        """Enter the full blocks that this request is going to compute, not ready yet."""
        for index, (key, tokens) in enumerate(self._keys(request)):
            if index >= len(holding.nodes):
                self._enter(request, holding, key, tokens)

    def _enter(self, request: Request, holding: _Holding, key: int, tokens: Tokens) -> None:
        """Add the node of the request's next full block; an equal one that exists is taken over
        as the parent of what follows, while the request keeps its own copy of the block."""
        index, salt = len(holding.nodes), request.cache_salt
        parent = holding.nodes[-1] if holding.nodes else None
        node = self._find(key, parent, salt, tokens)
        if node is None:
            node = _Node(key, parent, salt, tokens, holding.blocks[index], False)
            self._table.setdefault(key, []).append(node)
            self._node_of[node.block] = node
        holding.nodes.append(node)

    def slots_left(self, request: Request, spare: int) -> int:
        """Tokens beyond the computed ones that the request's blocks can take, and those blocks that
        are free beyond `spare`."""
        blocks = len(self._holdings[request.request_id].blocks)
        blocks += max(0, self.num_free_blocks - spare)
        return blocks * self.block_size - request.num_computed_tokens

    def append_slot(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for `num_tokens` tokens in all: the added blocks, or None when out of blocks.

        None leaves everything as it was.
        """
        blocks = self._holdings[request.request_id].blocks
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return []
        if missing > self.num_free_blocks:
            return None
        added = [self._take() for _ in range(missing)]
        blocks.extend(added)
        return added

    def commit(self, request: Request, num_computed: int) -> None:
        """The first `num_computed` tokens have keys and values: their full blocks may be shared."""
        if not self.enable_prefix_caching:
            return
        holding = self._holdings.get(request.request_id)
        if holding is None:
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

    def free(self, request: Request) -> None:
        """Give everything back; computed full blocks stay cached. Unknown requests are ignored."""
        self.forget_waiting(request)
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for block in holding.blocks[holding.num_ready : len(holding.nodes)]:
            self._drop_node(block)  # announced, never computed
        # The last block first: a prefix outlives what follows it.
        for block in reversed(holding.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._node_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def _take(self) -> int:
        """A block for new content: a free one, else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._drop_node(block)
            self.stats.evictions += 1
        self._references[block] += 1
        return block
