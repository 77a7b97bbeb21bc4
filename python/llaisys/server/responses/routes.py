"""/v1/responses: OpenAI's Responses API with stored responses."""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Path as PathParameter
from fastapi import Query, Request, Response

from llaisys.common.types import CompletionOutput
from llaisys.common.validation import check_count
from llaisys.server.errors import ApiError, SessionLimitError, SessionStorageError
from llaisys.server.generation.chat import Chat, open_chat
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import convert_messages, decode, run_on_messages
from llaisys.server.generation.service import Service, owner_of, service_of
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_bytes, json_response
from llaisys.server.responses.background import BackgroundResponses, detached
from llaisys.server.responses.formatter import ResponsesFormatter
from llaisys.server.responses.items import input_items, references, with_resolved
from llaisys.server.responses.schemas import RESPONSE_ID, ResponsesRequest
from llaisys.server.sessions.responses import ResponsePosition

logger = logging.getLogger("llaisys.server")

router = ProtocolRouter(prefix="/v1/responses", tags=["OpenAI"])
without_v1 = ProtocolRouter(tags=["llama.cpp"])

MAX_LISTED = 100  # OpenAI's

ResponseId = Annotated[str, PathParameter(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True)
class Opened:
    """A request with its prompt, ready to run."""

    body: ResponsesRequest
    before: ResponsePosition | None  # of `previous_response_id`
    new: list[dict[str, Any]]  # messages of the request
    job: Job
    chat: Chat


async def open_response(request: Request, body: ResponsesRequest, stores: bool) -> Opened:
    service, owner = service_of(request), owner_of(request)
    max_messages = service.config.limits.max_messages
    check_count("input", len(body.chat.messages), max_messages, "messages")
    body = await resolve_references(service, owner, body)
    before = await previous(service, owner, body.previous_response_id)
    new = await convert_messages(service, body.chat.messages, "input")
    messages = [*(before.messages if before is not None else ()), *new]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if stores:
        await service.responses.make_room(owner, new)
    job = await Job.of(request, body.chat, "input")
    chat = await open_chat(job, body.chat, messages, len(new) if before is not None else 1)
    return Opened(body, before, new, job, chat)


@without_v1.post("/responses")
@router.post("")
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a text or items. The response is stored unless `store` is false."""
    stores = body.store is not False
    found = await open_response(request, body, stores)
    releases: list[Callable[[], None]] = []
    if body.background:
        found.job.request, releases = detached(request)
    job, chat, engine = found.job, found.chat, found.job.service.engine
    formatter = ResponsesFormatter(
        chat.new_reader(),
        found.body,
        job.model,
        engine.inputs.defaults,
        job.request_id,
        chat.context_truncated,
        TokenNames(engine.tokenizer),
        len(chat.prompt),
    )
    if body.enable_response_messages:
        formatter.raw_prompt = await decode(engine, chat.prompt), chat.prompt
    if stores:
        service, owner = service_of(request), owner_of(request)
        job.turn = ResponseTurn(service, owner, formatter, found.before, found.new, job.request_id)
    if not body.background:
        return await chat.run(formatter)
    background = background_of(request).start(
        owner_of(request), formatter, lambda: chat.run(formatter), releases
    )
    return background.event_stream() if body.stream else json_response(background.snapshot())


@router.post("/input_tokens")
async def count_input_tokens(request: Request, body: ResponsesRequest) -> Response:
    """Return the number of prompt tokens of a request."""
    found = await open_response(request, body, stores=False)
    count = len(found.chat.prompt)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def resolve_references(
    service: Service, owner: str, body: ResponsesRequest
) -> ResponsesRequest:
    """Return the request with item references replaced by the stored items. Raises ApiError for an
    unknown item, InvalidInputError when the references exceed the limits of a body."""
    names, limits = references(body.items), service.config.limits
    if not names:
        return body
    check_count("input", len(names), limits.max_messages, "item references")
    ids = dict.fromkeys(f"resp_{name.split('_')[1]}" for name in names if "_" in name)
    known = await service.responses.items(owner, list(ids), limits.max_body_bytes)
    for name in names:
        if name not in known:
            raise ApiError(
                404,
                "there is no such item; it is not stored, or belongs to another key",
                param="input",
                code="item_not_found",
            )

    def expand() -> ResponsesRequest:
        size = sum(len(json_bytes(known[name])) * count for name, count in Counter(names).items())
        check_count("input", size, limits.max_body_bytes, "bytes in its referenced items")
        return body.with_items(with_resolved(body.items, known))

    return await service.body_pool.run(expand)


async def previous(
    service: Service, owner: str, response_id: str | None
) -> ResponsePosition | None:
    if response_id is None:
        return None
    found = await service.responses.position(owner, response_id)
    if found is None:
        raise ApiError(
            400,
            "there is no such response; it is not stored, or belongs to another key",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """Stores a complete response; cancelled and failed ones are not stored."""

    service: Service
    owner: str
    formatter: ResponsesFormatter
    before: ResponsePosition | None
    new: list[dict[str, Any]]
    request_id: str

    async def finish(self, output: CompletionOutput, model: str) -> bytes | None:
        """Store the response. If storage is full, the answer is still sent, with `store` false."""
        if self.formatter.complete is None or output.finish_reason not in ("stop", "length"):
            return None
        response = self.formatter.stored()
        message = self.formatter.reader.answer.to_message()
        store = self.service.responses.store
        try:
            await store(self.owner, response, self.before, [*self.new, message], model)
        except (SessionLimitError, SessionStorageError) as error:
            logger.warning(
                "request %s: response %s is not stored: %s", self.request_id, response["id"], error
            )
            self.service.shared.metrics.responses_not_stored.inc()
            return self.formatter.format_not_stored()
        return None

    def close(self) -> None:
        """Nothing to release."""


def background_of(request: Request) -> BackgroundResponses:
    found: BackgroundResponses = request.app.state.background
    return found


def not_found(response_id: str) -> ApiError:
    """OpenAI's error; an id that cannot be one of a response is not repeated."""
    name = f"id '{response_id}'" if re.fullmatch(RESPONSE_ID, response_id) else "this id"
    return ApiError(404, f"Response with {name} not found.", code="response_not_found")


def not_cancellable(kind: str) -> ApiError:
    return ApiError(400, f"Cannot cancel a {kind} response.", code="response_not_cancellable")


@router.get("/{response_id}")
async def get_response(
    request: Request,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a stored or background response. `stream`: the events of a background response after
    the sequence number `starting_after`."""
    background = background_of(request).find(owner_of(request), response_id)
    if stream:
        if background is None:
            raise not_found(response_id)
        return background.event_stream(starting_after)
    if background is not None:
        return json_response(background.snapshot())
    found = await service_of(request).responses.get(owner_of(request), response_id)
    if found is None:
        raise not_found(response_id)
    return Response(found, media_type="application/json")


@router.get("/{response_id}/input_items")
async def get_input_items(
    request: Request,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the input of a stored response, with the turns before it."""
    found = await service_of(request).responses.position(owner_of(request), response_id)
    if found is None:
        raise not_found(response_id)
    messages = found.messages[:-1]

    def page() -> bytes:
        listed = input_items(messages, response_id.removeprefix("resp_"))
        if order == "desc":
            listed.reverse()
        names = [item["id"] for item in listed]
        if after is not None and after not in names:
            raise ApiError(400, "after is not an item of this response", param="after")
        start = 0 if after is None else names.index(after) + 1
        data = listed[start : start + limit]
        return json_bytes(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": start + limit < len(listed),
            }
        )

    body = await run_on_messages(service_of(request), len(messages), page)
    return Response(body, media_type="application/json")


@router.post("/{response_id}/cancel")
async def cancel_response(request: Request, response_id: ResponseId) -> Response:
    """Cancel a response that is being generated."""
    service, owner = service_of(request), owner_of(request)
    background = background_of(request).find(owner, response_id)
    if background is not None:
        await background_of(request).cancel(background)
        found = background.snapshot()
        if found["status"] in ("cancelled", "failed"):
            return json_response(found)
        raise not_cancellable("completed")
    running = service.registry.find(response_id, owner)
    if not running:
        if await service.responses.get(owner, response_id) is None:
            raise not_found(response_id)
        raise not_cancellable("synchronous")
    for generation in running:
        await generation.cancel()
    return json_response({"id": response_id, "object": "response", "status": "cancelled"})


@router.delete("/{response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> dict[str, Any]:
    service, owner = service_of(request), owner_of(request)
    background = background_of(request).find(owner, response_id)
    if background is not None:
        await background_of(request).cancel(background)
        background_of(request).remove(response_id)
    if not await service.responses.delete(owner, response_id) and background is None:
        raise not_found(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
