"""Which replica takes a prompt: the one that would have the least to do with it. What a replica has
computed already is no work, so a prompt goes where the longest beginning of it is known, unless
that one has so much more to do that another is done earlier all the same.

What a replica has computed is not asked but remembered: the blocks of the prompts that were sent to
it, as many as its KV cache holds, the latest ones. A wrong guess costs time and nothing else.

Pure bookkeeping: no process, no clock. `scripts/simulate_router.py` runs it on made-up traffic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_BLOCKS = 512  # of a prompt that are looked at; what follows them does not change the choice
EXPECTED_TOKENS = 256  # of an answer, when a request allows more
ANSWER_COST = 4  # work of a token that is generated; one of a prompt has 1


@dataclass(frozen=True, slots=True)
class Route:
    """A request on its replica, until `done`."""

    replica: int
    work: int  # in tokens of a prompt
    known: int  # tokens of the prompt that the replica is believed to have


class PrefixRouter:
    """A block is what is compared at once; the larger, the cheaper a choice and the coarser."""

    def __init__(self, block_size: int, blocks_per_replica: int, replicas: int) -> None:
        self.load = [0] * replicas  # the work of open requests
        self._block_size = block_size
        self._capacity = blocks_per_replica
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]

    def assign(
        self,
        prompt: Sequence[int],
        salt: str,
        max_tokens: int | None,
        choices: int,
        alive: Collection[int],
    ) -> Route:
        """Chooses one of `alive`, which are not none, and counts the request as its work."""
        keys = self._keys(prompt, salt)
        known = {replica: self._matched(replica, keys) for replica in alive}
        replica = min(
            alive,
            key=lambda index: (
                self.load[index] - known[index] * self._block_size,
                -known[index],
                index,
            ),
        )
        tokens = known[replica] * self._block_size
        answer = EXPECTED_TOKENS if max_tokens is None else min(max_tokens, EXPECTED_TOKENS)
        route = Route(replica, len(prompt) - tokens + ANSWER_COST * choices * answer, tokens)
        self._remember(replica, keys)
        self.load[replica] += route.work
        return route

    def done(self, route: Route) -> None:
        self.load[route.replica] -= route.work

    def forget(self, replica: int) -> None:
        """Its process has ended, and with it all that it had computed. The routes that lead to it
        must be `done` all the same."""
        self._known[replica].clear()

    def _keys(self, prompt: Sequence[int], salt: str) -> list[int]:
        """A hash for every full block, chained: it stands for the whole beginning."""
        size, key, keys = self._block_size, hash(salt), []
        for start in range(0, min(len(prompt) // size, MAX_BLOCKS) * size, size):
            key = hash((key, *prompt[start : start + size]))
            keys.append(key)
        return keys

    def _matched(self, replica: int, keys: list[int]) -> int:
        known = self._known[replica]
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    def _remember(self, replica: int, keys: list[int]) -> None:
        """The last block is the first to be forgotten, as in the engine's own cache."""
        known = self._known[replica]
        for key in reversed(keys):
            known.pop(key, None)
            known[key] = None
        while len(known) > self._capacity:
            known.popitem(last=False)
