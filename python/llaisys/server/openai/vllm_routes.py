"""vLLM's routes beyond OpenAI's: batches of chats, SageMaker's paths, load, tokenizer."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from llaisys.common.validation import check_count
from llaisys.server.errors import ApiError
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.job import Job
from llaisys.server.generation.service import service_for, service_of
from llaisys.server.http.request_bodies import (
    INLINE_BYTES,
    ProtocolRouter,
    check_structure,
    handler_of,
    read_json,
)
from llaisys.server.http.response_bodies import json_response
from llaisys.server.openai import embedding_routes as embeddings
from llaisys.server.openai import routes as openai
from llaisys.server.openai.formatter import OpenAIFormatter
from llaisys.server.schemas.base import conflicting_field
from llaisys.server.schemas.chat import ChatCompletionRequest, ChatMessage
from llaisys.server.schemas.fields import FieldNotes

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
        for messages in self.messages:
            yield self.model_copy(update={"messages": messages})


router = ProtocolRouter(tags=["vLLM"])

# Field that only bodies of a route have -> the handler of that route.
INVOCATIONS = {
    "messages": handler_of(openai.router, "/v1/chat/completions"),
    "prompt": handler_of(openai.router, "/v1/completions"),
    "input": handler_of(embeddings.router, "/v1/embeddings"),
    "query": handler_of(embeddings.router, "/v1/rerank"),
    "text_1": handler_of(embeddings.router, "/v1/score"),
}


@router.post("/v1/chat/completions/batch")
async def batch_chat_completions(request: Request, body: BatchChatRequest) -> Response:
    """Answer several conversations: choice i answers conversation i."""
    job = await Job.of(request, body, "messages")
    most = job.service.config.limits.max_prompts
    check_count("messages", len(body.messages), most, "conversations")
    chats = [await open_chat(job, chat) for chat in body.chats()]
    formatter = OpenAIFormatter(
        job,
        True,
        [chat.prompt for chat in chats],
        1,
        new_reader=lambda index: chats[index].new_reader(index),
    )
    return await job.run([chat.prompt for chat in chats], chats[0].params, formatter)


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """SageMaker's route: chat, completion, embeddings, rerank or score, by the fields of the
    body."""
    body = await request.body()
    service = service_of(request)

    def field() -> str | None:
        check_structure(body, service.max_items)
        try:
            data = read_json(body)
        except (ValueError, RecursionError):
            return next(iter(INVOCATIONS))  # its route reports the error
        names = data if isinstance(data, dict) else ()
        return next((name for name in INVOCATIONS if name in names), None)

    name = field() if len(body) <= INLINE_BYTES else await service.body_pool.run(field)
    if name is None:
        raise ApiError(400, f"the body has none of the fields {', '.join(INVOCATIONS)}")
    return await INVOCATIONS[name](request)


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of open generation requests."""
    return json_response({"server_load": len(service_of(request).registry.all())})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return special tokens and chat template."""
    service = await service_for(request, None)
    tokenizer: Any = service.engine.require_tokenizer()
    template = getattr(tokenizer, "chat_template", None)
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": service.info.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            **getattr(tokenizer, "special_tokens", {}),
            **({} if template is None else {"chat_template": template}),
        }
    )
