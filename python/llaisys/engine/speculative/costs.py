"""What drafts cost on this machine, learned from the steps themselves.

A step that reads the model's weights for few tokens has arithmetic to spare, one with many has not;
where the one ends and the other begins depends on the model, the device and the batch. So nobody
says it: steps with and without drafts are timed.
"""

from __future__ import annotations

REFRESH = 256  # steps with drafts before one without is timed again
_SPEED = 0.1  # weight of the newest step
_UNKNOWN = 0.2  # what a draft is taken to cost before one was timed, in tokens
_FADING = 0.998  # a high price is believed less with every step in which nobody paid it
_FEW = 64  # drafts over which what catching up took is spread at least
_ODD = 4.0  # a step that took so many times longer than usual had something else to wait for


class DraftCosts:
    """The price of a draft in plain tokens, by the number of running requests."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step without drafts
        self._draft: dict[int, float] = {}  # seconds that one draft adds
        self._since_plain: dict[int, int] = {}  # steps with drafts since the last one without
        self._catching_up = 0.0  # seconds, of the latest sequences
        self._drafts = 0.0  # made for the same

    def wants_plain_step(self, running: int) -> bool:
        """Whether it is time to see again what a step takes without drafts."""
        return self._since_plain.get(running, REFRESH) >= REFRESH

    def price(self, running: int) -> float:
        """Of one draft, as a share of the time that one token takes without drafts; from 1 on no
        draft is worth its price."""
        plain = self._plain.get(running)
        return _UNKNOWN if plain is None else self._added(running) * running / plain

    def _added(self, running: int) -> float:
        """Seconds that one draft adds; before one was timed, as with the nearest number of requests
        that it was timed with. `running` has been timed without drafts."""
        if running in self._draft:
            return self._draft[running]
        if not self._draft:
            return _UNKNOWN * self._plain[running] / running
        return self._draft[min(self._draft, key=lambda known: abs(known - running))]

    def first_price(self, running: int) -> float:
        """Of a draft for a sequence that had none: with its share of what it takes a draft model to
        catch up with the sequence, as it was with the latest ones."""
        plain = self._plain.get(running)
        if plain is None:
            return self.price(running)
        share = self._catching_up / max(_FEW, self._drafts)
        return self.price(running) + share * running / plain

    def note_catching_up(self, seconds: float) -> None:
        """A source of drafts read tokens that were known before, for drafts to come."""
        self._catching_up += seconds

    def note_drafts(self, count: int) -> None:
        fading = _FADING**count
        self._catching_up *= fading
        self._drafts = self._drafts * fading + count

    def note(self, running: int, drafts: int, seconds: float) -> None:
        """A step of decoding alone took `seconds`."""
        usual = self._plain.get(running)
        if not drafts:
            self._since_plain[running] = 0
            if usual is None:
                self._plain[running] = seconds
            elif seconds < _ODD * usual:
                self._plain[running] = usual + _SPEED * (seconds - usual)
            self._catching_up *= _FADING
            if running in self._draft:
                self._draft[running] *= _FADING
        elif usual is not None:
            self._since_plain[running] += 1
            # No draft is worth more than a token: a step that had to wait says no more than that.
            added = min(max(0.0, seconds - usual) / drafts, usual / running)
            known = self._added(running)
            self._draft[running] = known + _SPEED * (added - known)
