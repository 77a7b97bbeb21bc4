"""Incremental search for stop strings: constant time per character (Shift-And).

One integer holds the state of all strings: bit `index * width + number` is set when the text ends
in the first `index + 1` characters of string `number`. A character shifts the state and masks it.
The highest bit is the longest prefix of a stop string, which is not output yet.
"""

MAX_MASKS = 64  # cached per set of strings; up to 8 KiB each


class StopStrings:
    """The stop strings of a request; shared by its choices."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.width = len(self.strings)
        self.beginnings = frozenset(string[0] for string in self.strings)
        self.characters = frozenset("".join(self.strings))
        self.first = (1 << self.width) - 1  # bit 0 of every string
        self.last = sum(
            1 << (len(string) - 1) * self.width + number
            for number, string in enumerate(self.strings)
        )
        self._masks: dict[str, int] = {}  # by character

    def mask(self, character: str) -> int:
        """Return the positions of a character in the strings."""
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
            index = string.find(character)
            while index >= 0:
                bit = index * self.width + number
                bits[bit >> 3] |= 1 << (bit & 7)
                index = string.find(character, index + 1)
        return int.from_bytes(bits, "little")


class StopStringFinder:
    """Finds stop strings in text that arrives in parts."""

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._pending = ""  # prefix of a stop string, not output yet
        self._state = 0

    def add(self, text: str) -> tuple[str, str | None]:
        """Return (text to output, stop string or None). The match that ends first wins; of several
        the longest."""
        stops, state = self._stops, self._state
        if not state and stops.beginnings.isdisjoint(text):
            return text, None
        buffer = self._pending + text
        width, first, last, mask = stops.width, stops.first, stops.last, stops.mask
        for index, character in enumerate(text, len(self._pending) + 1):
            state = (state << width | first) & mask(character)
            if state & last:
                number = ((state & last).bit_length() - 1) % width
                stop = stops.strings[number]
                self._pending, self._state = "", 0
                return buffer[: index if self._include else index - len(stop)], stop
        keep = -(-state.bit_length() // width)
        self._state = state
        self._pending = buffer[len(buffer) - keep :]  # `keep` may be 0
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the pending text at the end of the output."""
        pending, self._pending, self._state = self._pending, "", 0
        return pending
