"""Embedding routes: OpenAI's embeddings, vLLM's score, Jina's rerank."""

import base64
import sys
import time
import uuid
from array import array
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response

from llaisys.common.embedding import Vector
from llaisys.common.types import Usage
from llaisys.server.generation.embeddings import (
    respond_with_embeddings,
    respond_with_scores,
    usage_object,
)
from llaisys.server.generation.job import Job
from llaisys.server.generation.service import service_of
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.schemas.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest

router = ProtocolRouter(tags=["embeddings"])


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Return an embedding per text: floats, or their bytes with `encoding_format: base64`."""
    encode = base64_of if body.encoding_format == "base64" else list
    texts = body.inputs()
    job = await Job.of(request, body.completion(), "input")

    def write(vectors: list[Vector], usage: Usage) -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        for index, vector in enumerate(vectors):
            entry = {"object": "embedding", "index": index, "embedding": encode(vector)}
            yield (b"," if index else b"") + json_bytes(entry)
        rest = {"model": job.model, "usage": usage_object(usage)}
        yield b"]," + json_bytes(rest)[1:]

    return await respond_with_embeddings(job, texts, body.form, body.pooling, write)


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def score(request: Request, body: ScoreRequest) -> Response:
    """Return scores of texts: one against many, or pairs. A reranker scores each pair; other models
    give cosine similarities."""
    first, second = body.pairs()
    job = await Job.of(request, body.completion(), "text_1 + text_2")

    def write(scores: list[float], usage: Usage) -> Iterator[bytes]:
        data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
        yield json_bytes(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": job.model,
                "data": data,
                "usage": usage_object(usage),
            }
        )

    return await respond_with_scores(job, first, second, body.pooling, write)


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Sort documents by their score with the query, highest first."""
    texts = body.ranked(service_of(request).config.limits.max_inputs)
    job = await Job.of(request, body.completion(), "query + documents")

    def write(scores: list[float], usage: Usage) -> Iterator[bytes]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        order = order[: body.top_n or None]
        if body.texts is not None:
            with_text = bool(body.return_text)
            yield json_bytes(
                [
                    {"index": i, "score": scores[i], **({"text": texts[i]} if with_text else {})}
                    for i in order
                ]
            )
            return
        results: list[dict[str, Any]] = []
        for index in order:
            entry: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                entry["document"] = {"text": texts[index]}
            results.append(entry)
        yield json_bytes(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": job.model,
                "usage": usage_object(usage),
                "results": results,
            }
        )

    return await respond_with_scores(job, [body.query], texts, body.pooling, write)


def base64_of(vector: Vector) -> str:
    """Encode as little-endian float32."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
