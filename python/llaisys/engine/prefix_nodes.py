"""Prefix caching: a node per full block of tokens and prefix, and the hash table of nodes.

Plain data; the block manager owns the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Salt = str | tuple[int, str]  # see Request.prefix_salt
HashFunction = Callable[[int, Tokens], int]


def chain_hash(parent: int, tokens: Tokens) -> int:
    """Return the hash of a block of tokens after the prefix with hash `parent`."""
    return hash((parent, tokens))


def prefix_keys(
    tokens: Sequence[int], block_size: int, salt: Salt, hash_function: HashFunction
) -> list[tuple[int, Tokens]]:
    """Return (chained hash, tokens) of each block; `tokens` are whole blocks."""
    keys, parent = [], hash(salt)
    for start in range(0, len(tokens), block_size):
        block_tokens = tuple(tokens[start : start + block_size])
        parent = hash_function(parent, block_tokens)
        keys.append((parent, block_tokens))
    return keys


class Node:
    """A full block of tokens after a prefix. Its keys and values are in a block of the KV cache, in
    a host slot, or in both; a node with neither is not in the table. The end of a prompt that moves
    to another engine is a node of fewer tokens, which has a host slot only."""

    __slots__ = ("alive", "block", "host_slot", "key", "parent", "ready", "salt", "tokens")

    def __init__(
        self, key: int, parent: Node | None, salt: Salt, tokens: Tokens, block: int, ready: bool
    ) -> None:
        self.key = key
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block  # -1: none
        self.host_slot = -1  # -1: none
        self.ready = ready  # the keys and values of the block are computed
        self.alive = True  # in the table

    @property
    def is_pending(self) -> bool:
        """Whether a step in flight or scheduled computes its block."""
        return self.block >= 0 and not self.ready

    def matches(self, parent: Node | None, salt: Salt, tokens: Tokens) -> bool:
        return self.parent is parent and self.salt == salt and self.tokens == tokens


class PrefixTable:
    """Nodes by the hash of their prefix; `find` compares the tokens."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Node]:
        for bucket in self._buckets.values():
            yield from bucket

    def find(self, key: int, parent: Node | None, salt: Salt, tokens: Tokens) -> Node | None:
        for node in self._buckets.get(key, ()):
            if node.matches(parent, salt, tokens):
                return node
        return None

    def add(self, node: Node) -> None:
        self._buckets.setdefault(node.key, []).append(node)

    def drop(self, node: Node) -> None:
        """Remove a node that has neither block nor host slot."""
        if node.block >= 0 or node.host_slot >= 0:
            return
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        node.alive = False
        node.parent = None  # frees its ancestors


@dataclass(slots=True)
class PrefixMatch:
    """The longest usable cached prefix of a request; it owns no blocks."""

    blocks: list[int] = field(default_factory=list)  # -1: in host memory, to be restored
    num_tokens: int = 0  # len(blocks) * block_size, and those of `tail`
    num_host_tokens: int = 0  # of those, in host memory
    pending: bool = False  # a running request computes the next block: wait
    nodes: list[Node] = field(default_factory=list)
    tail: Node | None = None  # in host memory: the tokens after `nodes`, less than a block

    @property
    def device_blocks(self) -> list[int]:
        """The blocks that are in the KV cache."""
        return [block for block in self.blocks if block >= 0]


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at the first admission of each request."""

    requests: int = 0
    queries: int = 0  # prompt tokens looked up
    hits: int = 0  # prompt tokens found
    host_hits: int = 0  # of those, in host memory
    evictions: int = 0  # cached blocks that were reused

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0
