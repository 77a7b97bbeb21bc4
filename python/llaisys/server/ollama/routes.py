"""Ollama's routes, for clients that know only those: chat, generate, embed, and what there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llaisys.chat.reader import AnswerReader
from llaisys.common.embedding import EmbeddingFormat
from llaisys.common.validation import invalid_value
from llaisys.server.embeddings.vectors import Pooled, answer_with_vectors
from llaisys.server.generation.chat import open_chat
from llaisys.server.generation.infill import encode_infill
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import encode_prompts
from llaisys.server.http.bodies import CheckedRoute
from llaisys.server.http.payload import json_bytes, json_response
from llaisys.server.ollama.answer import OllamaAnswer, error_body, nanoseconds, now
from llaisys.server.ollama.models import model_details, model_entry, running_entry
from llaisys.server.ollama.schemas import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from llaisys.server.service import service_for

__all__ = ["error_body", "router"]

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=CheckedRoute)

API_VERSION = "0.12.0"  # of Ollama, whose routes these are; clients ask for a least one


@router.post("/chat")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, a line of JSON for each part unless `stream` is false."""
    if body.only_loads:
        return await loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    opened = await open_chat(await Job.of(request, body.chat, "messages"), body.chat)
    return await opened.run(OllamaAnswer(opened.new_reader(), body.model, chat=True))


@router.post("/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer one prompt, through the model's template or, with `raw`, without it."""
    if body.only_loads:
        return await loaded(request, body, {"response": ""})
    job = await Job.of(request, body.chat, "prompt")
    if body.raw or body.suffix:
        params = await job.sampling(body.chat.to_sampling)
        engine, prompt, limit = job.service.engine, body.prompt or "", job.prompt_limit
        if body.suffix:
            infill = await encode_infill(engine, prompt, body.suffix, limit, "suffix")
            prompts, params = [infill.ids], infill.with_stop_tokens(params)
        else:
            prompts = await encode_prompts(engine, [prompt], True, limit)
        return await job.run(prompts, params, OllamaAnswer(AnswerReader(), body.model, chat=False))
    opened = await open_chat(job, body.chat)
    return await opened.run(OllamaAnswer(opened.new_reader(), body.model, chat=False))


@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """A vector of length 1 for each text."""
    texts, started = body.texts(), time.monotonic()
    if not texts:
        await service_for(request, body.name)
        return json_response({"model": body.model, "embeddings": []})

    def write(job: Job, pooled: Pooled) -> Iterator[bytes]:
        yield b'{"embeddings":['
        for index, vector in enumerate(pooled.vectors):
            yield (b"," if index else b"") + json_bytes(list(vector))
        rest = {
            "model": body.model,
            "total_duration": nanoseconds(time.monotonic() - started),
            "load_duration": 0,
            "prompt_eval_count": pooled.usage.prompt_tokens,
        }
        yield b"]," + json_bytes(rest)[1:]

    form = EmbeddingFormat(body.dimensions)
    return await answer_with_vectors(request, body.completion(), "input", texts, form, None, write)


@router.post("/embeddings")
async def old_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """The older form: one text, and its vector as long as it is."""
    if not body.prompt:
        await service_for(request, body.name)
        return json_response({"embedding": []})

    def write(job: Job, pooled: Pooled) -> Iterator[bytes]:
        yield json_bytes({"embedding": list(pooled.vectors[0])})

    form = EmbeddingFormat(normalize=False)
    return await answer_with_vectors(
        request, body.completion(), "prompt", [body.prompt], form, None, write
    )


async def loaded(request: Request, body: OllamaRequest, said: dict[str, Any]) -> Response:
    """Nothing to answer: clients ask this to load a model, or with `keep_alive` 0 to let it go. It
    is there either way."""
    await service_for(request, body.chat.model)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    head = {"model": body.model, "created_at": now()}
    return json_response({**head, **said, "done": True, "done_reason": reason})


@router.get("/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The models that there are."""
    services = request.app.state.models.services
    return {"models": [await model_entry(s, name) for s in services for name in s.model_names]}


@router.get("/ps")
async def running(request: Request) -> dict[str, Any]:
    """The models that are loaded."""
    loaded = [service for service in request.app.state.models.services if service.is_loaded]
    return {"models": [await running_entry(s, name) for s in loaded for name in s.model_names]}


@router.post("/show")
async def show(request: Request, body: ShowRequest) -> dict[str, Any]:
    """What is known of a model."""
    name = body.model or body.name
    if not name:
        raise invalid_value("model", name, "the name of a model")
    service = await service_for(request, name.removesuffix(":latest"))
    return model_details(service)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": API_VERSION}
