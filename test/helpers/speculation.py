"""Runs of an engine with drafts, to compare with a run without."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

from engine_fakes import make_config
from proposers import Fake

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.engine.config import SpeculativeConfig
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.speculative.control import Speculator
from llaisys.engine.speculative.costs import DraftCosts
from llaisys.engine.speculative.proposer import NgramProposer

COUNT = int(os.environ.get("LLAISYS_TEST_BATCHES", "8"))  # requests per proposer
NATIVE = {"model": "mock", "adapter_class": None}  # the real sampler, 64 tokens
MOCK_VOCAB = 64
SPECULATIVE = {"num_speculative_tokens": 6, "disable_by_batch_size": 1000}


class NothingCosts(DraftCosts):
    """Drafts of maximum length; durations of steps are ignored."""

    def price(self, running: int) -> float:
        return 0.0

    def first_price(self, running: int) -> float:
        return 0.0

    def needs_plain_step(self, running: int) -> bool:
        return False


@dataclass
class Run:
    """The results of one engine."""

    outputs: dict[str, RequestOutput]
    parts: dict[tuple[str, int], list[Any]] = field(default_factory=dict)  # of streams
    stats: dict[str, Any] = field(default_factory=dict)


def random_requests(seed: int, vocab: int) -> list[tuple[list[int], SamplingParams, bool]]:
    """(prompt, parameters, streamed) of a batch of 1 to 16 choices and more."""
    rng = random.Random(seed)
    requests = []
    for _ in range(rng.choice([1, 2, 5, 16])):
        period = [rng.randrange(vocab) for _ in range(rng.randrange(1, 6))]
        prompt = (period * 40)[: rng.randrange(1, 50)]
        changes: dict[str, Any] = {}
        if rng.random() < 0.5:
            changes |= {"temperature": 0.0}
        else:
            changes |= {"temperature": rng.choice([0.2, 1.0]), "top_p": rng.choice([0.7, 1.0])}
            if rng.random() < 0.5:
                changes["seed"] = rng.randrange(1000)
        if rng.random() < 0.3:
            changes |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
        if rng.random() < 0.3:
            changes["frequency_penalty"] = rng.choice([-0.3, 0.4])
        if rng.random() < 0.4:
            changes["logprobs"] = rng.randrange(4)
        if rng.random() < 0.3:
            changes["min_tokens"] = rng.randrange(8)
        if rng.random() < 0.3:
            changes["stop_token_ids"] = [rng.randrange(vocab) for _ in range(3)]
        if rng.random() < 0.3:
            changes["allowed_token_ids"] = sorted(rng.sample(range(vocab), vocab // 2))
        if rng.random() < 0.3:
            changes["logit_bias"] = {rng.randrange(vocab): 3.0, rng.randrange(vocab): -50.0}
        if rng.random() < 0.5:
            changes["stop"] = [bytes([rng.randrange(97, 123)]).decode() for _ in range(2)]
        if rng.random() < 0.4:
            changes["bad_words"] = ["ab", "!", "#$", "1", "23"]
        changes["n"] = rng.choice([1, 1, 1, 3])
        changes["max_tokens"] = max(rng.randrange(1, 40), changes.get("min_tokens", 1))
        requests.append((prompt, SamplingParams(**changes), rng.random() < 0.5))
    return requests


def run(
    requests: list[tuple[list[int], SamplingParams, bool]],
    settings: dict[str, Any],
    truth: dict[str, list[int]] | None = None,
    proposer: type[Fake] | None = None,
    speculative: dict[str, Any] | None = None,
) -> Run:
    """Run requests with drafts of `proposer`, of n-grams, or of the configuration `speculative`."""
    if truth is not None:
        speculative = SPECULATIVE
    engine = LLMEngine(make_config(seed=7, speculative_config=speculative, **settings))
    if proposer is not None:
        engine.core.speculator.proposer = proposer(truth, engine.model_info.vocab_size)
    if speculative is not None:
        engine.core.speculator.costs = NothingCosts()
    for index, (prompt, params, stream) in enumerate(requests):
        engine.submit(prompt, params, f"r{index}", stream=stream)
    result = Run({})
    while engine.has_unfinished():
        for part in engine.step():
            result.parts.setdefault((part.request_id, part.index), []).append(part)
            if part.output is not None:
                result.outputs[part.request_id] = part.output
    engine.core.scheduler.check_integrity()
    result.stats = engine.stats()
    engine.close()
    return result


def answers(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """The parts of the outputs that must not change."""
    return {
        name: [
            (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.error)
            for o in output.outputs
        ]
        for name, output in outputs.items()
    }


def truth_of(plain: Run) -> dict[str, list[int]]:
    """Tokens of each sequence by request id."""
    found = {}
    for name, output in plain.outputs.items():
        for o in output.outputs:
            many = len(output.outputs) > 1
            found[f"{name}#{o.index}" if many else name] = [*output.prompt_token_ids, *o.token_ids]
    return found


def check_streams(result: Run, streamed: list[str]) -> None:
    for (name, index), parts in result.parts.items():
        if name in streamed:
            output = result.outputs[name].outputs[index]
            assert "".join(part.text for part in parts) == output.text
            assert [t for part in parts for t in part.token_ids] == output.token_ids
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            assert logprobs == (output.logprobs or [])


def request_of(tokens: list[int], seq_id: int = 0) -> Request:
    request = Request(f"r{seq_id}", tokens, SamplingParams(), seq_id=seq_id)
    request.max_total_tokens = 1000
    request.num_computed_tokens = len(tokens) - 1
    return request


class Ones(NgramProposer):
    """The same result for every request."""

    def propose(self, requests: Any, counts: Any) -> list[Any]:
        return [[1] * count for count in counts]


def make_speculator(**config: Any) -> Speculator:
    given = SpeculativeConfig(**{"disable_by_batch_size": 32} | config)
    speculator = Speculator(given, Ones(2, 4), vocab_size=64)
    speculator.costs.add_step(1, 0, 0.01)
    return speculator
