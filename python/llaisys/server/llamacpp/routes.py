"""llama.cpp's routes."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request, Response

from llaisys.common.embedding import EmbeddingFormat, Vector
from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import Usage
from llaisys.common.validation import invalid_value
from llaisys.server.errors import ApiError
from llaisys.server.generation.embeddings import respond_with_embeddings
from llaisys.server.generation.infill import Snippet, encode_infill
from llaisys.server.generation.job import Job
from llaisys.server.generation.llama_object import FinalObject, settings_object
from llaisys.server.generation.prompts import (
    PromptLimit,
    convert_messages,
    encode_prompts,
    render_messages,
)
from llaisys.server.generation.service import Service, owner_of, service_for
from llaisys.server.generation.slots import read_tokens, write_tokens
from llaisys.server.http.event_stream import unless_disconnected
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_bytes, json_response
from llaisys.server.llamacpp.formatter import LlamaFormatter
from llaisys.server.llamacpp.schemas import (
    ApplyTemplateRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaEmbeddingRequest,
    LlamaSampling,
    SlotRequest,
)
from llaisys.server.schemas.chat import template_options


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return OpenAI's error with llama.cpp's type for a prompt that is too long."""
    body = error.body(request_id)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        body["error"]["type"] = "exceed_context_size_error"
        body["error"]["message"] += "; this exceeds the available context size"
    return body


router = ProtocolRouter(tags=["llama.cpp"])
completion_router = ProtocolRouter(error_body, tags=["llama.cpp"])

NO_FILE = SlotRequest(filename="")


@completion_router.post("/completion")
@completion_router.post("/completions")
async def completion(request: Request, body: LlamaCompletionRequest) -> Response:
    """Complete a prompt: text, token ids, a mixed list, or a list of prompts."""
    job = await Job.of(request, body, "prompt")
    params = await job.sampling(body.to_sampling)
    prompts = body.prompts(job.service.config.limits.max_prompts)
    special = body.add_special_tokens is not False
    encoded = await encode_prompts(job.service.engine, prompts, special, job.prompt_limit)
    encoded = [job.truncate(prompt) for prompt in encoded]
    return await _answer(job, body, encoded, params)


@completion_router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill in the middle, for models with FIM tokens."""
    job = await Job.of(request, body, "input_prefix + prompt + input_suffix")
    params = await job.sampling(body.to_sampling)
    snippets = [Snippet(extra.filename or "", extra.text) for extra in body.input_extra or ()]
    new = params.max_tokens
    found = await encode_infill(
        job.service.engine,
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        job.prompt_limit,
        "input_prefix",
        snippets,
        job.max_model_len // 4 if new is None else new,
    )
    return await _answer(job, body, [found.ids], found.with_stop_tokens(params))


async def _answer(
    job: Job, body: LlamaSampling, prompts: list[list[int]], params: SamplingParams
) -> Response:
    job.line_seconds = body.line_seconds
    shows = body.shows("prompt")
    objects = [await FinalObject.of_prompt(job, params, prompt, shows) for prompt in prompts]
    return await job.run(prompts, params, LlamaFormatter(job, body, objects, params))


@router.post("/apply-template")
async def apply_template(request: Request, body: ApplyTemplateRequest) -> Response:
    """Return the chat rendered by the template."""
    service = await service_for(request, body.model)
    limit = PromptLimit("messages", service.info.max_model_len, service.max_items)
    messages = await convert_messages(service, body.messages)
    text = await render_messages(service.engine, messages, limit, **template_options(body))
    return json_response({"prompt": text})


@router.post("/embedding")
@router.post("/embeddings")
async def embedding(request: Request, body: LlamaEmbeddingRequest) -> Response:
    """Return a list with an embedding per text, each wrapped in a list."""
    name, texts = body.inputs()
    job = await Job.of(request, body.completion(), name)

    def write(vectors: list[Vector], usage: Usage) -> Iterator[bytes]:
        for index, vector in enumerate(vectors):
            entry = {"index": index, "embedding": [list(vector)]}
            yield (b"," if index else b"[") + json_bytes(entry)
        yield b"]"

    form = EmbeddingFormat(normalize=body.embd_normalize != -1)
    return await respond_with_embeddings(job, texts, form, body.pooling, write)


@router.get("/props")
async def props(request: Request) -> Response:
    """Return the model's properties and the sampling defaults."""
    service = await service_for(request, None)
    info, tokenizer = service.info, service.engine.tokenizer
    params = SamplingParams().with_defaults(service.engine.inputs.defaults)
    special = getattr(tokenizer, "special_tokens", {})
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": info.max_model_len,
                "is_processing": False,
                "params": settings_object(params, stream=False),
            },
            "total_slots": service.config.engine.scheduler.max_num_seqs,
            "model_alias": service.model_names[0],
            "model_path": service.model_names[0],  # the name: paths are not shown
            "modalities": {"vision": False, "audio": False},
            "chat_template": getattr(tokenizer, "chat_template", None) or "",
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": service.fingerprint,
            "is_sleeping": False,
        }
    )


