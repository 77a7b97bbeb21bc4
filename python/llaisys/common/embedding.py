"""Embeddings: request parameters, and the embedding of a pooled hidden state."""

import math
from array import array
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import ModelInfo, RequestOutput
from llaisys.common.validation import check_int

Vector: TypeAlias = "array[float]"  # the server process does not import numpy


def pooling_params(pooling: str, second_text: int | None = None) -> SamplingParams:
    """Return the parameters of a request for an embedding, or for the score of a pair."""
    return SamplingParams(max_tokens=0, pooling=pooling, second_text=second_text, detokenize=False)


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """Truncation and normalization of a pooled hidden state."""

    dimensions: int | None = None  # size of the embedding; None: hidden size
    normalize: bool = True

    def check(self, info: ModelInfo) -> int:
        """Return the size of an embedding; InvalidInputError when the model's is smaller."""
        if not info.hidden_size or info.scores_pairs:
            why = "is a reranker" if info.scores_pairs else "gives no hidden states"
            raise InvalidInputError(f"this model {why}: it has no embeddings", field="model")
        if self.dimensions is None:
            return info.hidden_size
        return check_int("dimensions", self.dimensions, 1, info.hidden_size)

    def embedding(self, output: RequestOutput) -> Vector:
        if output.pooled is None:
            raise RuntimeError(f"request {output.request_id} has no embedding")
        values = array("f", output.pooled)[: self.dimensions]
        if not self.normalize:
            return values
        length = math.sqrt(math.fsum(map(mul, values, values)))
        return array("f", [value / length for value in values]) if length > 0 else values


def score_of(output: RequestOutput) -> float:
    """Return the score of a finished request with the pooling `score`."""
    if output.pooled is None:
        raise RuntimeError(f"request {output.request_id} has no score")
    return array("f", output.pooled)[0]


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine similarity of two normalized vectors."""
    return max(-1.0, min(1.0, math.fsum(map(mul, one, other))))


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The result of `LLM.embed` for one prompt."""

    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
