"""Compute embeddings of texts for the embedding routes of all APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from llaisys.common.embedding import (
    EmbeddingFormat,
    Vector,
    cosine,
    pooling_params,
    score_of,
)
from llaisys.common.sampling import SCORE, SamplingParams
from llaisys.common.types import RequestOutput, Usage
from llaisys.common.validation import MAX_INT, check_count, check_token_ids, invalid_count
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError
from llaisys.server.generation.generation import ClientDisconnected, unless_disconnected
from llaisys.server.generation.job import Job, add_usage, check_in_time, engine_error
from llaisys.server.generation.prompts import encode_prompts
from llaisys.server.http.payload import body_response, join_chunks
from llaisys.server.openai.schemas import CompletionRequest
from llaisys.tokenization.pair import judge_text

BATCH_SIZE = 64  # texts of a request in the engine at once
MAX_VALUES = 1 << 22  # embedding values of one request
Text = str | list[int | str]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The embeddings of a request's texts, in order."""

    embeddings: list[Vector[float]]
    usage: Usage


Write = Callable[[Job, Pooled], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a request's pairs of texts, in order."""

    scores: list[float]
    usage: Usage


WriteScores = Callable[[Job, Scored], Iterator[bytes]]


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
    return await _embed(request, job, name, texts, form, pooling, write)


async def _embed(
    request: Request,
    job: Job,
    name: str,
    texts: Sequence[Text],
    form: EmbeddingFormat,
    pooling: str | None,
    write: Write,
) -> Response:
    check_count(name, len(texts), job.service.config.limits.max_inputs, "texts")
    size = form.check(job.service.info)
    check_count(name, len(texts) * size, MAX_VALUES, "embedding values")
    special = job.body.add_special_tokens is not False
    prompts = await encode_prompts(job.service.engine, texts, special, job.prompt_limit)
    params = pooling_params(job.service.info.pooling if pooling is None else pooling)

    def make(outputs: list[RequestOutput], usage: Usage) -> list[bytes]:
        embeddings = [form.embedding(output) for output in outputs]
        return join_chunks(write(job, Pooled(embeddings, usage)))

    return await _respond(request, job, name, prompts, [params] * len(prompts), size, make)


async def respond_with_scores(
    request: Request,
    body: CompletionRequest,
    name: str,
    first: Sequence[Text],
    second: Sequence[Text],
    pooling: str | None,
    write: WriteScores,
) -> Response:
    """Compute the scores of pairs of texts, or of one text with many: those of a reranker,
    otherwise the cosine similarities of their embeddings."""
    job = await Job.of(request, body, name)
    if not job.service.info.scores_pairs:

        def write_cosines(job: Job, pooled: Pooled) -> Iterator[bytes]:
            left, right = pooled.embeddings[: len(first)], pooled.embeddings[len(first) :]
            left = left * (len(right) // len(left))
            scores = [cosine(a, b) for a, b in zip(left, right, strict=True)]
            return write(job, Scored(scores, pooled.usage))

        texts, form = [*first, *second], EmbeddingFormat()
        return await _embed(request, job, name, texts, form, pooling, write_cosines)
    check_count(name, len(first) + len(second), job.service.config.limits.max_inputs, "texts")
    engine = job.service.engine
    tokenizer = engine.require_tokenizer()
    pairs: list[tuple[list[int], int | None]]
    if job.service.info.judges_pairs:
        all_first = [*first] * (len(second) // len(first))
        texts = [judge_text(name, a, b) for a, b in zip(all_first, second, strict=True)]
        encoded = await encode_prompts(engine, texts, False, job.prompt_limit)
        pairs = [(tokenizer.judge_prompt(ids), None) for ids in encoded]
    else:
        left = await encode_prompts(engine, first, False, job.prompt_limit)
        right = await encode_prompts(engine, second, False, job.prompt_limit)
        pairs = [
            tokenizer.join_pair(a, b)
            for a, b in zip(left * (len(right) // len(left)), right, strict=True)
        ]
    for ids, _ in pairs:
        job.prompt_limit.check_tokens(len(ids))
    params = [pooling_params(SCORE, second_text) for _, second_text in pairs]

    def make(outputs: list[RequestOutput], usage: Usage) -> list[bytes]:
        return join_chunks(write(job, Scored([score_of(output) for output in outputs], usage)))

    return await _respond(request, job, name, [ids for ids, _ in pairs], params, 1, make)


async def _respond(
    request: Request,
    job: Job,
    name: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    size: int,
    make: Callable[[list[RequestOutput], Usage], list[bytes]],
) -> Response:
    """Run the prompts and return the response body of `make`. `size`: values per prompt."""
    tokens, vocab_size = sum(map(len, prompts)), job.service.info.vocab_size
    await job.service.engine.texts.run(tokens, _check_prompts, name, prompts, vocab_size)
    values = len(prompts) * size
    reservation = ExitStack()
    reservation.enter_context(job.service.embedding_budget.reserve(name, values))
    request.scope["state"]["at_end"].append(reservation.close)
    try:
        outputs = await unless_disconnected(request.receive, _run(job, prompts, params))
    except ClientDisconnected:
        request.scope["state"]["log"]["disconnected"] = True
        return Response(status_code=499)
    usage = add_usage([output.usage for output in outputs])
    job.log_usage(usage, outputs[0].finish_reason)
    if values <= INLINE_CHARS:
        return body_response(make(outputs, usage))
    return body_response(await job.service.engine.texts.write_answer(partial(make, outputs, usage)))


def _check_prompts(name: str, prompts: list[list[int]], vocab_size: int) -> None:
    """Raise InvalidInputError for an empty text or an invalid token id, with its index."""
    for index, prompt in enumerate(prompts):
        where = name if len(prompts) == 1 else f"{name}[{index}]"
        if not prompt:
            raise invalid_count(where, 0, "tokens", "at least 1")
        check_token_ids(where, prompt, MAX_INT, vocab_size - 1)


async def _run(
    job: Job, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    """Run the prompts in batches, so that a request with thousands does not fill the engine."""
    found: list[RequestOutput] = []
    own = [job.body.request_id] if job.body.request_id else []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        generation = job.service.generation(job.owner, [job.request_id, *own], len(batch))
        async with generation:
            own_params = params[start : start + BATCH_SIZE]
            await generation.submit(
                batch, own_params, False, None, True, job.request_id, lora=job.lora
            )
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
