"""OpenAI routes: chat, completions, models; and tokenize, detokenize, cancel."""

from typing import Any

from fastapi import Request, Response

from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import check_count, check_token_ids
from llaisys.server.errors import ApiError
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.infill import encode_infill
from llaisys.server.generation.job import Job
from llaisys.server.generation.llama_object import FinalObject
from llaisys.server.generation.prompts import (
    PromptLimit,
    convert_messages,
    decode,
    encode_continued,
    encode_messages,
    encode_prompts,
    token_names,
    token_pieces,
)
from llaisys.server.generation.service import (
    Service,
    owner_of,
    service_for,
    service_of,
    session_model,
)
from llaisys.server.http.event_stream import EventStream
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_response
from llaisys.server.openai.formatter import OpenAIFormatter
from llaisys.server.schemas.base import conflicting_field
from llaisys.server.schemas.chat import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    template_options,
)

router = ProtocolRouter()


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation. With `session_id`, `messages` continue a stored session."""
    body.model = body.model or await session_model(request, body.session_id)
    job = await Job.of(request, body, "messages")
    messages = await convert_messages(job.service, body.messages)
    async with job.service.turns.begin(job.owner, body.session_id, messages) as turn:
        job.turn = turn
        found, num_new = (messages, 1) if turn is None else (turn.messages, len(messages))
        chat = await open_chat(job, body, found, num_new)
        n = chat.params.n
        if turn is not None:
            turn.new_reader = chat.new_reader
        echoes = [found[-1]["content"] or ""] * bool(body.echo and found[-1]["role"] == "assistant")
        truncated = chat.context_truncated if turn is not None or body.drop_old_turns else None
        formatter = OpenAIFormatter(
            job,
            True,
            [chat.prompt],
            n,
            echoes,
            session_id=body.session_id,
            new_reader=chat.new_reader,
            context_truncated=truncated,
            verbose=await verbose_object(job, chat.prompt, chat.params),
        )
        response = await chat.run(formatter)
        if turn is not None and isinstance(response, EventStream):
            turn.keep_open()  # the stream ends the turn
        return response


@router.post("/v1/chat/completions/input_tokens", tags=["OpenAI"])
async def count_chat_tokens(request: Request, body: ChatCompletionRequest) -> Response:
    """Return the number of prompt tokens of a conversation."""
    chat = await open_chat(await Job.of(request, body, "messages"), body)
    return json_response({"input_tokens": len(chat.prompt)})


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Complete one or several prompts (text or token ids)."""
    job = await Job.of(request, body, "prompt")
    params = await job.sampling(body.to_sampling)
    prompts = body.prompts()
    check_count("prompt", len(prompts), job.service.config.limits.max_prompts, "prompts")
    engine = job.service.engine
    if body.suffix:
        texts = (str(body.prompt), body.suffix)
        infill = await encode_infill(engine, *texts, job.prompt_limit, "suffix")
        encoded, params = [infill.ids], infill.with_stop_tokens(params)
        return await job.run(encoded, params, OpenAIFormatter(job, False, encoded, params.n))
    special = body.add_special_tokens is not False
    encoded = await encode_prompts(engine, prompts, special, job.prompt_limit)
    encoded = [job.truncate(prompt) for prompt in encoded]
    echoes = []
    if body.echo:
        echoes = [p if isinstance(p, str) else await decode(engine, p) for p in prompts]
    verbose = await verbose_object(job, encoded[0], params)
    formatter = OpenAIFormatter(job, False, encoded, params.n, echoes, verbose=verbose)
    return await job.run(encoded, params, formatter)


async def verbose_object(job: Job, prompt: list[int], params: SamplingParams) -> FinalObject | None:
    """Return what makes the `__verbose` object, if the request asks for it."""
    if not job.body.verbose:
        return None
    params = params.with_defaults(job.service.engine.inputs.defaults)
    return await FinalObject.of_prompt(job, params, prompt)


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> dict[str, Any]:
    """List the served models, with the fields of OpenAI's and Anthropic's objects."""
    cards = request.app.state.models.cards()
    ids = [card["id"] for card in cards] or [None]
    pages = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
    return {"object": "list", "data": cards, **pages}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(request: Request, model: str) -> dict[str, Any]:
    return request.app.state.models.card(model)


@router.post("/v1/requests/{request_id}/cancel", tags=["requests"])
async def cancel(request: Request, request_id: str) -> dict[str, Any]:
    """Cancel a request by response id or X-Request-Id; it finishes with reason `abort`."""
    service = service_of(request)
    found = service.registry.find(request_id, owner_of(request))
    if not found:
        raise ApiError(404, "no such request is running", code="request_not_found")
    cancelled = [await generation.cancel() for generation in found]
    return {"id": request_id, "object": "request.cancelled", "cancelled": any(cancelled)}


@router.post("/tokenize", tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of a `prompt`, or of `messages` rendered by the chat template."""
    service = await service_for(request, body.model)
    engine, length = service.engine, service.info.max_model_len
    if body.content is not None:
        return await _tokenize_content(service, body.content, body)
    if (body.prompt is None) == (body.messages is None):
        given = "left out" if body.prompt is None else "given"
        raise conflicting_field("prompt", given, "given exactly when messages is not")
    if body.prompt is not None:
        limit = PromptLimit("prompt", length, service.max_items)
        special = body.add_special_tokens is not False
        (ids,) = await encode_prompts(engine, [body.prompt], special, limit)
    else:
        limit = PromptLimit("messages", length, service.max_items)
        messages = await convert_messages(service, body.messages or ())
        encode = encode_continued if body.continue_final_message else encode_messages
        ids = await encode(engine, messages, limit, **template_options(body))
    names = await token_names(engine, ids) if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": names}
    )


async def _tokenize_content(service: Service, content: str, body: TokenizeRequest) -> Response:
    """Respond in the format of llama.cpp's server."""
    if body.prompt is not None or body.messages is not None:
        raise conflicting_field("content", "given", "left out with prompt or messages")
    limit = PromptLimit("content", service.info.max_model_len, service.max_items)
    special = bool(body.add_special)
    (ids,) = await encode_prompts(service.engine, [content], special, limit)
    if not body.with_pieces:
        return json_response({"tokens": ids})
    pieces = await token_pieces(service.engine, ids)
    return json_response(
        {"tokens": [{"id": i, "piece": p} for i, p in zip(ids, pieces, strict=True)]}
    )


@router.post("/detokenize", tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of token ids."""
    service = await service_for(request, body.model)
    info = service.info
    check_token_ids("tokens", body.tokens, 16 * info.max_model_len, info.vocab_size - 1)
    text = await decode(service.engine, body.tokens, bool(body.skip_special_tokens))
    return json_response({"prompt": text, "content": text})  # vLLM's name and llama.cpp's
