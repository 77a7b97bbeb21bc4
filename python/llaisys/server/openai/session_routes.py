"""/v1/sessions: list, create or import, export, replace, rename and delete own sessions."""

from typing import Annotated, Any

from fastapi import Path as PathParameter
from fastapi import Request, Response
from pydantic import Field

from llaisys.server.errors import ApiError
from llaisys.server.generation.prompts import convert_messages, run_on_messages
from llaisys.server.generation.service import owner_of, service_of
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.schemas.base import Schema, Text
from llaisys.server.schemas.chat import SESSION_PATTERN, ChatMessage, SessionId

router = ProtocolRouter(prefix="/v1/sessions", tags=["sessions"])

SessionName = Annotated[str, PathParameter(pattern=SESSION_PATTERN)]


class SessionRequest(Schema):
    """A new or imported session."""

    session_id: SessionId | None = None
    title: Text | None = Field(None, max_length=256)
    messages: list[ChatMessage] | None = None


class SessionContent(Schema):
    """The new contents of a session."""

    title: Text | None = Field(None, max_length=256)
    messages: list[ChatMessage]
    client_state: Text | None = None


class SessionPatch(Schema):
    title: Text = Field(max_length=256)


def not_found() -> ApiError:
    return ApiError(404, "there is no such session", param="session_id", code="session_not_found")


@router.get("")
async def list_sessions(request: Request) -> dict[str, Any]:
    """List all sessions, latest first, without those of stored responses."""
    found = await service_of(request).sessions.list_all(owner_of(request))
    return {"object": "list", "data": [info.to_dict() for info in found]}


@router.post("", status_code=201)
async def create_session(request: Request, body: SessionRequest) -> Response:
    """Create an empty session, or import the `messages` of an export."""
    service = service_of(request)
    messages = await convert_messages(service, body.messages or ())
    name = await service.sessions.create(
        owner_of(request), body.session_id, body.title or "", messages
    )
    return await export(request, name, 201)


async def export(request: Request, session_id: str, status: int = 200) -> Response:
    service = service_of(request)
    found = await service.sessions.get(owner_of(request), session_id)
    if found is None:
        raise not_found()
    info, messages, client_state = found
    content = {**info.to_dict(), "messages": messages, "client_state": client_state}
    body = await run_on_messages(service, len(messages), json_bytes, content)
    return Response(body, status, media_type="application/json")


@router.get("/{session_id}")
async def export_session(request: Request, session_id: SessionName) -> Response:
    """Export a session with all its messages."""
    return await export(request, session_id)


@router.put("/{session_id}")
async def replace_session(
    request: Request, session_id: SessionName, body: SessionContent
) -> Response:
    """Replace the messages of a session, or create it: for clients that edit their own copy."""
    service = service_of(request)
    messages = await convert_messages(service, body.messages)
    content = (body.title or "", messages, body.client_state)
    await service.turns.replace(owner_of(request), session_id, *content)
    return await export(request, session_id)


@router.patch("/{session_id}")
async def rename_session(request: Request, session_id: SessionName, body: SessionPatch) -> Response:
    if not await service_of(request).sessions.rename(owner_of(request), session_id, body.title):
        raise not_found()
    return await export(request, session_id)


@router.delete("/{session_id}")
async def delete_session(request: Request, session_id: SessionName) -> dict[str, Any]:
    if not await service_of(request).turns.delete(owner_of(request), session_id):
        raise not_found()
    return {"id": session_id, "object": "session.deleted", "deleted": True}
