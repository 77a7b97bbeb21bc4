#!/usr/bin/env python3
"""Cost of bad_words per step in Python: building the sampler's arrays for many sequences.

    scripts/bench_bad_words.py [--rows N] [--words N] [--steps N]

Prints microseconds per step and per sequence, with and without the words. Runs no native code.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import NewSequence
from llaisys.engine.worker.sampling_state import SamplingState

VOCAB = 151_936
PROMPT = 16


def microseconds(rows: int, words: tuple[tuple[int, ...], ...], steps: int) -> float:
    """Microseconds per step in which `rows` sequences with `words` each sample a token."""
    sampling = SamplingState(rows, VOCAB)
    for row in range(rows):
        sampling.add(
            row,
            NewSequence(
                seq_id=row,
                request_id=f"r{row}",
                token_ids=[1] * PROMPT,
                num_prompt_tokens=PROMPT,
                sampling=SamplingParams().with_defaults(None),
                seed=0,
                choice=row,
                stop_token_ids=frozenset(),
                bad_words=words,
            ),
        )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (rows, PROMPT + steps + 1))
    tokens[:, PROMPT::7] = 5  # the first token of every word, at intervals
    every = np.arange(rows)
    start = time.perf_counter()
    for step in range(steps):
        ends = np.full(rows, PROMPT + step, dtype=np.int64)
        sampling.metadata(every, every, ends, every, tokens)
    return (time.perf_counter() - start) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    words = tuple((5, 1000 + i, 7) for i in range(options.words))
    single = tuple((1000 + i,) for i in range(options.words))
    for name, given in (
        ("no words", ()),
        (f"{options.words} words", words),
        (f"{options.words} words of one token", single),
    ):
        found = microseconds(options.rows, given, options.steps)
        each = found / options.rows
        print(f"{options.rows} sequences, {name:26s} {found:9.1f} us a step {each:7.2f} us each")


if __name__ == "__main__":
    main()
