"""Conversion of request messages within the message limit; many in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llaisys.common.validation import check_count
from llaisys.server.openai.schemas import ChatMessage, plain_messages
from llaisys.server.service import Service

INLINE_MESSAGES = 256  # messages converted on the event loop


async def convert_messages(
    service: Service, messages: Sequence[ChatMessage], name: str | None = "messages"
) -> list[dict[str, Any]]:
    """Return `plain_messages`. Raises InvalidInputError for field `name` when there are too many;
    None: any number."""
    if name is not None:
        check_count(name, len(messages), service.config.limits.max_messages, "messages")
    if len(messages) <= INLINE_MESSAGES:
        return plain_messages(messages)
    return await service.body_pool.run(plain_messages, messages)
