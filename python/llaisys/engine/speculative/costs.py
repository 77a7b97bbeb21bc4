"""The cost of draft tokens, measured from the steps of this engine.

A small step is bound by memory bandwidth and computes draft tokens almost for free; a large one is
bound by arithmetic. The limit depends on the model, the device and the batch, so steps with and
without drafts are timed.

Other load on the machine only lengthens steps, so the lower quartile of the latest times counts.
When steps with drafts become more expensive, or faster than a step without, the step without drafts
is timed again first.
"""

from collections import deque
from dataclasses import dataclass, field

REFRESH = 256  # steps with drafts before a step without drafts is timed again
WINDOW = 8  # latest times and prices that count
UNKNOWN = 0.2  # price of a draft token before the first measurement, in tokens
CHANGE = 1.15  # ratio of times from which on a step without drafts is timed again


@dataclass(slots=True)
class _Timed:
    """The latest steps with one number of running requests."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # seconds, no drafts
    prices: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # of drafts, tokens
    base_price: float = 0.0  # price when a step without drafts was last timed
    since_plain: int = 0  # steps with drafts since then; REFRESH: time one again

    def add_plain(self, seconds: float) -> None:
        if self.since_plain >= REFRESH:
            usual = _low(self.plain)
            self.plain.clear()
            if self.prices and not usual / CHANGE < seconds < usual * CHANGE:
                self.prices.clear()  # the load changed, not the drafts
                self.prices.append(self.base_price)
        self.since_plain = 0
        self.plain.append(seconds)
        if self.prices:
            self.base_price = _low(self.prices)

    def add_price(self, running: int, drafts: int, seconds: float) -> None:
        usual = _low(self.plain)
        if seconds < usual / CHANGE:
            self.since_plain = REFRESH
            return
        # A price above 1 is an outlier: the step was delayed.
        self.prices.append(min(max(0.0, seconds / usual - 1) * running / drafts, 1.0))
        is_dear = 1 + _low(self.prices) > (1 + self.base_price) * CHANGE
        self.since_plain = REFRESH if is_dear else self.since_plain + 1


class DraftCosts:
    """The price of a draft token in tokens, by the number of running requests."""

    def __init__(self) -> None:
        self._timed: dict[int, _Timed] = {}  # with a step without drafts

    def needs_plain_step(self, running: int) -> bool:
        """Whether a step without drafts is to be timed."""
        timed = self._timed.get(running)
        return timed is None or timed.since_plain >= REFRESH

    def price(self, running: int) -> float:
        """Return the price of a draft token as a fraction of the time of a token without drafts; at
        1 drafts do not pay. Without a measurement, that of the nearest batch size is used."""
        timed = self._timed.get(running)
        if timed is None:
            return UNKNOWN
        if timed.prices:
            return _low(timed.prices)
        known = [count for count, other in self._timed.items() if other.prices]
        if not known:
            return UNKNOWN
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
