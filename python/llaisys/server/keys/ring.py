"""All keys: whose request it is, and that one's budget."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from llaisys.server.keys.api_key import ApiKey
from llaisys.server.keys.budget import KeyBudget

ANONYMOUS = "anonymous"  # the owner of everything where there are no keys


class KeyRing:
    """Owners are hashes of keys: what sessions and shares belong to. Names are for people."""

    def __init__(
        self, keys: Iterable[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._digests: list[bytes] = []
        self._anonymous = KeyBudget(ApiKey(ANONYMOUS, ANONYMOUS), clock)
        self.budgets: dict[str, KeyBudget] = {}  # by owner; of keys that are gone, too
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """From now on these are the keys. One that stays keeps what it has used; one that is gone
        is refused from the next request on."""
        digests = []
        for key in keys:
            digest = hashlib.sha256(key.key.encode()).digest()
            digests.append(digest)
            budget = self.budgets.setdefault(digest.hex(), KeyBudget(key, self._clock))
            budget.key = key
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, authorization: str | None) -> str | None:
        """The hash of the key that was given, if it is one of ours. The time it takes depends on
        neither: digests of equal length, all of them compared."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return digest.hex() if found and scheme.lower() == "bearer" else None

    def budget(self, owner: str) -> KeyBudget:
        """Of an owner; without keys everybody shares one that has no limits."""
        return self.budgets.get(owner, self._anonymous)

    def name(self, owner: str) -> str:
        return self.budget(owner).key.name
