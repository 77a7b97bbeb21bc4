"""Vectors of texts: what is asked for, and what is made of a pooled hidden state."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from operator import mul

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import ModelInfo, RequestOutput
from llaisys.common.validation import check_int

Vector = array  # of "f": plain Python, because the server's own process has no numpy


def pooling_params(pooling: str) -> SamplingParams:
    """What is submitted to get a vector and no token."""
    return SamplingParams(max_tokens=0, pooling=pooling, detokenize=False)


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """How a pooled hidden state becomes an embedding: cut, then brought to length 1."""

    dimensions: int | None = None  # the first so many numbers; None: all of them
    normalize: bool = True

    def check(self, info: ModelInfo) -> int:
        """The numbers of a vector. Raises InvalidInputError when the model has fewer."""
        if not info.hidden_size:
            raise InvalidInputError(
                "this model gives no hidden states: it has no embeddings", field="model"
            )
        if self.dimensions is None:
            return info.hidden_size
        return check_int("dimensions", self.dimensions, 1, info.hidden_size)

    def embedding(self, output: RequestOutput) -> Vector[float]:
        """Of a request that has come to its end with a vector."""
        if output.pooled is None:
            raise RuntimeError(f"request {output.request_id} has no vector")
        values = array("f", output.pooled)[: self.dimensions]
        if not self.normalize:
            return values
        length = math.sqrt(math.fsum(map(mul, values, values)))
        return array("f", [value / length for value in values]) if length > 0 else values


def cosine(one: Vector[float], other: Vector[float]) -> float:
    """Of two vectors of length 1."""
    return max(-1.0, min(1.0, math.fsum(map(mul, one, other))))


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """What `LLM.embed` makes of one prompt."""

    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0  # of the prompt, that the prefix cache saved
