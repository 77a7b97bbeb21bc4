"""Tokens do not change under pressure: a KV cache too small for the requests preempts them, drafts
are accepted and rejected, prefixes are evicted and restored; every request has the tokens of one
that runs alone, without drafts.

`LLAISYS_TEST_PRESSURE=1000` runs 1,000 requests per mode and requires 200 preemptions and 200
drafts of each (`make attack-nightly`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_heads import head_tensors, write_head
from model_files import tiny_config, write_gguf, write_hf_model

from llaisys import LLM, SamplingParams

COUNT = int(os.environ.get("LLAISYS_TEST_PRESSURE", "60"))  # requests per mode
LEAST = COUNT // 5  # preemptions and drafts
CONFIG = tiny_config(
    "llama", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256
)
DRAFTS = {"num_speculative_tokens": 3, "disable_by_batch_size": 1000}
NGRAM = {"method": "ngram", **DRAFTS}
# Mode -> options beside a small KV cache and drafts from the prompt.
MODES: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "q8_0": {},
    "int4 with an 8-bit KV cache": {"quantization": "int4", "kv_cache_dtype": "q8"},
    "n-gram": {},
    "head": {},
    "offload": {"kv_offload": "1MiB"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pressure")
    write_hf_model(folder / "model", CONFIG, tokenizer=False)
    write_gguf(folder / "m.gguf", CONFIG, kind="Q8_0")
    write_head(folder / "head", CONFIG, head_tensors("eagle", CONFIG))
    return {"model": folder / "model", "gguf": folder / "m.gguf", "head": folder / "head"}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, many with a common start; greedy and seeded."""
    chance, found = random.Random(1), []
    starts = [[chance.randrange(200) for _ in range(16)] for _ in range(3)]
    for number in range(COUNT):
        words = [chance.randrange(200) for _ in range(3)]
        prompt = chance.choice([*starts, []]) + words * chance.randint(1, 6)
        params = SamplingParams(
            max_tokens=chance.randint(4, 30), ignore_eos=True, seed=number,
            temperature=chance.choice([0.0, 0.0, 0.8]),
        )  # fmt: skip
        found.append((prompt, params))
    return found


def tokens(llm: LLM, given: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    prompts, params = zip(*given, strict=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(list(prompts), list(params))]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_request_alone(
    mode: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Draft whatever it costs: the number of drafts must not depend on the speed of the machine.
    monkeypatch.setattr("llaisys.engine.speculative.control.best_length", lambda *given: given[-1])
    monkeypatch.setattr("llaisys.engine.worker.drafting.head.MIN_PROBABILITY", 0.0)
    given, options = requests(), MODES[mode]
    model = str(files["gguf" if mode == "q8_0" else "model"])
    exact = {key: value for key, value in options.items() if key != "kv_offload"}
    with LLM(model=model, n_threads=1, max_num_seqs=1, block_size=4, num_kv_blocks=64,
             enable_prefix_caching=False, **exact) as llm:  # fmt: skip
        alone = tokens(llm, given)
    drafts: dict[str, Any] = NGRAM
    if mode == "head":
        drafts = {"method": "eagle", "model": str(files["head"]), "prompt_lookup_max": 64, **DRAFTS}
    with LLM(model=model, n_threads=2, max_num_seqs=8, block_size=4, num_kv_blocks=28,
             max_num_batched_tokens=48, speculative_config=drafts, **options) as llm:  # fmt: skip
        assert tokens(llm, given) == alone
        stats = llm.stats()
    number_of: Callable[[str], int] = stats.__getitem__
    preempted, drafted = number_of("num_preemptions"), number_of("spec_decode_num_drafts")
    print(f"{mode}: {COUNT} requests, {preempted} preemptions, {drafted} drafts")
    assert preempted >= LEAST and drafted >= LEAST, stats
    assert number_of("kv_blocks_used") == 0
