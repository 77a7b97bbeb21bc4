"""Prefix-aware routing: a prompt goes to the replica with the least work, not counting cached
prefix tokens. So it goes to the longest cached prefix unless that replica is much busier.

The cached blocks of a replica are estimated from the prompts routed to it, an LRU list of the size
of its KV cache. A wrong estimate costs time only.

A conversation has a home, a replica chosen by rendezvous hashing. It begins there unless another
replica has much more of its prompt cached or less work. Routers that do not communicate agree on
it: one finds the conversations that another began.

No process and no clock are involved. `scripts/simulate_router.py` runs it on synthetic traffic.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

MAX_BLOCKS = 512  # compared blocks of a prompt
EXPECTED_TOKENS = 256  # upper bound of the assumed answer length
ANSWER_COST = 1  # work of a generated token, in prompt tokens; more are generated in a batch
HOME_TOKENS = 1024  # cached tokens that outweigh the home of a new conversation


@dataclass(frozen=True, slots=True)
class Route:
    """A request on its replica, until `done`."""

    replica: int
    prompt_work: int  # until the first token, in prompt tokens
    answer_work: int  # until the end
    cached: int  # prompt tokens that the replica is assumed to have cached


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a router knows of a conversation without having seen its earlier turns."""

    key: str  # of all its turns
    earlier_tokens: int = 0  # of the prompt, in turns that its home has probably cached


def stable_hash(text: str) -> int:
    """Return the same number in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def mixed(number: int) -> int:
    """Return 64 bits that all depend on all bits of `number` (the finalizer of SplitMix64)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


class PrefixRouter:
    """Compares prompts block by block: larger blocks are cheaper and coarser."""

    def __init__(
        self,
        block_size: int,
        blocks_per_replica: int,
        replicas: int,
        names: Sequence[str] = (),
    ) -> None:
        """`names`: of the replicas, by which routers choose the same homes; empty: the indices."""
        self.load = [0] * replicas  # work of open requests, by replica
        self._seeds = [stable_hash(name) for name in names or map(str, range(replicas))]
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
        conversation: Conversation | None = None,
    ) -> Route:
        """Choose one of `alive` (not empty) and add the request to its load."""
        keys = self._keys(prompt, salt)
        cached = {index: self._matched(index, keys) * self._block_size for index in alive}
        credit = cached
        if conversation is not None:
            home = self.home(conversation.key, alive)
            cached[home] = max(cached[home], min(conversation.earlier_tokens, len(prompt)))
            credit = {**cached, home: max(cached[home], HOME_TOKENS)}
        replica = min(alive, key=lambda i: (self.load[i] - credit[i], -credit[i], i))
        answer = EXPECTED_TOKENS if max_tokens is None else min(max_tokens, EXPECTED_TOKENS)
        tokens = cached[replica]
        route = Route(replica, len(prompt) - tokens, ANSWER_COST * choices * answer, tokens)
        self._remember(replica, keys)
        self.load[replica] += route.prompt_work + route.answer_work
        return route

    def home(self, key: str, alive: Collection[int]) -> int:
        """Return the replica of a conversation. It changes only if that one is not alive."""
        number = stable_hash(key)
        return max(alive, key=lambda index: mixed(number ^ self._seeds[index]))

    def prefilled(self, route: Route) -> Route:
        """Remove the work of the prompt at the first token; return what is left of the route."""
        self.load[route.replica] -= route.prompt_work
        return replace(route, prompt_work=0)

    def done(self, route: Route) -> None:
        self.load[route.replica] -= route.prompt_work + route.answer_work

    def clear(self, replica: int) -> None:
        """Clear the cached blocks of a replica whose process ended. Its routes must still be
        `done`."""
        self._cached[replica].clear()

    def _keys(self, prompt: Sequence[int], salt: str) -> list[int]:
        """Return a chained hash for every full block; it identifies the whole prefix."""
        size, key, keys = self._block_size, stable_hash(salt), []
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
