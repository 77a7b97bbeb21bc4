"""`kv_offload`: evicted prefixes are restored from host memory; tokens and logprobs are bitwise
identical."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from async_fakes import make_async_engine
from engine_fakes import adapter_of, expected_tokens, greedy, make_engine, run_all
from error_helpers import invalid_input
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.engine.executor.estimate import estimate_memory
from llaisys.engine.llm_engine import LLMEngine

BLOCK_BYTES = 4 * 64  # of the fakes: 4 tokens of 64 bytes


# ---- the engine, with fakes that read what lies in every slot ------------------------------------


def use(engine: LLMEngine, prompt: list[int], count: int = 4, **fields: Any) -> tuple[int, int]:
    """Run a request and check its tokens; return (cached tokens, those from host memory)."""
    name = engine.submit(prompt, greedy(count, ignore_eos=True, **fields))
    output = run_all(engine)[name]
    for choice in output.outputs:
        assert choice.token_ids == expected_tokens(prompt, count, stops=())
    return output.usage.cached_tokens, output.usage.host_cached_tokens


def test_an_evicted_prompt_is_not_computed_again():
    engine = make_engine(num_blocks=10, kv_offload=40 * BLOCK_BYTES)
    first, second = list(range(1, 38)), list(range(60, 97))
    assert use(engine, first) == (0, 0)
    assert use(engine, second) == (0, 0)
    before = adapter_of(engine).num_tokens
    assert use(engine, first) == (36, 36)
    assert (
        adapter_of(engine).num_tokens - before == 1 + 3
    )  # the last of the prompt, and sampled ones
    assert use(engine, first) == (36, 0)  # it is back in the KV cache
    stats = engine.stats()
    assert (stats["prefix_cache_hits"], stats["prefix_cache_host_hits"]) == (72, 36)
    assert stats["kv_host_blocks"] == 40 and stats["kv_host_bytes"] == 40 * BLOCK_BYTES
    assert stats["kv_blocks_restored"] == 9 and stats["kv_blocks_saved"] >= 18
    assert stats["kv_host_blocks_used"] == stats["kv_blocks_saved"]


def test_more_evictions_in_a_step_than_host_slots():
    engine = make_engine(num_blocks=10, kv_offload=3 * BLOCK_BYTES)
    prompts = [list(range(start, start + 37)) for start in (1, 20, 60)]
    for prompt in [*prompts, *prompts]:
        use(engine, prompt)
    assert engine.stats()["kv_host_blocks_used"] == 3
    engine.core.scheduler.check_integrity()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("limit", [4, 12, 100])
def test_a_prefix_is_restored_in_parts_beside_a_stream(limit: int, is_async: bool):
    make = make_async_engine if is_async else make_engine
    engine = make(num_blocks=60, kv_offload=80 * BLOCK_BYTES, max_num_batched_tokens=16)
    first = list(range(1, 62))
    use(engine, first)
    for start in (60, 130, 200, 270):
        use(engine, list(range(start, start + 61)))
    engine.core.scheduler.builder.max_restored_tokens = limit
    stream = engine.submit([5, 6, 7], greedy(60, ignore_eos=True))
    engine.step()
    name = engine.submit(first, greedy(4, ignore_eos=True))
    cancelled = engine.submit(list(range(60, 121)), greedy(4))
    restored, finished = [engine.stats()["kv_blocks_restored"]], {}
    for number in range(200):
        if number == 3:
            engine.cancel(cancelled)
        for part in engine.step() if engine.has_unfinished() else ():
            if part.output is not None:
                finished[part.request_id] = part.output
        engine.core.scheduler.block_manager.check_integrity()
        restored.append(engine.stats()["kv_blocks_restored"])
    assert finished[name].token_ids == expected_tokens(first, 4, stops=())
    assert finished[name].usage.cached_tokens == 60
    assert finished[stream].token_ids == expected_tokens([5, 6, 7], 60, stops=())
    steps = [later - earlier for earlier, later in pairwise(restored)]
    assert sum(steps) >= 15
    # The last part is restored with the start of the request, beside a part of another one.
    assert max(steps) <= 2 * limit // 4
    engine.core.scheduler.check_integrity()


def test_failed_step_frees_the_blocks_that_it_restores_in_part():
    engine = make_engine(num_blocks=40, kv_offload=80 * BLOCK_BYTES, max_num_batched_tokens=16)
    first = list(range(1, 38))
    use(engine, first)
    for start in (60, 130, 200):
        use(engine, list(range(start, start + 61)))
    engine.core.scheduler.builder.max_restored_tokens = 8
    stream = engine.submit([5, 6, 7], greedy(60, ignore_eos=True))
    engine.step()
    adapter = adapter_of(engine)

    def fail(*_: Any) -> None:
        raise RuntimeError("the copy failed")

    name = engine.submit(first, greedy(4, ignore_eos=True))
    adapter.swap_blocks = fail  # type: ignore[method-assign]
    engine.step()
    del adapter.swap_blocks
    finished = run_all(engine)
    assert finished.keys() <= {name, stream}
    assert finished[name].token_ids == expected_tokens(first, 4, stops=())
    engine.core.scheduler.check_integrity()


def test_choices_share_restored_blocks():
    engine = make_engine(num_blocks=20, kv_offload=40 * BLOCK_BYTES)
    first = list(range(1, 38))
    use(engine, first)
    use(engine, list(range(60, 130)), count=10)
    assert use(engine, first, n=3) == (36, 36)
    assert engine.stats()["kv_blocks_restored"] == 9


def test_chunked_and_cancelled_prompts_restore_blocks():
    engine = make_engine(num_blocks=14, kv_offload=40 * BLOCK_BYTES, max_num_batched_tokens=16)
    first = list(range(1, 30))
    use(engine, first)
    use(engine, list(range(60, 110)))
    longer = [*first[:28], *range(30, 50)]
    name = engine.submit(longer, greedy(4))
    engine.step()  # brings 28 tokens back and computes 16 of the other 20
    engine.cancel(name)
    engine.core.scheduler.check_integrity()
    cached, from_host = use(engine, longer)
    assert cached == 44 and from_host < cached  # computed blocks of the cancelled one too
    use(engine, list(range(60, 110)))
    assert use(engine, longer) == (44, 44)


def test_failed_step_leaves_no_partially_copied_prefix():
    engine = make_engine(num_blocks=10, kv_offload=40 * BLOCK_BYTES)
    adapter = adapter_of(engine)
    first, second = list(range(1, 38)), list(range(60, 97))
    use(engine, first)
    use(engine, second)
    move, engine_fails = adapter.swap_blocks, [True]

    def moves(*arguments: Any) -> None:
        if engine_fails and engine_fails.pop():
            raise RuntimeError("the copy failed")
        move(*arguments)

    adapter.swap_blocks = moves  # type: ignore[method-assign]
    name = engine.submit(first, greedy(4))
    assert run_all(engine)[name].outputs[0].finish_reason == "error"
    engine.core.scheduler.check_integrity()
    assert use(engine, first) == (36, 36)  # its own places were not touched
    assert use(engine, second)[0] < 36  # what the failed step was to save is lost


def run_turns(engine: LLMEngine, seed: int) -> dict[str, list[list[int]]]:
    """Run requests with a few long prefixes that arrive while others run; cancel some. Return the
    tokens of the others."""
    rng = random.Random(seed)
    beginnings = [[rng.randint(1, 60) for _ in range(rng.randint(8, 17))] for _ in range(4)]
    pending = []
    for index in range(14):
        prompt = [*rng.choice(beginnings), *(rng.randint(1, 60) for _ in range(rng.randint(0, 5)))]
        fields = {"n": rng.choice((1, 1, 1, 2)), "seed": rng.randint(0, 9), "ignore_eos": True}
        pending.append((str(index), prompt, SamplingParams(max_tokens=rng.randint(1, 8), **fields)))
    cancelled = {str(rng.randint(0, 13)) for _ in range(2)}
    when, results = [rng.choice((0, 0, 1, 2)) for _ in range(1000)], {}
    while pending or engine.has_unfinished():
        parts = []
        for _ in range(min(len(pending), when.pop())):
            name, prompt, params = pending.pop()
            engine.submit(prompt, params, request_id=name)
            if name in cancelled:
                parts += engine.step() + engine.cancel(name)
        parts += engine.step() if engine.has_unfinished() else []
        for part in parts:
            if part.output is not None and part.request_id not in cancelled:
                results[part.request_id] = [choice.token_ids for choice in part.output.outputs]
    engine.core.scheduler.check_integrity()
    return results


@pytest.mark.parametrize("kind", ["waiting", "ahead", "shifted"])
def test_random_requests_give_the_tokens_of_an_engine_without_it(kind: str):
    """With preemptions, aborts, asynchronous scheduling, and context shifts between the copies."""
    make: Any = make_async_engine if kind == "ahead" else make_engine
    small: dict[str, Any] = {"num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 12}
    if kind == "shifted":
        scheduler = SchedulerConfig(4, 12, min_prefill_chunk=4, context_shift=True)
        small |= {"scheduler": scheduler, "max_model_len": 24}
    restored = preemptions = shifts = 0
    for seed in range(8):
        engine = make(**small, kv_offload=16 * BLOCK_BYTES)
        assert run_turns(engine, seed) == run_turns(make(**small), seed)
        stats = engine.stats()
        restored += stats["kv_blocks_restored"]
        preemptions += stats["num_preemptions"]
        shifts += stats["num_context_shifts"]
    assert restored > 20 and preemptions > 5 and (shifts > 5) == (kind == "shifted")


# ---- a real model --------------------------------------------------------------------------------

PROMPTS = [[(7 * i + p) % 250 + 3 for i in range(45 + p)] for p in range(3)]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.7, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offload") / "model"
    write_hf_model(path, tiny_config(num_attention_heads=8, num_key_value_heads=4), tokenizer=False)
    return path


def open_llm(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 2, "num_kv_blocks": 15, "block_size": 4, "n_threads": 1,
        "max_num_batched_tokens": 32, "kv_offload": "1MiB",
    }  # fmt: skip
    return LLM(model=str(model), **{**defaults, **options})


def ask(llm: LLM, prompt: list[int]) -> tuple[list[int], Any, int, int]:
    output = llm.generate(prompt, PARAMS)[0]
    choice, usage = output.outputs[0], output.usage
    return choice.token_ids, choice.logprobs, usage.cached_tokens, usage.host_cached_tokens


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[tuple[list[int], Any]]]:
    with open_llm(model, kv_offload=0, enable_prefix_caching=False, num_kv_blocks=64) as llm:
        yield [ask(llm, prompt)[:2] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"async_scheduling": "on"},
    ],
    ids=["one", "threads", "processes", "ahead"],
)
def test_restored_prefix_is_bitwise_identical(
    model: Path, expected: list[tuple[list[int], Any]], options: dict[str, Any]
) -> None:
    with open_llm(model, **options) as llm:
        for turn in range(2):
            for prompt, (tokens, logprobs) in zip(PROMPTS, expected, strict=True):
                found = ask(llm, prompt)
                assert found[0] == tokens
                if "tensor_parallel_size" not in options:
                    assert found[1] == logprobs
                cached = (len(prompt) - 1) // 4 * 4
                assert found[2:] == ((cached, cached) if turn else (0, 0))
        assert llm.stats()["kv_blocks_restored"] == sum((len(p) - 1) // 4 for p in PROMPTS)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "q8"])
def test_every_kv_dtype_is_restored_unchanged(model: Path, dtype: str) -> None:
    with open_llm(model, kv_cache_dtype=dtype, num_kv_blocks=13) as llm:
        first = ask(llm, PROMPTS[0])
        ask(llm, PROMPTS[1])
        again = ask(llm, PROMPTS[0])
    assert again == (*first[:2], 44, 44)


# ---- the option ----------------------------------------------------------------------------------


def test_the_size_is_checked_and_counted(model: Path) -> None:
    sizes = EngineConfig.of(model=str(model), kv_offload="1.5MiB", num_kv_blocks=8)
    assert sizes.cache.kv_offload == 3 << 19
    with open_llm(model, kv_offload="100kB") as llm:
        info = llm.model_info
        assert 0 < info.kv_host_bytes <= 100_000
        assert 100_000 - info.kv_host_bytes < info.block_size * info.kv_bytes_per_token
    for wrong, words in (("12", "one block of 4 tokens"), ("900TiB", "available")):
        with pytest.raises(InvalidInputError, match=rf"kv_offload is \d+.*{words}"):
            open_llm(model, kv_offload=wrong)
    with invalid_input("kv_offload"):
        open_llm(model, enable_prefix_caching=False)
    with invalid_input("kv_offload"):
        CacheConfig(kv_offload="4 apples")  # type: ignore[arg-type]


def test_the_estimate_of_a_model_counts_it(model: Path) -> None:
    plain, offloading = (
        estimate_memory(
            EngineConfig.of(model=str(model), num_kv_blocks=8, kv_offload=size)
        ).kv_cache
        for size in (0, 1 << 20)
    )
    assert (1 << 20) * 0.9 < offloading - plain <= 1 << 20
