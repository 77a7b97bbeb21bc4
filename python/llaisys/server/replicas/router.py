"""Prefix-aware routing: a prompt goes to the replica with the least work, not counting cached
prefix tokens. So it goes to the longest cached prefix unless that replica is much busier.

The cached blocks of a replica are estimated from the prompts routed to it, an LRU list of the size
of its KV cache. A wrong estimate costs time only.

No process and no clock are involved. `scripts/simulate_router.py` runs it on synthetic traffic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_BLOCKS = 512  # compared blocks of a prompt
EXPECTED_TOKENS = 256  # upper bound of the assumed answer length
ANSWER_COST = 4  # work of a generated token, in prompt tokens


@dataclass(frozen=True, slots=True)
class Route:
    """A request on its replica, until `done`."""

    replica: int
    work: int  # in prompt tokens
    cached: int  # prompt tokens that the replica is assumed to have cached


class PrefixRouter:
    """Compares prompts block by block: larger blocks are cheaper and coarser."""

    def __init__(self, block_size: int, blocks_per_replica: int, replicas: int) -> None:
        self.load = [0] * replicas  # work of open requests, by replica
        self._block_size = block_size
        self._capacity = blocks_per_replica
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]

    def assign(
        self,
        prompt: Sequence[int],
        salt: str,
        max_tokens: int | None,
        choices: int,
        alive: Collection[int],
    ) -> Route:
        """Choose one of `alive` (not empty) and add the request to its load."""
        keys = self._keys(prompt, salt)
        cached = {replica: self._matched(replica, keys) for replica in alive}
        replica = min(
            alive,
            key=lambda index: (
                self.load[index] - cached[index] * self._block_size,
                -cached[index],
                index,
            ),
        )
        tokens = cached[replica] * self._block_size
        answer = EXPECTED_TOKENS if max_tokens is None else min(max_tokens, EXPECTED_TOKENS)
        route = Route(replica, len(prompt) - tokens + ANSWER_COST * choices * answer, tokens)
        self._remember(replica, keys)
        self.load[replica] += route.work
        return route

    def done(self, route: Route) -> None:
        self.load[route.replica] -= route.work

    def clear(self, replica: int) -> None:
        """Clear the cached blocks of a replica whose process ended. Its routes must still be
        `done`."""
        self._cached[replica].clear()

    def _keys(self, prompt: Sequence[int], salt: str) -> list[int]:
        """Return a chained hash for every full block; it identifies the whole prefix."""
        size, key, keys = self._block_size, hash(salt), []
        for start in range(0, min(len(prompt) // size, MAX_BLOCKS) * size, size):
            key = hash((key, *prompt[start : start + size]))
            keys.append(key)
        return keys

    def _matched(self, replica: int, keys: list[int]) -> int:
        cached = self._cached[replica]
        for count, key in enumerate(keys):
            if key not in cached:
                return count
        return len(keys)

    def _remember(self, replica: int, keys: list[int]) -> None:
        """Add the blocks of a prompt. Its last block is evicted first, as in the engine's cache."""
        cached = self._cached[replica]
        for key in reversed(keys):
            cached.pop(key, None)
            cached[key] = None
        while len(cached) > self._capacity:
            cached.popitem(last=False)
