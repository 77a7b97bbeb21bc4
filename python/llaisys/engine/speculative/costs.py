"""The cost of draft tokens, measured from the steps of this engine.

A small step is bound by memory bandwidth and computes draft tokens almost for free; a large one is
bound by arithmetic. The limit depends on the model, the device and the batch, so steps with and
without drafts are timed.

Other load on the machine only lengthens steps, so the lower quartile of the latest times counts.
When steps with drafts become more expensive, or faster than a step without, the step without drafts
is timed again first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REFRESH = 256  # steps with drafts before a step without drafts is timed again
_UNKNOWN = 0.2  # price of a draft token before the first measurement, in tokens
_DECAY = 0.998  # of a price, per step without drafts
_RISE = 0.15  # tokens by which a price may rise before a step without drafts is timed again
_CHANGE = 1.2  # ratio of times from which on the load of the machine has changed


@dataclass(slots=True)
class _Timed:
    """The latest steps with one number of running requests."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds without drafts
    prices: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # of drafts, in tokens
    base_price: float = 0.0  # price when a step without drafts was last timed
    since_plain: int = 0  # steps with drafts since then
    is_stale: bool = False  # time a step without drafts again

    def add_plain(self, seconds: float) -> None:
        self.since_plain = 0
        for index, price in enumerate(self.prices):
            self.prices[index] = price * _DECAY
        if self.is_stale:
            self.is_stale = False
            usual = _low(self.plain)
            self.plain.clear()
            if self.prices and not usual / _CHANGE < seconds < usual * _CHANGE:
                self.prices.clear()  # the load changed, not the drafts
                self.prices.append(self.base_price)
        self.plain.append(seconds)
        if self.prices:
            self.base_price = _low(self.prices)

    def add_price(self, running: int, drafts: int, seconds: float) -> None:
        usual = _low(self.plain)
        self.since_plain += 1
        if seconds < usual / _CHANGE:
            self.is_stale = True
            return
        # A price above 1 is an outlier: the step was delayed.
        self.prices.append(min(max(0.0, seconds / usual - 1) * running / drafts, 1.0))
        if _low(self.prices) > self.base_price + _RISE:
            self.is_stale = True


class DraftCosts:
    """The price of a draft token in tokens, by the number of running requests."""

    def __init__(self) -> None:
        self._timed: dict[int, _Timed] = {}  # with a step without drafts

    def needs_plain_step(self, running: int) -> bool:
        """Whether a step without drafts is to be timed."""
        timed = self._timed.get(running)
        return timed is None or timed.is_stale or timed.since_plain >= REFRESH

    def price(self, running: int) -> float:
        """Return the price of a draft token as a fraction of the time of a token without drafts; at
        1 drafts do not pay. Without a measurement, that of the nearest batch size is used."""
        timed = self._timed.get(running)
        if timed is None:
            return _UNKNOWN
        if timed.prices:
            return _low(timed.prices)
        known = [count for count, other in self._timed.items() if other.prices]
        if not known:
            return _UNKNOWN
        nearest = min(known, key=lambda count: abs(count - running))
        seconds = self.price(nearest) * _low(self._timed[nearest].plain) / nearest
        return seconds * running / _low(timed.plain)

    def add_step(self, running: int, drafts: int, seconds: float) -> None:
        """Add the duration of a decode step."""
        timed = self._timed.get(running)
        if not drafts:
            if timed is None:
                timed = self._timed[running] = _Timed()
            timed.add_plain(seconds)
        elif timed is not None:
            if not timed.prices:
                timed.base_price = self.price(running)
                timed.prices.append(timed.base_price)  # counts as one measurement
            timed.add_price(running, drafts, seconds)


def _low(values: deque[float]) -> float:
    """Return the lower quartile."""
    return sorted(values)[len(values) // 4]
