"""Compute embeddings of texts for the embedding routes of all APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from llaisys.common.embedding import EmbeddingFormat, Vector, pooling_params
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput, Usage
from llaisys.common.validation import MAX_INT, check_count, check_token_ids, invalid_count
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError
from llaisys.server.generation.generation import ClientDisconnected, unless_disconnected
from llaisys.server.generation.job import Job, add_usage, check_in_time, engine_error
from llaisys.server.generation.prompts import encode_prompts
from llaisys.server.http.payload import body_response, join_chunks
from llaisys.server.openai.schemas import CompletionRequest

BATCH_SIZE = 64  # texts of a request in the engine at once
MAX_VALUES = 1 << 22  # embedding values of one request
Text = str | list[int | str]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The embeddings of a request's texts, in order."""

    embeddings: list[Vector[float]]
    usage: Usage


Write = Callable[[Job, Pooled], Iterator[bytes]]


async def respond_with_embeddings(
    request: Request,
    body: CompletionRequest,
    name: str,
    texts: Sequence[Text],
    form: EmbeddingFormat,
    pooling: str | None,
    write: Write,
) -> Response:
    """Compute the embeddings of `texts` and return the response body that `write` formats. `name`:
    the field of the texts in errors. `body`: the other fields of the request."""
    job = await Job.of(request, body, name)
    limits = job.service.config.limits
    check_count(name, len(texts), limits.max_inputs, "texts")
    size = form.check(job.service.info)
    check_count(name, len(texts) * size, MAX_VALUES, "embedding values")
    special = body.add_special_tokens is not False
    prompts = await encode_prompts(job.service.engine, texts, special, job.prompt_limit)
    tokens, vocab_size = sum(map(len, prompts)), job.service.info.vocab_size
    await job.service.engine.texts.run(tokens, _check_prompts, name, prompts, vocab_size)
    params = pooling_params(job.service.config.engine.pooling if pooling is None else pooling)
    reservation = ExitStack()
    reservation.enter_context(job.service.embedding_budget.reserve(name, len(texts) * size))
    request.scope["state"]["at_end"].append(reservation.close)
    try:
        outputs = await unless_disconnected(request.receive, _run(job, prompts, params))
    except ClientDisconnected:
        request.scope["state"]["log"]["disconnected"] = True
        return Response(status_code=499)
    usage = add_usage([output.usage for output in outputs])
    job.log_usage(usage, outputs[0].finish_reason)

    def make() -> list[bytes]:
        embeddings = [form.embedding(output) for output in outputs]
        return join_chunks(write(job, Pooled(embeddings, usage)))

    if len(texts) * size <= INLINE_CHARS:
        return body_response(make())
    return body_response(await job.service.engine.texts.write_answer(make))


def _check_prompts(name: str, prompts: list[list[int]], vocab_size: int) -> None:
    """Raise InvalidInputError for an empty text or an invalid token id, with its index."""
    for index, prompt in enumerate(prompts):
        where = name if len(prompts) == 1 else f"{name}[{index}]"
        if not prompt:
            raise invalid_count(where, 0, "tokens", "at least 1")
        check_token_ids(where, prompt, MAX_INT, vocab_size - 1)


async def _run(job: Job, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Run the prompts in batches, so that a request with thousands does not fill the engine."""
    found: list[RequestOutput] = []
    own = [job.body.request_id] if job.body.request_id else []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        generation = job.service.generation(job.owner, [job.request_id, *own], len(batch))
        async with generation:
            await generation.submit(batch, params, False, None, True, job.request_id, lora=job.lora)
            outputs = await generation.result()
        for output in outputs:
            _check(output)
        found += outputs
    return found


def _check(output: RequestOutput) -> None:
    """Raise ApiError when the request ended without an embedding."""
    if output.pooled is None:
        check_in_time(output.finish_reason)
        if output.finish_reason == "abort":
            raise ApiError(409, "the request was cancelled", code="cancelled")
        raise engine_error()


def usage_object(usage: Usage) -> dict[str, Any]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
