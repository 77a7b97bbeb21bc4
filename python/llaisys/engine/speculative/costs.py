"""What drafts cost on this machine, learned from the steps themselves.

A step that reads the model's weights for few tokens has arithmetic to spare, one with many has not;
where the one ends and the other begins depends on the model, the device and the batch. So nobody
says it: steps with and without drafts are timed.

Others may use the machine, too, now and then or for a while. What they take makes steps longer and
never shorter, so of the latest times the lower ones count; and when steps with drafts have become
dearer, or shorter than one without, that one is timed again before anything is concluded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REFRESH = 256  # steps with drafts before one without is timed again
_UNKNOWN = 0.2  # what a draft is taken to cost before one was timed, in tokens
_FADING = 0.998  # a high price is believed less with every step in which nobody paid it
_FEW = 64  # drafts over which what catching up took is spread at least
_DEARER = 0.15  # tokens by which a price may rise before a step without drafts is timed again
_OTHER = 1.2  # so many times longer or shorter: the machine is not what it was


@dataclass(slots=True)
class _Timed:
    """The latest steps of one number of running requests."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds, without drafts
    prices: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # of drafts, in tokens
    sure_price: float = 0.0  # when a step without drafts was timed last
    since_plain: int = 0  # steps with drafts since then
    is_doubted: bool = False  # what a step takes without drafts


class DraftCosts:
    """The price of a draft in plain tokens, by the number of running requests."""

    def __init__(self) -> None:
        self._timed: dict[int, _Timed] = {}  # those that had a step without drafts
        self._catching_up = 0.0  # seconds, of the latest sequences
        self._drafts = 0.0  # made for the same

    def wants_plain_step(self, running: int) -> bool:
        """Whether it is time to see again what a step takes without drafts."""
        timed = self._timed.get(running)
        return timed is None or timed.is_doubted or timed.since_plain >= REFRESH

    def price(self, running: int) -> float:
        """Of one draft, as a share of the time that one token takes without drafts; from 1 on no
        draft is worth its price. Before one was timed, it takes as long as with the nearest number
        of requests that it was timed with."""
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

    def first_price(self, running: int) -> float:
        """Of a draft for a sequence that had none: with its share of what it takes a draft model to
        catch up with the sequence, as it was with the latest ones."""
        timed = self._timed.get(running)
        if timed is None:
            return self.price(running)
        share = self._catching_up / max(_FEW, self._drafts)
        return self.price(running) + share * running / _low(timed.plain)

    def note_catching_up(self, seconds: float) -> None:
        """A source of drafts read tokens that were known before, for drafts to come."""
        self._catching_up += seconds

    def note_drafts(self, count: int) -> None:
        fading = _FADING**count
        self._catching_up *= fading
        self._drafts = self._drafts * fading + count

    def note(self, running: int, drafts: int, seconds: float) -> None:
        """A step of decoding alone took `seconds`."""
        timed = self._timed.get(running)
        if not drafts:
            if timed is None:
                timed = self._timed[running] = _Timed()
            self._note_plain(timed, seconds)
        elif timed is not None:
            if not timed.prices:
                timed.sure_price = self.price(running)
                timed.prices.append(timed.sure_price)  # worth one of the times
            _note_drafts(timed, running, drafts, seconds)

    def _note_plain(self, timed: _Timed, seconds: float) -> None:
        timed.since_plain = 0
        self._catching_up *= _FADING
        for index, price in enumerate(timed.prices):
            timed.prices[index] = price * _FADING
        if timed.is_doubted:
            timed.is_doubted = False
            usual = _low(timed.plain)
            timed.plain.clear()
            if timed.prices and not usual / _OTHER < seconds < usual * _OTHER:
                timed.prices.clear()  # it was the machine, not the drafts
                timed.prices.append(timed.sure_price)
        timed.plain.append(seconds)
        if timed.prices:
            timed.sure_price = _low(timed.prices)


def _note_drafts(timed: _Timed, running: int, drafts: int, seconds: float) -> None:
    usual = _low(timed.plain)
    timed.since_plain += 1
    if seconds < usual / _OTHER:
        timed.is_doubted = True
        return
    # No draft is worth more than a token: a step that had to wait says no more than that.
    timed.prices.append(min(max(0.0, seconds / usual - 1) * running / drafts, 1.0))
    if _low(timed.prices) > timed.sure_price + _DEARER:
        timed.is_doubted = True


def _low(values: deque[float]) -> float:
    """At the end of the lowest quarter."""
    return sorted(values)[len(values) // 4]
