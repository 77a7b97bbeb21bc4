"""Anthropic's routes: messages and count_tokens."""

from fastapi import Request, Response

from llaisys.server.anthropic.formatter import AnthropicFormatter, error_body
from llaisys.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.job import Job
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_response

router = ProtocolRouter(prefix="/v1/messages", tags=["Anthropic"], error_shape=error_body)


@router.post("")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    job = await Job.of(request, body.chat, "messages")
    chat = await open_chat(job, body.chat)
    prompt_tokens = len(chat.prompt)
    formatter = AnthropicFormatter(chat.new_reader(), job.model, prompt_tokens, job.request_id)
    return await chat.run(formatter)


@router.post("/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Return the number of prompt tokens of messages, tools and system prompt."""
    chat = await open_chat(await Job.of(request, body.chat, "messages"), body.chat)
    return json_response({"input_tokens": len(chat.prompt)})