@router.get("/slots")
async def slots(request: Request, fail_on_no_slot: str | None = None) -> Response:
    """Return a slot object per concurrent sequence. The engine has no slots: only the number of
    busy ones is meaningful, and no request content is shown."""
    service = await service_for(request, None)
    if not service.config.serve_slots:
        raise ApiError(501, "/slots is not served (--no-slots)", code="unsupported")
    total = service.config.engine.scheduler.max_num_seqs
    busy = min(total, service.admission.open)
    if fail_on_no_slot is not None and busy >= total:
        raise ApiError(503, f"all {total} sequences are running", code="full", retry_after=1)
    return json_response([slot(service, number, number < busy) for number in range(total)])


@router.post("/slots/{number}")
async def change_slot(
    request: Request, number: int, action: str | None = None, body: SlotRequest = NO_FILE
) -> Response:
    """Save the tokens of a slot to a file, compute those of a file into its prefix cache, or erase
    its cache."""
    service = await service_for(request, None)
    slots, owner = service.slots, owner_of(request)
    if slots.folder is None:
        text = "slots are not saved by this server; start it with --slot-save-path"
        raise ApiError(501, text, param="action", code="unsupported")
    slots.check(number)
    if action == "erase":
        return json_response({"id_slot": number, "n_erased": slots.replace(owner, number)})
    if action not in ("save", "restore"):
        raise invalid_value("action", action, "save, restore or erase")
    name = body.filename
    path, started = slots.path(owner, name), time.monotonic()
    found: dict[str, Any] = {"id_slot": number, "filename": name}
    if action == "save":
        tokens = slots.tokens(owner, number)
        size = await asyncio.to_thread(write_tokens, path, tokens)
        found |= {"n_saved": len(tokens), "n_written": size}
    else:
        limits = (service.info.max_model_len, service.info.vocab_size)
        tokens, size = await asyncio.to_thread(read_tokens, path, *limits)
        slots.replace(owner, number, tokens)
        if tokens:
            await compute_prefix(request, service, tokens, slots.salt(owner, number))
        found |= {"n_restored": len(tokens), "n_read": size}
    spent = round(1e3 * (time.monotonic() - started), 3)
    return json_response({**found, "timings": {f"{action}_ms": spent}})


async def compute_prefix(
    request: Request, service: Service, tokens: Sequence[int], salt: str | None
) -> None:
    """Compute tokens into the prefix cache."""
    state = request.scope["state"]
    generation = service.generation(owner_of(request), [state["request_id"]], 1)

    async def run() -> None:
        async with generation:
            only = SamplingParams(max_tokens=0)
            await generation.submit([list(tokens)], only, False, salt, True, state["request_id"])
            await generation.result()

    await unless_disconnected(request.receive, run())


def slot(service: Service, number: int, is_processing: bool) -> dict[str, Any]:
    length = service.info.max_model_len
    return {"id": number, "n_ctx": length, "speculative": False, "is_processing": is_processing}
