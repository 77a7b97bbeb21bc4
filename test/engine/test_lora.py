"""LoRA adapters in the engine: equal to merged weights, alone and beside others; loads, unloads,
prefix cache, drafts, structured output, quantised bases and tensor parallel."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import invalid_input, naming
from lora_files import ALL, ATTENTION, MLP, Lora
from model_files import tiny_config, write_hf_model, write_safetensors
from native_helpers import is_sanitized, resident_bytes
from nightly import NIGHTLY

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.engine.worker import lora_store

CONFIG = tiny_config("qwen2")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPT = [5, 17, 101, 33, 250, 9, 77, 14, 200, 31]


def prompt(number: int, length: int = 12) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    write_hf_model(path, CONFIG, seed=3)
    return path


def options(**more: Any) -> dict[str, Any]:
    return {"max_model_len": 256, "num_kv_blocks": 400, **more}


def tokens(llm: LLM, prompts: Any, **more: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, **more)]


def adapters(folder: Path, count: int, **more: Any) -> dict[str, str]:
    """`count` adapters of different ranks and target sets."""
    ranks, targets = (1, 4, 8, 16), (ALL, ATTENTION, MLP, ("q_proj", "v_proj"))
    return {
        f"a{i}": str(
            Lora(CONFIG, ranks[i % 4], targets[i // 4 % 4], seed=i, **more).write_peft(
                folder / f"a{i}"
            )
        )
        for i in range(count)
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return adapters(tmp_path_factory.mktemp("adapters"), 4)


@pytest.fixture
def llm(base: Path, four: dict[str, str]) -> Iterator[LLM]:
    with LLM(str(base), lora_modules=four, **options()) as found:
        yield found


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "targets"),
    [
        *((rank, ALL) for rank in (1, 8, 64, 256)),
        *((8, targets) for targets in (ATTENTION, MLP, ("q_proj", "v_proj"), ("down_proj",))),
    ],
)
def test_equal_to_merged_weights(
    tmp_path: Path, base: Path, rank: int, targets: tuple[str, ...]
) -> None:
    lora = Lora(CONFIG, rank, targets, use_rslora=rank == 64)
    weights = write_hf_model(tmp_path / "again", CONFIG, seed=3)
    write_hf_model(tmp_path / "merged", CONFIG, weights=lora.merged(weights))
    path = lora.write_peft(tmp_path / "adapter")
    prompts = [prompt(i, 3 + 5 * i) for i in range(4)]
    with LLM(str(tmp_path / "merged"), **options()) as llm:
        expected = tokens(llm, prompts)
    with LLM(str(base), lora_modules={"a": str(path)}, **options()) as llm:
        plain = tokens(llm, prompts)
        assert tokens(llm, prompts, lora="a") == expected
        mixed = tokens(llm, [*prompts, *prompts], lora=["a"] * 4 + [None] * 4)
        assert mixed == [*expected, *plain] and plain != expected


def test_gguf_adapter_equals_peft(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_hf_model(tmp_path / "base", config)
    lora = Lora(config, rank=4)
    modules = {
        "peft": str(lora.write_peft(tmp_path / "adapter")),
        "gguf": str(lora.write_gguf(tmp_path / "adapter.gguf")),
    }
    with LLM(str(tmp_path / "base"), lora_modules=modules, **options()) as llm:
        peft, gguf, plain = (tokens(llm, PROMPT, lora=n)[0] for n in ("peft", "gguf", None))
    assert peft == gguf != plain


def test_answers_do_not_depend_on_the_batch(tmp_path: Path, base: Path) -> None:
    """Many adapters and requests at random: every answer as alone, bit for bit (logprobs too)."""
    num_adapters, num_requests = (32, 256) if NIGHTLY else (12, 80)
    modules = adapters(tmp_path, num_adapters)
    names = [*modules, None]
    params = SamplingParams(
        max_tokens=6, temperature=0.7, seed=5, ignore_eos=True, detokenize=False, logprobs=1
    )
    rng = random.Random(1)
    work = [
        (prompt(rng.randrange(40), rng.randrange(1, 30)), rng.choice(names))
        for _ in range(num_requests)
    ]
    limits = {"max_loras": num_adapters, "max_num_seqs": 64, "enable_prefix_caching": False}
    with LLM(str(base), lora_modules=modules, **options(**limits)) as llm:
        outputs = llm.generate([p for p, _ in work], params, lora=[name for _, name in work])
        together = [(o.token_ids, o.outputs[0].logprobs) for o in outputs]
        alone: dict[Any, Any] = {}
        for (ids, name), found in zip(work, together, strict=True):
            key = (tuple(ids), name)
            if key not in alone:
                (one,) = llm.generate([ids], params, lora=name)
                alone[key] = (one.token_ids, one.outputs[0].logprobs)
            assert found == alone[key]
    with LLM(str(base), lora_modules=modules, max_loras=3, **options()) as llm:  # few slots
        outputs = llm.generate([p for p, _ in work], params, lora=[name for _, name in work])
        assert [(o.token_ids, o.outputs[0].logprobs) for o in outputs] == together
        assert llm.stats()["lora_slot_loads"] >= num_adapters


# ---- options and errors --------------------------------------------------------------------------


def test_requests_name_a_loaded_adapter(llm: LLM) -> None:
    with invalid_input("lora"):
        llm.generate(PROMPT, GREEDY, lora="other")
    with invalid_input("lora"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora=["a0"])
    assert llm.loras == ("a0", "a1", "a2", "a3")
    assert not llm.has_unfinished()


def test_adapters_are_off_by_default(base: Path, four: dict[str, str]) -> None:
    with LLM(str(base), **options()) as llm:
        with invalid_input("lora"):
            llm.load_lora("a", four["a0"])
        with invalid_input("lora"):
            llm.generate(PROMPT, GREEDY, lora="a")


@pytest.mark.parametrize("given", ["a0={0}", ["a0={0}"], [{"name": "a0", "path": "{0}"}]])
def test_forms_of_lora_modules(base: Path, four: dict[str, str], given: Any) -> None:
    text = json.dumps(given).replace("{0}", four["a0"])
    with LLM(str(base), lora_modules=json.loads(text), **options()) as llm:
        assert llm.loras == ("a0",)


def test_models_without_adapters_are_refused(four: dict[str, str]) -> None:
    with invalid_input("enable_lora"):
        LLM("mock", lora_modules=four)


def test_ranks_above_the_limit_are_refused(base: Path, tmp_path: Path) -> None:
    path = str(Lora(CONFIG, 32).write_peft(tmp_path / "a"))
    with naming(ModelLoadError, "max_lora_rank"):
        LLM(str(base), lora_modules={"a": path}, max_lora_rank=16, **options())
    with LLM(str(base), enable_lora=True, **options()) as llm:
        with naming(ModelLoadError, "max_lora_rank"):
            llm.load_lora("a", path)
        assert llm.loras == () and llm.stats()["lora_failures"] == 1


def test_a_broken_adapter_at_start_is_named(base: Path, tmp_path: Path) -> None:
    lora = Lora(CONFIG, 2)
    path = lora.write_peft(tmp_path / "a")
    pairs = lora.tensors()
    next(iter(pairs.values()))[0, 0] = np.inf
    write_safetensors(path / "adapter_model.safetensors", pairs)
    with naming(ModelLoadError, "'sql'"):
        LLM(str(base), lora_modules={"sql": str(path)}, **options())


# ---- loads and unloads ---------------------------------------------------------------------------


def test_reloaded_adapter_reuses_no_keys_of_the_old_one(base: Path, tmp_path: Path) -> None:
    first, second = (Lora(CONFIG, 4, seed=seed) for seed in (1, 2))
    long = prompt(1, 100)
    with LLM(str(base), enable_lora=True, **options()) as llm:
        llm.load_lora("a", first.write_peft(tmp_path / "a"))
        before = llm.generate(long, GREEDY, lora="a")[0]
        again = llm.generate(long, GREEDY, lora="a")[0]
        assert again.usage.cached_tokens > 0 and again.token_ids == before.token_ids
        llm.unload_lora("a")
        llm.load_lora("a", second.write_peft(tmp_path / "b"))
        after = llm.generate(long, GREEDY, lora="a")[0]
        assert after.usage.cached_tokens == 0 and after.token_ids != before.token_ids
        llm.load_lora("a", tmp_path / "a", in_place=True)
        third = llm.generate(long, GREEDY, lora="a")[0]
        assert third.usage.cached_tokens == 0 and third.token_ids == before.token_ids


def test_unload_lets_running_requests_finish(llm: LLM) -> None:
    (expected,) = tokens(llm, PROMPT, lora="a0")
    name = llm.submit(PROMPT, GREEDY, lora="a0")
    for _ in range(3):
        llm.step()
    llm.unload_lora("a0")
    with pytest.raises(InvalidInputError):
        llm.submit(PROMPT, GREEDY, lora="a0")
    while llm.has_unfinished():
        llm.step()
    output = llm.collect(name)
    assert output is not None and output.token_ids == expected
    assert llm.loras == ("a1", "a2", "a3") and llm.stats()["loras_in_host"] == 3


def test_adapters_leave_host_memory_and_come_back(base: Path, tmp_path: Path) -> None:
    modules = adapters(tmp_path, 6)
    prompts = [prompt(i) for i in range(24)]
    names = [f"a{i % 6}" for i in range(24)]
    with LLM(str(base), lora_modules=modules, max_loras=6, **options()) as llm:
        expected = tokens(llm, prompts, lora=names)
    with LLM(str(base), lora_modules=modules, max_loras=1, max_cpu_loras=2, **options()) as llm:
        assert llm.stats()["loras_in_host"] == 2
        assert tokens(llm, prompts, lora=names) == expected
        stats = llm.stats()
        assert stats["loras_in_host"] == 2 and stats["lora_reads"] >= 6
        (tmp_path / "a0" / "adapter_model.safetensors").write_bytes(b"broken")
        for number in (3, 4, 5):
            tokens(llm, PROMPT, lora=f"a{number}")
        (failed,) = llm.generate(PROMPT, GREEDY, lora="a0")
        assert failed.finish_reason == "error" and "a0" in str(failed.outputs[0].error)
        assert tokens(llm, prompts[3], lora="a3") == [expected[3]]


def test_reading_stalls_no_other_request(
    base: Path, four: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on while a file is being read."""
    reading, proceed = threading.Event(), threading.Event()
    original = lora_store.read_lora

    def slow_read(*args: Any) -> Any:
        reading.set()
        assert proceed.wait(60)
        return original(*args)

    with LLM(str(base), enable_lora=True, **options()) as llm:
        monkeypatch.setattr(lora_store, "read_lora", slow_read)
        assert llm.llm_engine is not None
        core = llm.llm_engine.core
        core.loras.load("a", four["a0"])
        assert reading.wait(60)
        assert core.loras.finished_loads() == []
        tokens(llm, PROMPT)  # runs to its end meanwhile
        name = llm.submit(PROMPT, GREEDY, lora="a")
        llm.step()
        proceed.set()
        while llm.collect(name) is None:
            llm.step()
        (result,) = core.loras.finished_loads()
        assert result.error is None


