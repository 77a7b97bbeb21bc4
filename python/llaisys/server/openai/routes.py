"""The OpenAI routes: chat, completions, models, tokenize; and the cancel route."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llaisys.common.validation import check_token_ids, refuse
from llaisys.server.errors import ApiError
from llaisys.server.http.event_stream import EventStream
from llaisys.server.http.limits import check_count, check_prompt_chars
from llaisys.server.openai.job import Job
from llaisys.server.openai.responses import TokenNames
from llaisys.server.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    plain_messages,
    refuse_together,
)
from llaisys.server.service import service_of

router = APIRouter()


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation. With `session_id`, `messages` continue the one kept here."""
    job = Job.of(request, body, chat=True)
    params = body.to_sampling()
    check_count("messages", len(body.messages), job.service.config.limits.max_messages)
    messages = plain_messages(body.messages)
    async with job.service.turns.begin(job.owner, body.session_id, messages) as turn:
        job.turn = turn
        history = turn.messages if turn is not None else messages
        chars = sum(len(message["content"]) for message in history)
        check_prompt_chars("messages", chars, job.max_model_len)
        options: dict[str, Any] = {}
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        if body.chat_template_kwargs:
            options["variables"] = body.chat_template_kwargs
        prompt = await _chat_prompt(job, body, history, options)
        job.check_length(prompt)
        response = await job.run([prompt], params)
        if turn is not None and isinstance(response, EventStream):
            turn.keep()  # the stream ends the turn
        return response


async def _chat_prompt(
    job: Job, body: ChatCompletionRequest, history: list[dict[str, Any]], options: dict[str, Any]
) -> list[int]:
    """Token ids of a chat; with `continue_final_message`, up to the end of the last message's text,
    which the answer then continues."""
    engine = job.service.engine
    if not body.continue_final_message:
        return await engine.encode_chat(history, **options)
    if history[-1]["role"] != "assistant" or len(history) < 2:
        raise refuse(
            f"messages[{len(history) - 1}].role",
            history[-1]["role"],
            "'assistant' when continue_final_message is true",
        )
    options["add_generation_prompt"] = True  # it opens the turn that the text belongs to
    start = await engine.encode_chat(history[:-1], **options)
    return start + await engine.encode(history[-1]["content"], False)


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or several (texts or token ids)."""
    job = Job.of(request, body, chat=False)
    params = body.to_sampling()
    prompts = body.prompts()
    check_count("prompt", len(prompts), job.service.config.limits.max_prompts)
    engine, encoded = job.service.engine, []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_prompt_chars("prompt", len(prompt), job.max_model_len)
            ids = await engine.encode(prompt, body.add_special_tokens is not False)
        else:
            ids = prompt
        job.check_length(ids)  # before the next one costs anything
        encoded.append(ids)
        if body.echo:
            text = prompt if isinstance(prompt, str) else engine.decode(prompt)
            job.echoes.append(text)
    return await job.run(encoded, params)


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> dict[str, Any]:
    """The names that `model` may have."""
    service = service_of(request)
    return {"object": "list", "data": [service.model_card(name) for name in service.model_names]}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(request: Request, model: str) -> dict[str, Any]:
    service = service_of(request)
    return service.model_card(service.check_model(model))


@router.post("/v1/requests/{request_id}/cancel", tags=["requests"])
async def cancel(request: Request, request_id: str) -> dict[str, Any]:
    """End a request by its response id or its X-Request-Id; it answers with reason `abort`."""
    service = service_of(request)
    found = service.registry.find(request_id, request.scope["state"]["owner"])
    if not found:
        raise ApiError(404, "no such request is running", code="request_not_found")
    cancelled = [await generation.cancel() for generation in found]
    return {"id": request_id, "object": "request.cancelled", "cancelled": any(cancelled)}


@router.post("/tokenize", tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a `prompt`, or of `messages` as the chat template writes them."""
    service = service_of(request)
    service.check_model(body.model)
    engine = service.engine
    length = service.info.max_model_len
    if (body.prompt is None) == (body.messages is None):
        given = "left out" if body.prompt is None else "given"
        raise refuse_together("prompt", given, "given exactly when messages is not")
    if body.prompt is not None:
        check_prompt_chars("prompt", len(body.prompt), length)
        ids = await engine.encode(body.prompt, body.add_special_tokens is not False)
    else:
        messages = plain_messages(body.messages or ())
        check_prompt_chars("messages", sum(len(m["content"]) for m in messages), length)
        options: dict[str, Any] = {"variables": body.chat_template_kwargs}
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        ids = await engine.encode_chat(messages, **options)
    names = TokenNames(engine.tokenizer)
    return {
        "count": len(ids),
        "max_model_len": length,
        "tokens": ids,
        "token_strs": [names.text(i) for i in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize", tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    check_count("tokens", len(body.tokens), 16 * service.info.max_model_len)
    check_token_ids("tokens", body.tokens, len(body.tokens), service.info.vocab_size - 1)
    return {"prompt": service.engine.decode(body.tokens, bool(body.skip_special_tokens))}
