"""What the prefix cache consists of: a node for each full block of tokens behind a certain prefix,
and the table in which they are found.

Plain data; the block manager owns the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
HashFunction = Callable[[int, Tokens], int]


def chain_hash(parent: int, tokens: Tokens) -> int:
    """The hash of a block of tokens after the prefix that `parent` stands for."""
    return hash((parent, tokens))


def prefix_keys(
    tokens: Sequence[int], block_size: int, salt: str, hash_function: HashFunction
) -> list[tuple[int, Tokens]]:
    """(chained hash, tokens) of each block; `tokens` are whole blocks."""
    keys, parent = [], hash(salt)
    for start in range(0, len(tokens), block_size):
        block_tokens = tuple(tokens[start : start + block_size])
        parent = hash_function(parent, block_tokens)
        keys.append((parent, block_tokens))
    return keys


class Node:
    """One full block of tokens behind a certain prefix. Its keys and values lie in a block of the
    KV cache, in a place of host memory, or in both; in neither: it is not in the table."""

    __slots__ = ("alive", "block", "host_slot", "key", "parent", "ready", "salt", "tokens")

    def __init__(
        self, key: int, parent: Node | None, salt: str, tokens: Tokens, block: int, ready: bool
    ) -> None:
        self.key = key
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block  # -1: none
        self.host_slot = -1  # -1: none
        self.ready = ready  # the block's keys and values are there
        self.alive = True  # in the table

    @property
    def is_pending(self) -> bool:
        """Its block's keys and values will be there after a step."""
        return self.block >= 0 and not self.ready

    def matches(self, parent: Node | None, salt: str, tokens: Tokens) -> bool:
        return self.parent is parent and self.salt == salt and self.tokens == tokens


class PrefixTable:
    """Nodes by the hash of their prefix, which only finds candidates."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Node]:
        for bucket in self._buckets.values():
            yield from bucket

    def find(self, key: int, parent: Node | None, salt: str, tokens: Tokens) -> Node | None:
        for node in self._buckets.get(key, ()):
            if node.matches(parent, salt, tokens):
                return node
        return None

    def add(self, node: Node) -> None:
        self._buckets.setdefault(node.key, []).append(node)

    def drop(self, node: Node) -> None:
        """Forget a node, if it has neither block nor place any more."""
        if node.block >= 0 or node.host_slot >= 0:
            return
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        node.alive = False
        node.parent = None  # a dead chain must not keep its ancestors


@dataclass(slots=True)
class PrefixMatch:
    """The longest usable cached prefix of a request: a plan, nothing is held by it."""

    blocks: list[int] = field(default_factory=list)  # -1: in host memory, to be brought back
    num_tokens: int = 0  # len(blocks) * block_size
    num_host_tokens: int = 0  # of those, in host memory
    pending: bool = False  # the next block is being computed by a running request: wait
    nodes: list[Node] = field(default_factory=list)

    @property
    def here(self) -> list[int]:
        """The blocks that need not be brought back."""
        return [block for block in self.blocks if block >= 0]


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at admission, the first one of each request only."""

    requests: int = 0
    queries: int = 0  # prompt tokens looked up
    hits: int = 0  # prompt tokens found
    host_hits: int = 0  # of those, in host memory
    evictions: int = 0  # cached blocks given to someone else

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0