def cycles(base: Path, folder: Path, count: int) -> None:
    """Unload and reload adapters under load; some are broken."""
    modules = adapters(folder / "good", 4)
    broken = Lora(CONFIG, 2).write_peft(folder / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    rng, open_names, expected = random.Random(7), {}, {}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    limits = {"max_loras": 2, "max_cpu_loras": 3, "num_kv_blocks": 60, "max_num_seqs": 8}
    with LLM(str(base), lora_modules=modules, **{**options(), **limits}) as llm:
        for name in modules:
            expected[name] = llm.generate(PROMPT, params, lora=name)[0].token_ids
        done, warm = 0, 0
        for cycle in range(count):
            warm = resident_bytes() if cycle == count // 4 else warm
            name = rng.choice(list(modules))
            for _ in range(rng.randrange(3)):
                chosen = rng.choice(llm.loras)
                open_names[llm.submit(PROMPT, params, lora=chosen)] = chosen
            if rng.random() < 0.1:
                with pytest.raises(ModelLoadError):
                    llm.load_lora("broken", broken)
            if rng.random() < 0.5:
                llm.load_lora(name, modules[name], in_place=True)
            else:
                llm.unload_lora(name)
                llm.load_lora(name, modules[name])
            for _ in range(rng.randrange(8)):
                llm.step()
            for request_id in tuple(open_names):
                output = llm.collect(request_id)
                if output is not None:
                    assert output.token_ids == expected[open_names.pop(request_id)]
                    done += 1
        while llm.has_unfinished():
            llm.step()
        for request_id, name in open_names.items():
            output = llm.collect(request_id)
            assert output is not None and output.token_ids == expected[name]
        stats = llm.stats()
        assert done + len(open_names) > 0 and stats["kv_blocks_used"] == 0
        assert stats["loras"] == 4 and stats["loras_in_host"] <= 3
        core = llm.llm_engine.core
        core.scheduler.check_integrity()
        assert core.debug_state()["worker_loras"] == 4  # nothing leaks
        assert resident_bytes() - warm < 16 << 20 or is_sanitized()


@pytest.mark.slow
def test_adapters_are_reloaded_under_load(base: Path, tmp_path: Path) -> None:
    cycles(base, tmp_path, 1000 if NIGHTLY else 250)


# ---- together with other features ----------------------------------------------------------------


def test_kv_offload_keeps_adapters_apart(base: Path, four: dict[str, str]) -> None:
    prompts = [prompt(i, 60) for i in range(6)]
    names = ["a0", "a1", None]
    small = {"num_kv_blocks": 10, "kv_offload": 8 << 20, "max_num_seqs": 2}
    with LLM(str(base), lora_modules=four, **options()) as llm:
        expected = {name: tokens(llm, prompts, lora=name) for name in names}
    with LLM(str(base), lora_modules=four, **{**options(), **small}) as llm:
        for _ in range(2):
            for name in names:
                assert tokens(llm, prompts, lora=name) == expected[name]
        assert llm.stats()["prefix_cache_host_hits"] > 0


@pytest.mark.parametrize("speculative", [{"method": "ngram"}, {"method": "draft_model"}])
def test_drafts_keep_the_answers(
    base: Path, four: dict[str, str], speculative: dict[str, Any]
) -> None:
    if speculative["method"] == "draft_model":
        speculative = {**speculative, "model": str(base), "num_speculative_tokens": 3}
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8, 9, i + 10] for i in range(3)]
    names = ["a0", None, "a1"]
    with LLM(str(base), lora_modules=four, **options()) as llm:
        expected = tokens(llm, prompts, lora=names)
    with LLM(str(base), lora_modules=four, speculative_config=speculative, **options()) as llm:
        assert tokens(llm, prompts, lora=names) == expected
        assert llm.stats()["spec_decode_num_draft_tokens"] > 0


