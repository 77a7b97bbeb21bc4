"""What the prefix cache consists of: a node for each full block of tokens behind a certain prefix.

Plain data; the block manager owns the table of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
HashFunction = Callable[[int, Tokens], int]


def chain_hash(parent: int, tokens: Tokens) -> int:
    """The hash of a block of tokens after the prefix that `parent` stands for."""
    return hash((parent, tokens))


class Node:
    """One full block of tokens behind a certain prefix."""

    __slots__ = ("alive", "block", "key", "parent", "ready", "salt", "tokens")

    def __init__(
        self, key: int, parent: Node | None, salt: str, tokens: Tokens, block: int, ready: bool
    ) -> None:
        self.key = key
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.ready = ready  # the block's keys and values have been computed
        self.alive = True  # in the table

    def matches(self, parent: Node | None, salt: str, tokens: Tokens) -> bool:
        return self.parent is parent and self.salt == salt and self.tokens == tokens


@dataclass(slots=True)
class PrefixMatch:
    """The longest usable cached prefix of a request: a plan, nothing is held by it."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # len(blocks) * block_size
    pending: bool = False  # the next block is being computed by a running request: wait
    nodes: list[Node] = field(default_factory=list)


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
