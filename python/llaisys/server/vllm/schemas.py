"""Request schemas of vLLM's routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from llaisys.server.openai.fields import FieldNotes
from llaisys.server.openai.schemas import ChatCompletionRequest, ChatMessage, conflicting_field

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]
# Fields that one request for several conversations cannot have, and their only values.
SINGLE: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "session_id": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "echo": (None, False),
}


class BatchChatRequest(ChatCompletionRequest):
    """A chat request whose `messages` are a list of conversations."""

    only: ClassVar[str] = "left out in a batch of conversations"

    messages: Annotated[list[Conversation], Field(min_length=1)]  # type: ignore[assignment]

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        for name, values in SINGLE.items():
            if data.get(name) not in values:
                raise conflicting_field(name, "given", cls.only)
        return super().prepare(data, notes)

    def chats(self) -> Iterator[ChatCompletionRequest]:
        """Yield a request for each conversation."""
        for messages in self.messages:
            yield self.model_copy(update={"messages": messages})
