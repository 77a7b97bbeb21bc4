"""A conversation that has outgrown the context: which of its oldest turns are left out.

The system messages at the beginning and the new messages stay; between them whole turns go, oldest
first, a turn being what begins with a user's message. The newest messages are counted first, so
the work follows the context and not the conversation. A few turns more than need be are dropped at
once: the next turns then begin with the same tokens, which the prefix cache knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Messages = Sequence[Message]

MESSAGE_TOKENS = 8  # what a template writes around a message, generously
AT_ONCE = 4  # a share of what is kept, dropped in one go


def text_of(message: Message) -> str:
    """What a template may write of it."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return "\n".join(
        [message.get("content") or "", message.get("reasoning_content") or "", *calls]
    ).strip("\n")


def num_leading(messages: Messages) -> int:
    """System messages at the beginning."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    return count


def answer_room(max_tokens: int | None, max_model_len: int) -> int:
    """Tokens that are left for the answer when turns must go."""
    wanted = max_model_len // 4 if max_tokens is None else max_tokens
    return min(wanted, max_model_len // 2)


class Recent:
    """The part of a conversation that is shown to the model."""

    def __init__(self, messages: Messages, num_new: int, most: int) -> None:
        """`num_new`: messages at the end that stay; `most`: tokens to aim at."""
        self.messages = messages
        self.most = most
        self._head = num_leading(messages[: len(messages) - num_new])
        last = len(messages) - num_new
        turns = [i for i in range(self._head, last) if messages[i]["role"] == "user"]
        # Where the conversation may go on behind its head; the first: nothing is dropped.
        self._cuts = [self._head, *[i for i in turns if i > self._head], last]

    def check_size(self, check_chars: Callable[[int], None]) -> None:
        """`check_chars` of what must stay."""
        kept = [*self.messages[: self._head], *self.messages[self._cuts[-1] :]]
        check_chars(sum(len(text_of(message)) for message in kept))

    def may_be_too_long(self) -> bool:
        """False when it fits whatever the tokenizer makes of it: a byte is a token at most."""
        size = sum(len(text_of(message).encode()) for message in self.messages)
        return size + MESSAGE_TOKENS * len(self.messages) > self.most

    def choose(self, count: Callable[[str], int]) -> int:
        """The first cut behind which everything should fit, the last one when nothing does."""
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
        step = max(1, (len(self._cuts) - 1 - chosen) // AT_ONCE)
        return min(-(-chosen // step) * step, len(self._cuts) - 1)

    @staticmethod
    def _size(message: Message, count: Callable[[str], int]) -> int:
        return count(text_of(message)) + MESSAGE_TOKENS

    def render(
        self, encode: Callable[[Messages], list[int]], count: Callable[[str], int]
    ) -> tuple[list[int], int]:
        """(token ids, messages left out). What the template adds is not known before it has run:
        more goes, twice as much each time, until it fits or nothing is left to drop."""
        cut = self.choose(count) if self.may_be_too_long() else 0
        last, further = len(self._cuts) - 1, 1
        while True:
            begin = self._cuts[cut]
            ids = encode([*self.messages[: self._head], *self.messages[begin:]])
            if len(ids) <= self.most or cut == last:
                return ids, begin - self._head
            cut, further = min(cut + further, last), 2 * further


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
