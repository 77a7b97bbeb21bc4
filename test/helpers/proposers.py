"""Proposers for tests: always right, always wrong, partly right."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llaisys.common.request import Request
from llaisys.engine.speculative import Proposer


class Fake(Proposer):
    """Has the tokens of each request (prompt and output by request id)."""

    def __init__(self, truth: dict[str, list[int]], vocab_size: int) -> None:
        self.truth = truth
        self.vocab_size = vocab_size
        self.rng = random.Random(5)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        return [self.one(*pair) for pair in zip(requests, counts, strict=True)]

    def one(self, request: Request, count: int) -> Sequence[int]:
        raise NotImplementedError

    def coming(self, request: Request, count: int) -> list[int]:
        """The true continuation. With asynchronous scheduling a request may run one step past its
        stop string."""
        tokens, known = self.truth[request.request_id], len(request.token_ids)
        said = request.token_ids[: len(tokens)]
        assert tokens[:known] == said, "the answer is not the one without drafts"
        return tokens[known : known + count]

    def release(self, seq_id: int) -> None:
        pass


class AlwaysRight(Fake):
    def one(self, request: Request, count: int) -> Sequence[int]:
        return self.coming(request, count)


class AlwaysWrong(Fake):
    def one(self, request: Request, count: int) -> Sequence[int]:
        return [(token + 1) % self.vocab_size for token in self.coming(request, count)]


class SometimesRight(Fake):
    """Right up to a varying index."""

    def one(self, request: Request, count: int) -> Sequence[int]:
        tokens = self.coming(request, count)
        return [t if self.rng.random() < 0.7 else (t + 1) % self.vocab_size for t in tokens]


class Garbage(Fake):
    """Ids outside the vocabulary, also after valid ones."""

    def one(self, request: Request, count: int) -> Sequence[int]:
        odd = self.rng.choice([-1, self.vocab_size, 1 << 40, -(1 << 62)])
        return [*self.coming(request, self.rng.randrange(count + 1)), odd, 1, 2]


class TooMany(Fake):
    def one(self, request: Request, count: int) -> Sequence[int]:
        return [*self.coming(request, 100 * count), *[1] * 10_000]


class NoIdea(Fake):
    def one(self, request: Request, count: int) -> Sequence[int]:
        return []
