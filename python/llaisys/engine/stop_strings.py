"""Stop strings in a text that grows: each new character costs the same, whatever came before.

Shift-And: one integer holds how far every string has matched. Bit `place * width + number` says
that the text ends in the first `place + 1` characters of string `number`; a character shifts all of
them on and keeps those that it fits. The highest bit is the longest beginning of a stop string,
which is what must not be shown yet.
"""

from __future__ import annotations

MAX_MASKS = 64  # kept per set of strings: each may take 8 KiB


class StopStrings:
    """A set of strings; shared by all choices of a request."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.width = len(self.strings)
        self.beginnings = frozenset(string[0] for string in self.strings)
        self.characters = frozenset("".join(self.strings))
        self.first = (1 << self.width) - 1  # the first place of every string
        self.last = sum(
            1 << (len(string) - 1) * self.width + number
            for number, string in enumerate(self.strings)
        )
        self._masks: dict[str, int] = {}  # of the characters that have come up

    def mask(self, character: str) -> int:
        """Where the character stands in the strings."""
        mask = self._masks.get(character)
        if mask is None:
            mask = self._find(character)
            if len(self._masks) < MAX_MASKS:
                self._masks[character] = mask
        return mask

    def _find(self, character: str) -> int:
        if character not in self.characters:
            return 0
        bits = bytearray(self.last.bit_length() // 8 + 1)
        for number, string in enumerate(self.strings):
            place = string.find(character)
            while place >= 0:
                bit = place * self.width + number
                bits[bit >> 3] |= 1 << (bit & 7)
                place = string.find(character, place + 1)
        return int.from_bytes(bits, "little")


class StopStringFinder:
    """Text in, text that may be shown out. Not used when there are no stop strings."""

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""  # not shown yet: the beginning of a stop string
        self._state = 0

    def add(self, text: str) -> tuple[str, str | None]:
        """(text to show, the stop string that was found). The earliest end of a match wins; of
        those that end together, the one that begins first."""
        stops, state = self._stops, self._state
        if not state and stops.beginnings.isdisjoint(text):
            return text, None  # most of what a model writes
        buffer = self._held + text
        width, first, last, mask = stops.width, stops.first, stops.last, stops.mask
        for place, character in enumerate(text, len(self._held) + 1):
            state = (state << width | first) & mask(character)
            if state & last:
                number = ((state & last).bit_length() - 1) % width
                stop = stops.strings[number]
                self._held, self._state = "", 0
                return buffer[: place if self._include else place - len(stop)], stop
        keep = -(-state.bit_length() // width)
        self._state = state
        self._held = buffer[len(buffer) - keep :]  # `keep` may be 0
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What is still held back, when no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
