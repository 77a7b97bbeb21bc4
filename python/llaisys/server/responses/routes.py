"""/v1/responses: OpenAI's Responses API with stored responses."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from fastapi.responses import Response

from llaisys.common.types import CompletionOutput
from llaisys.common.validation import check_count
from llaisys.server.errors import ApiError
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.job import Job
from llaisys.server.generation.messages import convert_messages
from llaisys.server.http.bodies import CheckedRoute
from llaisys.server.http.payload import json_bytes, json_response
from llaisys.server.responses.formatter import ResponsesFormatter
from llaisys.server.responses.items import references, with_resolved
from llaisys.server.responses.schemas import ResponsesRequest
from llaisys.server.service import Service, service_of
from llaisys.server.sessions.file import SessionLimitError, SessionStorageError
from llaisys.server.sessions.responses import ResponsePosition

logger = logging.getLogger("llaisys.server")

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=CheckedRoute)

ResponseId = Annotated[str, PathParameter(min_length=1, max_length=128)]


@router.post("")
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a text or items. The response is stored unless `store` is false."""
    service, owner = service_of(request), owner_of(request)
    max_messages = service.config.limits.max_messages
    check_count("input", len(body.chat.messages), max_messages, "messages")
    body = await resolve_references(service, owner, body)
    before = await previous(service, owner, body.previous_response_id)
    new = await convert_messages(service, body.chat.messages, "input")
    messages = [*(before.messages if before is not None else ()), *new]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    stores = body.store is not False
    if stores:
        await service.responses.make_room(owner, new)
    job = await Job.of(request, body.chat, "input")
    chat = await open_chat(job, body.chat, messages, len(new) if before is not None else 1)
    defaults = job.service.engine.inputs.defaults
    formatter = ResponsesFormatter(
        chat.new_reader(), body, job.model, defaults, job.request_id, chat.context_truncated
    )
    if stores:
        job.turn = ResponseTurn(service, owner, formatter, before, new, job.request_id)
    return await chat.run(formatter)


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


class ResponseTurn:
    """Stores a complete response; cancelled and failed ones are not stored."""

    def __init__(
        self,
        service: Service,
        owner: str,
        formatter: ResponsesFormatter,
        before: ResponsePosition | None,
        new: list[dict[str, Any]],
        request_id: str,
    ) -> None:
        self.service = service
        self.owner = owner
        self.formatter = formatter
        self.before = before
        self.new = new
        self.request_id = request_id

    async def finish(self, output: CompletionOutput, model: str) -> bytes | None:
        """Store the response. If storage is full, the answer is still sent, with `store` false."""
        response = self.formatter.complete
        if response is None or output.finish_reason not in ("stop", "length"):
            return None
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


def owner_of(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


def not_found() -> ApiError:
    return ApiError(404, "there is no such response", code="response_not_found")


@router.get("/{response_id}")
async def get_response(request: Request, response_id: ResponseId) -> Response:
    """Return a stored response."""
    found = await service_of(request).responses.get(owner_of(request), response_id)
    if found is None:
        raise not_found()
    return json_response(found)


@router.delete("/{response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> dict[str, Any]:
    if not await service_of(request).responses.delete(owner_of(request), response_id):
        raise not_found()
    return {"id": response_id, "object": "response", "deleted": True}
