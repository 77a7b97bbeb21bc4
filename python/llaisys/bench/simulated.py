"""`llaisys bench speculative --simulate RATE`: cost of a verification step at an acceptance rate.

The draft tokens are the model's own answer, each replaced with probability 1 - RATE. So the cost of
verification can be measured on random weights, whose text is unpredictable. The answer is generated
in steps with drafts: on a GPU, products of one row and of several rows round differently, and
random weights may give other tokens without drafts.
"""

import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from llaisys.bench.decoding import Decoding, decode, fixed_length, request_names
from llaisys.common.progress import report
from llaisys.common.request import Request
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.common.validation import invalid_value
from llaisys.engine.config import EngineConfig
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.speculative import Proposer, Speculator


class ReplayProposer(Proposer):
    """Proposes the recorded answers with errors; token 0 for requests without a record."""

    def __init__(self, rate: float, count: int, vocab_size: int) -> None:
        self.answers: dict[str, list[int]] = {}  # request id -> prompt and answer
        self._rate, self._count, self._vocab_size = rate, count, vocab_size
        self._random = random.Random(1)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        return [
            self._replayed(r, min(self._count, n)) for r, n in zip(requests, counts, strict=True)
        ]

    def _replayed(self, request: Request, count: int) -> list[int]:
        known, answer = request.num_tokens, self.answers.get(request.request_id)
        if answer is None:
            return [0] * count
        return [
            token if self._random.random() < self._rate else (token + 1) % self._vocab_size
            for token in answer[known : known + count]
        ]

    def release(self, seq_id: int) -> None:
        pass


class AlwaysDraft(Speculator):
    """Drafts of constant length for every request in every step, without adaptation."""

    def propose(self, running: Sequence[Request]) -> None:
        eligible = [r for r in running if r.num_tokens - r.num_computed_tokens == 1]
        rooms = [max(0, r.max_total_tokens - r.num_tokens - 1) for r in eligible]
        drafts = self.proposer.propose(eligible, rooms)
        for request, draft in zip(eligible, drafts, strict=True):
            request.draft_token_ids = list(draft)

    def should_wait(self, running: Sequence[Request]) -> bool:
        return True

    def observe(self, plan: SchedulerOutputs, output: StepOutput, seconds: float | None) -> None:
        for seq_id, draft in plan.draft_token_ids.items():
            self._count(len(draft), max(0, len(output.sampled.get(seq_id, ())) - 1))


def run_simulated(
    model: str,
    options: dict[str, Any],  # engine options by name
    rate: float,
    concurrencies: list[int],
    prompt_tokens: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Run an engine without drafts, then one with them; only one model is loaded at a time."""
    if not 0 <= rate <= 1:
        raise invalid_value("simulate", rate, "a probability from 0 to 1")
    given = {"num_speculative_tokens": 4, **(options.pop("speculative_config", None) or {})}
    given |= {"method": "ngram", "disable_by_batch_size": 1 << 16}
    plain: dict[int, Decoding] = {}
    prompts: dict[int, list[list[int]]] = {}
    with closing(LLMEngine(EngineConfig.of(model=model, **options))) as engine:
        vocab_size, rng = engine.model_info.vocab_size, np.random.default_rng(0)
        for number, count in enumerate(concurrencies):
            report("measuring without drafts", number, len(concurrencies))
            prompts[count] = rng.integers(0, vocab_size, (count, prompt_tokens)).tolist()
            _timed(engine, prompts[count], 8)  # warm-up for this batch size
            plain[count] = _timed(engine, prompts[count], new_tokens)
    options["speculative_config"] = given
    with closing(LLMEngine(EngineConfig.of(model=model, **options))) as engine:
        speculative = engine.core.speculator
        assert speculative is not None
        drafts = speculative.config.num_speculative_tokens
        proposer = ReplayProposer(rate, drafts, vocab_size)
        results = []
        for number, count in enumerate(concurrencies):
            report("measuring with drafts", number, len(concurrencies))
            proposer.answers = {}
            engine.core.speculator = AlwaysDraft(speculative.config, proposer, vocab_size)
            _timed(engine, prompts[count], 8)  # fills the prefix cache
            answers = _timed(engine, prompts[count], new_tokens).answers
            proposer.answers = {
                name: [*prompt, *answers[name]]
                for name, prompt in zip(request_names(count), prompts[count], strict=True)
            }
            every = engine.core.speculator = AlwaysDraft(speculative.config, proposer, vocab_size)
            drafted = _timed(engine, prompts[count], new_tokens)
            results.append(_summary(count, drafts, plain[count], drafted, every))
        return results


def _timed(engine: LLMEngine, prompts: list[list[int]], new_tokens: int) -> Decoding:
    """With the steps in which every request decodes."""
    params = fixed_length(new_tokens)
    found = decode(engine, [(prompt, params) for prompt in prompts])
    found.steps = [step for step in found.steps if step.is_full]
    return found


def _summary(
    count: int, drafts: int, plain: Decoding, drafted: Decoding, speculator: Speculator
) -> dict[str, Any]:
    tokens = sum(step.tokens for step in drafted.steps)
    stats = speculator.stats
    return {
        "concurrency": count,
        "drafts_per_step": drafts,  # per request
        "acceptance": round(stats.num_accepted_tokens / max(1, stats.num_draft_tokens), 3),
        "plain_step_ms": round(plain.step_ms, 4),
        "step_ms": round(drafted.step_ms, 4),  # with drafts for every request
        "step_cost": round(drafted.step_ms / plain.step_ms, 4),
        "tokens_per_step": round(tokens / (count * len(drafted.steps)), 3),  # per request
        "speedup": round(drafted.tok_s() / plain.tok_s(), 3),
        "same_tokens": plain.answers == drafted.answers,
    }