def test_structured_output(base: Path, four: dict[str, str]) -> None:
    params = SamplingParams(
        max_tokens=8, temperature=0.0, structured_outputs={"choice": ["yes", "no"]}
    )
    limits = {"max_loras": 1, "max_cpu_loras": 1}  # the adapter is read first
    with LLM(str(base), lora_modules=four, **limits, **options()) as llm:
        outputs = llm.generate(["a", "b", "c"], params, lora=["a0", "a3", "a2"])
        assert {output.text for output in outputs} <= {"yes", "no"}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_bases(base: Path, four: dict[str, str], quantization: str) -> None:
    with LLM(str(base), lora_modules=four, quantization=quantization, **options()) as llm:
        plain, first = tokens(llm, PROMPT)[0], tokens(llm, PROMPT, lora="a0")[0]
        assert first != plain
        mixed = tokens(llm, [PROMPT] * 3, lora=["a0", None, "a1"])
        assert mixed[0] == first and mixed[1] == plain


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_tensor_parallel_ranks_load_their_shards(
    base: Path, four: dict[str, str], tmp_path: Path, backend: str
) -> None:
    prompts, names = [prompt(i) for i in range(4)], ["a0", "a1", None, "late"]
    late = Lora(CONFIG, 3, seed=9).write_peft(tmp_path / "late")
    found = []
    for size in (1, 2):
        parallel = {"tensor_parallel_size": size, "distributed_executor_backend": backend}
        with LLM(str(base), lora_modules=four, **parallel, **options()) as llm:
            llm.load_lora("late", late)
            found.append(tokens(llm, prompts, lora=names))
            llm.unload_lora("late")
    assert found[0] == found[1]


def test_embeddings_use_the_adapter(llm: LLM) -> None:
    params = SamplingParams(pooling="last", max_tokens=0)
    plain, first = llm.generate([PROMPT] * 2, params, lora=[None, "a0"])
    is_changed = plain.pooled != first.pooled
    assert plain.pooled and is_changed


def test_context_shift(base: Path, four: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True, detokenize=False)
    shifted = {"max_model_len": 64, "num_kv_blocks": 60, "context_shift": True}
    with LLM(str(base), lora_modules=four, **shifted) as llm:
        alone = llm.generate(PROMPT, params, lora="a0")[0].token_ids
        outputs = llm.generate([PROMPT] * 2, params, lora=["a0", None])
        assert outputs[0].token_ids == alone != outputs[1].token_ids
