"""Drop the oldest turns of a conversation that exceeds the context.

Leading system messages and the new messages stay; between them whole turns are dropped, oldest
first. A turn starts with a user message. Messages are counted from the newest, so the cost depends
on the context, not on the conversation. A few more turns than necessary are dropped at once, so
that the following prompts share a prefix for the prefix cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Messages = Sequence[Message]

MESSAGE_TOKENS = 8  # upper estimate of a template's tokens around a message
DROP_DIVISOR = 4  # 1/4 of the remaining turns are dropped together


def text_of(message: Message) -> str:
    """Return the text of a message that a template may render."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return "\n".join(
        [message.get("content") or "", message.get("reasoning_content") or "", *calls]
    ).strip("\n")


def num_leading(messages: Messages) -> int:
    """Return the number of leading system messages."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    return count


def answer_room(max_tokens: int | None, max_model_len: int) -> int:
    """Return the tokens reserved for the answer when turns are dropped."""
    requested = max_model_len // 4 if max_tokens is None else max_tokens
    return min(requested, max_model_len // 2)


class Recent:
    """Selects the latest turns of a conversation."""

    def __init__(self, messages: Messages, num_new: int, most: int) -> None:
        """`num_new`: messages at the end that stay; `most`: target number of tokens."""
        self.messages = messages
        self.most = most
        self._head = num_leading(messages[: len(messages) - num_new])
        last = len(messages) - num_new
        turns = [i for i in range(self._head, last) if messages[i]["role"] == "user"]
        # Indices at which the conversation may continue after its head; the first drops nothing.
        self._cuts = [self._head, *[i for i in turns if i > self._head], last]

    def check_size(self, check_chars: Callable[[int], None]) -> None:
        """Call `check_chars` with the length of the messages that must stay."""
        required = [*self.messages[: self._head], *self.messages[self._cuts[-1] :]]
        check_chars(sum(len(text_of(message)) for message in required))

    def may_be_too_long(self) -> bool:
        """False when it fits with any tokenizer, since a byte is at most one token."""
        size = sum(len(text_of(message).encode()) for message in self.messages)
        return size + MESSAGE_TOKENS * len(self.messages) > self.most

    def choose(self, count: Callable[[str], int]) -> int:
        """Return the first cut after which everything should fit, else the last one."""
        left = self.most - sum(self._size(m, count) for m in self.messages[: self._head])
        position, chosen = len(self.messages), len(self._cuts) - 1
        for index in range(len(self._cuts) - 1, -1, -1):
            while position > self._cuts[index] and left >= 0:
                position -= 1
                left -= self._size(self.messages[position], count)
            if left < 0:
                break
            chosen = index
        if chosen == 0:
            return 0
        step = max(1, (len(self._cuts) - 1 - chosen) // DROP_DIVISOR)
        return min(-(-chosen // step) * step, len(self._cuts) - 1)

    @staticmethod
    def _size(message: Message, count: Callable[[str], int]) -> int:
        return count(text_of(message)) + MESSAGE_TOKENS

    def render(
        self, encode: Callable[[Messages], list[int]], count: Callable[[str], int]
    ) -> tuple[list[int], int]:
        """Return (token ids, dropped messages). The template's own tokens are unknown before
        rendering: while the result is too long, drop more, twice as much each time."""
        cut = self.choose(count) if self.may_be_too_long() else 0
        last, further = len(self._cuts) - 1, 1
        while True:
            begin = self._cuts[cut]
            ids = encode([*self.messages[: self._head], *self.messages[begin:]])
            if len(ids) <= self.most or cut == last:
                return ids, begin - self._head
            cut, further = min(cut + further, last), 2 * further


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
