"""`RepeatFilter`: ends an answer at a tool call that repeats an earlier one."""

from collections.abc import Iterable

from llaisys.chat.records import AnswerEvent, CallArguments, CallStart


class RepeatFilter:
    """Filter of the events of one answer. A call with the name and the arguments of an earlier call
    is dropped with everything after it. The events of a call are held back only while they equal
    the start of an earlier call."""

    def __init__(self) -> None:
        self.found = False  # a repeated call was dropped
        self._calls: list[tuple[str, list[str]]] = []  # (name, parts of the arguments)
        self._start: CallStart | None = None  # of the call that is held back
        self._parts: list[str] = []  # its arguments so far
        self._length = 0  # of these
        self._earlier: list[str] = []  # arguments of earlier calls that start with them

    def feed(self, events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
        passed: list[AnswerEvent] = []
        for event in events:
            if self.found:
                break
            if isinstance(event, CallStart):
                passed += self.flush()
                self._earlier = [
                    "".join(parts) for name, parts in self._calls if name == event.name
                ]
                if not self._earlier:
                    self._calls.append((event.name, []))
                    passed.append(event)
                else:
                    self._start, self._parts, self._length = event, [], 0
            elif isinstance(event, CallArguments) and self._start is not None:
                passed += self._hold(event.text)
            else:
                if isinstance(event, CallArguments):
                    self._calls[-1][1].append(event.text)
                passed.append(event)
        return passed

    def flush(self) -> list[AnswerEvent]:
        """Return the held events, of a call that is no repetition."""
        if self._start is None:
            return []
        start, text = self._start, "".join(self._parts)
        self._start = None
        self._calls.append((start.name, self._parts))
        return [start, CallArguments(start.index, text)] if text else [start]

    def _hold(self, text: str) -> list[AnswerEvent]:
        self._earlier = [given for given in self._earlier if given.startswith(text, self._length)]
        self._parts.append(text)
        self._length += len(text)
        if any(len(given) == self._length for given in self._earlier):
            self.found, self._start = True, None
            return []
        return [] if self._earlier else self.flush()
