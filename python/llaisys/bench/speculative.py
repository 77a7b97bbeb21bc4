"""`llaisys bench speculative`: the same requests with and without speculative decoding, interleaved
in one process, and the acceptance."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from llaisys.bench.decoding import Decoding, Work, decode, fixed_length
from llaisys.common.progress import report
from llaisys.common.sampling import SamplingParams
from llaisys.entrypoints.llm import LLM

TEXT = (
    "The harbour of the old town has three piers. The first pier is for fishing boats, the second "
    "pier is for ferries, and the third pier is for sailing ships. Every morning the fishing boats "
    "leave at five, the ferries leave at six, and the sailing ships wait for the wind. "
)
CODE = """```python
def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    raise ValueError("unknown shape: " + shape.kind)
```"""
# Name of the workload -> prompts; one batch per prompt.
WORK = {
    "copy": (
        "Repeat this text word for word:\n" + TEXT,
        "Repeat this code exactly:\n" + CODE,
    ),
    "edit": (
        "Repeat this text, but write quay where it says pier:\n" + TEXT,
        "Correct the spelling of this text:\n" + TEXT.replace("sailing", "saling"),
    ),
    "chat": (
        "What should one think of before moving to another country?",
        "Explain how a bicycle stays upright.",
        "Write a short story about a lighthouse keeper.",
        "Plan a day in Rome for a family with children.",
    ),
}
# Workloads for random weights, by sampling parameters. `free`: drafts are never accepted; `chance`:
# n-gram matches are frequent but not predictive; `repeat`: every draft token is accepted.
RANDOM_WORK: dict[str, dict[str, Any]] = {
    "free": {"temperature": 1.0},
    "chance": {"temperature": 1.0, "allowed_token_ids": list(range(100, 132))},
    "repeat": {"temperature": 0.0, "allowed_token_ids": [100]},
}
RANDOM_PROMPT = 128  # tokens


@dataclass(frozen=True, slots=True)
class _Timing:
    tok_s: float
    tokens: list[list[int]]
    counts: dict[str, int]  # drafts, draft_tokens, accepted_tokens


def run_speculative(
    drafted: LLM,
    plain: LLM,
    concurrencies: list[int],
    new_tokens: int,
    repeats: int,
    *,
    is_random: bool = False,
) -> list[dict[str, Any]]:
    """Medians of interleaved runs; `plain` has the same model without drafts. `is_random`: the
    model has random weights and no tokenizer."""
    results: list[dict[str, Any]] = []
    works = RANDOM_WORK if is_random else WORK
    for work in works:
        for concurrency in concurrencies:
            report(f"measuring {work}", len(results), len(works) * len(concurrencies))
            if is_random:
                batches = [_random_prompts(plain, work, concurrency, new_tokens)]
                _timed(plain, batches)  # warm-up for this batch size
                _timed(drafted, batches)
            else:
                batches = [_prompts(plain, text, concurrency, new_tokens) for text in WORK[work]]
            pairs = [(_timed(plain, batches), _timed(drafted, batches)) for _ in range(repeats)]
            results.append(_summary(work, concurrency, pairs))
    return results


def _prompts(llm: LLM, text: str, count: int, new_tokens: int) -> list[Work]:
    """Prompts with distinct beginnings, so that none waits for the prefix of another. EOS ends an
    answer: text after a copied passage is not a copy."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, detokenize=False)
    return [
        (llm.encode_chat([{"role": "user", "content": f"Task {index + 1}. {text}"}]), params)
        for index in range(count)
    ]


def _random_prompts(llm: LLM, work: str, count: int, new_tokens: int) -> list[Work]:
    vocab_size = llm.model_info.vocab_size
    prompts = np.random.default_rng(count).integers(0, vocab_size, (count, RANDOM_PROMPT))
    return [
        (prompt, fixed_length(new_tokens, seed=seed, **RANDOM_WORK[work]))
        for seed, prompt in enumerate(prompts.tolist())
    ]


def _timed(llm: LLM, batches: list[list[Work]]) -> _Timing:
    before = llm.stats()
    whole = Decoding({})
    tokens: list[list[int]] = []
    for work in batches:
        found = decode(llm, work)
        whole.steps += found.steps
        tokens += found.answers.values()
    after = llm.stats()
    counts = {
        name: after[f"spec_decode_num_{name}"] - before[f"spec_decode_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    return _Timing(whole.tok_s(), tokens, counts)


def _summary(work: str, concurrency: int, pairs: list[tuple[_Timing, _Timing]]) -> dict[str, Any]:
    counts = pairs[-1][1].counts
    accepted = counts["accepted_tokens"] / max(1, counts["drafts"])
    return {
        "work": work,
        "concurrency": concurrency,
        "tok_s": round(median(drafted.tok_s for _, drafted in pairs), 2),
        "plain_tok_s": round(median(plain.tok_s for plain, _ in pairs), 2),
        "speedup": round(median(d.tok_s / (p.tok_s or 1.0) for p, d in pairs), 3),
        "same_tokens": all(plain.tokens == drafted.tokens for plain, drafted in pairs),
        **counts,
        "mean_accepted_length": round(1 + accepted, 3),
    }
