"""Compute embeddings of texts for the embedding routes of all APIs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi import Response

from llaisys.common.embedding import EmbeddingFormat, Vector, cosine, pooling_params, score_of
from llaisys.common.sampling import SCORE, SamplingParams
from llaisys.common.types import RequestOutput, Usage
from llaisys.common.validation import MAX_INT, check_count, check_token_ids, invalid_count
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError
from llaisys.server.generation.job import Job, add_usage, check_in_time, engine_error
from llaisys.server.generation.prompts import encode_prompts
from llaisys.server.http.response_bodies import body_response, join_chunks
from llaisys.tokenization.pair import judge_text

BATCH_SIZE = 64  # texts of a request in the engine at once
MAX_VALUES = 1 << 22  # embedding values of one request
Text = str | list[int | str]


# Format a response body from the values of the texts or pairs of a request, in order.
WriteEmbeddings = Callable[[list[Vector], Usage], Iterator[bytes]]
WriteScores = Callable[[list[float], Usage], Iterator[bytes]]


async def respond_with_embeddings(
    job: Job,
    texts: Sequence[Text],
    form: EmbeddingFormat,
    pooling: str | None,
    write: WriteEmbeddings,
) -> Response:
    """Compute the embeddings of `texts` and return the response body that `write` formats."""
    name, info = job.prompt_name, job.service.info
    check_count(name, len(texts), job.service.config.limits.max_inputs, "texts")
    size = form.check(info)
    check_count(name, len(texts) * size, MAX_VALUES, "embedding values")
    special = job.body.add_special_tokens is not False
    prompts = await encode_prompts(job.service.engine, texts, special, job.prompt_limit)
    params = pooling_params(info.pooling if pooling is None else pooling)

    def make(outputs: list[RequestOutput], usage: Usage) -> Iterator[bytes]:
        return write([form.embedding(output) for output in outputs], usage)

    return await _respond(job, prompts, [params] * len(prompts), size, make)


async def respond_with_scores(
    job: Job,
    first: Sequence[Text],
    second: Sequence[Text],
    pooling: str | None,
    write: WriteScores,
) -> Response:
    """Compute the scores of pairs of texts, or of one text with many: those of a reranker,
    otherwise the cosine similarities of their embeddings."""
    if not job.service.info.scores_pairs:

        def write_cosines(embeddings: list[Vector], usage: Usage) -> Iterator[bytes]:
            left, right = embeddings[: len(first)], embeddings[len(first) :]
            left = left * (len(right) // len(left))
            return write([cosine(a, b) for a, b in zip(left, right, strict=True)], usage)

        texts, form = [*first, *second], EmbeddingFormat()
        return await respond_with_embeddings(job, texts, form, pooling, write_cosines)
    name, limit = job.prompt_name, job.prompt_limit
    check_count(name, len(first) + len(second), job.service.config.limits.max_inputs, "texts")
    engine = job.service.engine
    tokenizer = engine.require_tokenizer()
    pairs: list[tuple[list[int], int | None]]
    if job.service.info.judges_pairs:
        all_first = [*first] * (len(second) // len(first))
        texts = [judge_text(name, a, b) for a, b in zip(all_first, second, strict=True)]
        encoded = await encode_prompts(engine, texts, False, limit)
        pairs = [(tokenizer.judge_prompt(ids), None) for ids in encoded]
    else:
        left = await encode_prompts(engine, first, False, limit)
        right = await encode_prompts(engine, second, False, limit)
        left = left * (len(right) // len(left))
        pairs = [tokenizer.join_pair(a, b) for a, b in zip(left, right, strict=True)]
    for ids, _ in pairs:
        limit.check_tokens(len(ids))
    params = [pooling_params(SCORE, second_text) for _, second_text in pairs]

    def make(outputs: list[RequestOutput], usage: Usage) -> Iterator[bytes]:
        return write([score_of(output) for output in outputs], usage)

    return await _respond(job, [ids for ids, _ in pairs], params, 1, make)


async def _respond(
    job: Job,
    prompts: list[list[int]],
    params: list[SamplingParams],
    size: int,
    make: Callable[[list[RequestOutput], Usage], Iterator[bytes]],
) -> Response:
    """Run the prompts and return the response body of `make`. `size`: values per prompt."""
    name, texts, vocab_size = job.prompt_name, job.service.engine.texts, job.service.info.vocab_size
    await texts.run(sum(map(len, prompts)), _check_prompts, name, prompts, vocab_size)
    values = len(prompts) * size
    job.hold(job.service.embedding_budget.reserve(name, values))

    async def respond() -> Response:
        outputs = await _run(job, prompts, params)
        usage = add_usage([output.usage for output in outputs])
        job.log_usage(usage, outputs[0].finish_reason)

        def write() -> list[bytes]:
            return join_chunks(make(outputs, usage))

        return body_response(write() if values <= INLINE_CHARS else await texts.write_answer(write))

    return await job.respond(respond())


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
