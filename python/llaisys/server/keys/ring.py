"""The set of API keys: finds the owner and the budget of a request."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from llaisys.server.keys.api_key import ApiKey
from llaisys.server.keys.budget import KeyBudget

ANONYMOUS = "anonymous"  # owner of all requests when no keys are configured


class KeyRing:
    """Owners are hashes of keys; sessions and quotas refer to them. Names are for logs."""

    def __init__(
        self, keys: Iterable[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._digests: list[bytes] = []
        self._anonymous = KeyBudget(ApiKey(ANONYMOUS, ANONYMOUS), clock)
        self.budgets: dict[str, KeyBudget] = {}  # by owner, including removed keys
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys. Keys that stay keep their usage; removed keys are rejected from the
        next request on."""
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
        """Return the owner of a valid key, else None. Takes constant time: digests of equal length,
        all of them compared."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return digest.hex() if found and scheme.lower() == "bearer" else None

    def budget(self, owner: str) -> KeyBudget:
        """Return the budget of an owner; without keys one shared budget without limits."""
        return self.budgets.get(owner, self._anonymous)

    def is_admin(self, owner: str) -> bool:
        return self.budget(owner).key.admin

    def name(self, owner: str) -> str:
        return self.budget(owner).key.name
