"""Work on messages: many in a thread; conversion of request messages within the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from llaisys.common.validation import check_count
from llaisys.server.openai.schemas import ChatMessage, plain_messages
from llaisys.server.service import Service

INLINE_MESSAGES = 256  # messages that work on the event loop may have

P = ParamSpec("P")
T = TypeVar("T")


async def run_on_messages(
    service: Service, count: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run work on `count` messages: many in a thread. A session may have any number."""
    if count <= INLINE_MESSAGES:
        return work(*args, **kwargs)
    return await service.body_pool.run(work, *args, **kwargs)


async def convert_messages(
    service: Service, messages: Sequence[ChatMessage], name: str | None = "messages"
) -> list[dict[str, Any]]:
    """Return `plain_messages`. Raises InvalidInputError for field `name` when there are too many;
    None: any number."""
    if name is not None:
        check_count(name, len(messages), service.config.limits.max_messages, "messages")
    return await run_on_messages(service, len(messages), plain_messages, messages)
