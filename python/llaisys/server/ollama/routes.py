"""Ollama's routes: chat, generate, embed, models."""

import time
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response

from llaisys.chat.reader import AnswerReader
from llaisys.common.embedding import EmbeddingFormat, Vector
from llaisys.common.types import Usage
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.embeddings import respond_with_embeddings
from llaisys.server.generation.infill import encode_infill
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import encode_prompts
from llaisys.server.generation.service import service_for, unknown_model
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_bytes, json_response
from llaisys.server.ollama.formatter import OllamaFormatter, error_body, nanoseconds, stamp
from llaisys.server.ollama.models import model_details, model_entry, running_entry
from llaisys.server.ollama.schemas import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaRequest,
    PullRequest,
    ShowRequest,
)

router = ProtocolRouter(error_body, untyped_bodies=True, prefix="/api", tags=["Ollama"])

API_VERSION = "0.12.0"  # of Ollama's API; clients require a minimum


@router.post("/chat")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, streamed as lines of JSON unless `stream` is false."""
    if body.only_loads:
        return await loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    job = await Job.of(request, body.chat, "messages")
    opened = await open_chat(job, body.chat)
    names = token_names(job, body)
    return await opened.run(OllamaFormatter(opened.new_reader(), body.model, True, names))


def token_names(job: Job, body: OllamaRequest) -> TokenNames | None:
    """Return the names of tokens for logprobs, if requested."""
    return TokenNames(job.service.engine.tokenizer) if body.logprobs else None


@router.post("/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer one prompt, with the chat template unless `raw` is set."""
    if body.only_loads:
        return await loaded(request, body, {"response": ""})
    job = await Job.of(request, body.chat, "prompt")
    names = token_names(job, body)
    if body.raw or body.suffix:
        params = await job.sampling(body.chat.to_sampling)
        engine, prompt, limit = job.service.engine, body.prompt or "", job.prompt_limit
        if body.suffix:
            infill = await encode_infill(engine, prompt, body.suffix, limit, "suffix")
            prompts, params = [infill.ids], infill.with_stop_tokens(params)
        else:
            prompts = await encode_prompts(engine, [prompt], True, limit)
        formatter = OllamaFormatter(AnswerReader(), body.model, False, names)
        return await job.run(prompts, params, formatter)
    opened = await open_chat(job, body.chat)
    if body.context:
        opened.prompt = [*body.context, *opened.prompt]
        job.prompt_limit.check_tokens(len(opened.prompt))
    formatter = OllamaFormatter(opened.new_reader(), body.model, False, names, opened.prompt)
    return await opened.run(formatter)


@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Return a normalized embedding per text."""
    texts, started = body.texts(), time.monotonic()
    if not texts:
        await service_for(request, body.name)
        return json_response({"model": body.model, "embeddings": []})
    job = await Job.of(request, body.completion(), "input")

    def write(vectors: list[Vector], usage: Usage) -> Iterator[bytes]:
        yield b'{"embeddings":['
        for index, vector in enumerate(vectors):
            yield (b"," if index else b"") + json_bytes(list(vector))
        rest = {
            "model": body.model,
            "total_duration": nanoseconds(time.monotonic() - started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }
        yield b"]," + json_bytes(rest)[1:]

    return await respond_with_embeddings(job, texts, EmbeddingFormat(body.dimensions), None, write)


@router.post("/embeddings")
async def old_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """The older route: one text, its embedding not normalized."""
    if not body.prompt:
        await service_for(request, body.name)
        return json_response({"embedding": []})
    job = await Job.of(request, body.completion(), "prompt")

    def write(vectors: list[Vector], usage: Usage) -> Iterator[bytes]:
        yield json_bytes({"embedding": list(vectors[0])})

    form = EmbeddingFormat(normalize=False)
    return await respond_with_embeddings(job, [body.prompt], form, None, write)


async def loaded(request: Request, body: OllamaRequest, empty: dict[str, Any]) -> Response:
    """Respond to a request without a prompt, which loads a model. With `keep_alive` 0 clients
    expect an unload, which is acknowledged but not done."""
    await service_for(request, body.chat.model)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    head = {"model": body.model, "created_at": stamp()}
    return json_response({**head, **empty, "done": True, "done_reason": reason})


@router.get("/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the served models."""
    services = request.app.state.models.services
    return {"models": [await model_entry(s, name) for s in services for name in s.all_names]}


@router.get("/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the loaded models."""
    loaded = [service for service in request.app.state.models.services if service.is_loaded]
    return {"models": [await running_entry(s, name) for s in loaded for name in s.all_names]}


@router.post("/show")
async def show(request: Request, body: ShowRequest) -> dict[str, Any]:
    """Describe a model."""
    name = body.model_name.removesuffix(":latest")
    return await model_details(await service_for(request, name), name)


@router.post("/pull")
async def pull(request: Request, body: PullRequest) -> Response:
    """Report success for a served model, which needs no download; other models are a 404."""
    name, models = body.model_name, request.app.state.models
    if not models.has_model(name.removesuffix(":latest")):
        names = [known for service in models.services for known in service.all_names]
        raise unknown_model(name, names)
    if body.stream is False:
        return json_response({"status": "success"})
    lines = [json_bytes({"status": text}) for text in ("pulling manifest", "success")]
    return Response(b"\n".join([*lines, b""]), media_type=OllamaFormatter.media_type)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": API_VERSION}
