"""Several ranks, as threads (uni) and processes (mp), equal one rank; failures of a rank. (Together
with drafts, asynchronous scheduling, quantized weights: test_rank_matrix.py.)"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import naming
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.numa import cores_of_rank, format_cpus, numa_nodes
from llaisys.engine.executor import WorkerLostError
from llaisys.engine.executor.mp import MultiprocExecutor

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [3] * 40, [7, 8, 9] * 9 + [11, 12], [250, 17]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 in f32 with heads for up to four ranks."""
    path = tmp_path_factory.mktemp("tp") / "model"
    write_hf_model(path, tiny_config(num_attention_heads=8, num_key_value_heads=4), tokenizer=False)
    return path


def open_llm(model: Path, tp_size: int, backend: str, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": 4, "num_kv_blocks": 64, "block_size": 4}
    return LLM(
        model=str(model),
        tensor_parallel_size=tp_size,
        distributed_executor_backend=backend,
        **{**defaults, **options},
    )


def sampling() -> list[SamplingParams]:
    """Greedy and seeded, with penalties and without."""
    seeded = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2}
    return [
        SamplingParams(max_tokens=12 + i, ignore_eos=True, **({"temperature": 0}, seeded)[i % 2])
        for i in range(len(PROMPTS))
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, sampling())
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[list[int]]]:
    with open_llm(model, 1, "uni") as llm:
        yield tokens_of(llm)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_all_sizes_give_the_same_tokens(
    model: Path, expected: list[list[int]], tp_size: int
) -> None:
    """Chunked prompts beside decoding, five requests with max_num_seqs 4, and again from the prefix
    cache."""
    with open_llm(model, tp_size, "uni", max_num_batched_tokens=16) as llm:
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected
        assert llm.stats()["prefix_cache_hits"] > 0


@pytest.mark.parametrize(("backend", "mode"), [("uni", "off"), ("mp", "on")])
def test_masks_of_structured_output_reach_all_ranks(
    tmp_path: Path, backend: str, mode: str
) -> None:
    write_hf_model(tmp_path, tiny_config(num_attention_heads=8, num_key_value_heads=4))
    params = SamplingParams(
        max_tokens=8, temperature=0, structured_outputs={"choice": ["yes", "no"]}
    )
    texts = []
    for tp_size in (1, 2):
        with open_llm(tmp_path, tp_size, backend, async_scheduling=mode) as llm:
            outputs = llm.generate([[1, 2, 3], [7, 8]], params)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1] and set(texts[0]) <= {"yes", "no"}


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_preempted_requests_resume_with_same_tokens(
    model: Path, expected: list[list[int]], backend: str
) -> None:
    with open_llm(model, 2, backend, num_kv_blocks=22) as llm:
        assert tokens_of(llm) == expected
        assert llm.stats()["num_preemptions"] > 0


def test_ranks_exchange_two_sums_per_layer_and_one_gather(
    model: Path,
) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    for is_cut in (False, True):
        with open_llm(model, 2, "uni", vocab_parallel_head=is_cut, warmup=False) as llm:
            llm.generate([[1, 2, 3]], params)
            profile = llm.llm_engine.core.executor.profile()
            counts, layers = profile["counts"], tiny_config()["num_hidden_layers"]
            assert counts["native_collective"] == profile["steps"] * (2 * layers + is_cut)


@pytest.mark.parametrize(
    ("backend", "tp_size", "tied"),
    [("uni", 2, False), ("uni", 4, True), ("uni", 2, True), ("mp", 2, True)],
)
def test_vocab_parallel_head_is_bitwise_identical(
    tmp_path: Path, backend: str, tp_size: int, tied: bool
) -> None:
    """151 entries: the last rank has fewer. 40 rows of logits: more than are gathered at once."""
    config = tiny_config(
        num_attention_heads=8, num_key_value_heads=4, vocab_size=151, tie_word_embeddings=tied
    )
    write_hf_model(tmp_path, config, tokenizer=False)
    found = []
    for is_cut in (False, True):
        options = {"vocab_parallel_head": is_cut, "max_prompt_logprob_tokens": 64}
        with open_llm(tmp_path, tp_size, backend, **options) as llm:
            params = SamplingParams(
                max_tokens=8, ignore_eos=True, temperature=0, logprobs=3, prompt_logprobs=1
            )
            prompts = [[1, 2, 3], [150, 149] * 20]
            outputs = llm.generate(prompts, params)
            found.append(
                [
                    (o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs)
                    for o in outputs
                ]
            )
            profile = llm.llm_engine.core.executor.profile()["counts"]
            assert profile["native_collective"] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(("backend", "kv_heads", "tp_size"), [("uni", 2, 4), ("mp", 1, 2)])
def test_more_ranks_than_kv_heads_replicate_them(
    tmp_path: Path, backend: str, kv_heads: int, tp_size: int
) -> None:
    config = tiny_config(num_attention_heads=8, num_key_value_heads=kv_heads)
    write_hf_model(tmp_path, config, tokenizer=False)
    with open_llm(tmp_path, 1, "uni") as llm:
        alone, bytes_alone = tokens_of(llm), llm.model_info.kv_bytes_per_token
    with open_llm(tmp_path, tp_size, backend, replicate_kv_heads=True) as llm:
        assert tokens_of(llm) == alone
        assert llm.model_info.kv_bytes_per_token == bytes_alone // kv_heads


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ranks_are_bound_to_disjoint_cores(
    model: Path, expected: list[list[int]], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    shares = [cores_of_rank(numa_nodes(), rank, 2) for rank in range(2)]
    with (
        caplog.at_level(logging.INFO, "llaisys.engine"),
        open_llm(model, 2, backend, numa=True) as llm,
    ):
        assert tokens_of(llm) == expected
        if backend == "mp":
            assert os.sched_getaffinity(children_of(llm)[0].popen.pid) == shares[1]
    for rank in range(2 if backend == "uni" else 1):  # a child has a log of its own
        words = f"threads={len(shares[rank])} cpus={format_cpus(shares[rank])}"
        assert any(f" rank={rank} " in line and words in line for line in caplog.messages)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_indivisible_heads_are_rejected_with_the_numbers(tmp_path: Path, backend: str) -> None:
    cases = [(8, 2, 4), (6, 3, 2)]  # fewer key/value heads than ranks; an odd number of them
    for heads, kv_heads, tp_size in cases:
        path = tmp_path / f"{kv_heads}"
        config = tiny_config(
            num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads
        )
        write_hf_model(path, config, tokenizer=False)
        with pytest.raises(InvalidInputError) as caught:
            open_llm(path, tp_size, backend)
        text = str(caught.value)
        assert f"tp_size={tp_size} tp_rank=" in text
        assert f"global_nkvh={kv_heads} local_nkvh={kv_heads // tp_size} device_id=0" in text
        assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", tp_size)


def test_start_logs_ranks_and_cpus(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llaisys.engine"), open_llm(model, 2, "uni"):
        pass
    for rank in range(2):
        words = f"worker pid={os.getpid()} rank={rank} local_rank={rank} device=cpu:0 tp_size=2"
        assert words in caplog.text
    assert "executor backend=uni tp_size=2 world_size=2" in caplog.text


def test_a_rank_thread_that_fails_ends_the_engine_with_its_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(model, 2, "uni") as llm:
        executor: Any = llm.llm_engine.core.executor
        second = executor.local_ranks[1].worker

        def fail(*_: object) -> None:
            raise RuntimeError("out of ideas")

        monkeypatch.setattr(second, "run_model_forward", fail)
        start = time.monotonic()
        with naming(WorkerLostError, "rank 1", "out of ideas"):
            tokens_of(llm)
        assert time.monotonic() - start < 30 and executor.stats.worker_errors == 1


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ranks_stay_together_when_the_caller_is_interrupted(
    model: Path, expected: list[list[int]], backend: str
) -> None:
    with open_llm(model, 2, backend, max_num_batched_tokens=16) as llm:
        executor: Any = llm.llm_engine.core.executor
        for at in (1, 2, 5):
            steps, rank = 0, executor.local_ranks[-1]  # the driver, or the other rank
            execute = rank.start

            def interrupted(*args: Any, execute: Any = execute, at: int = at) -> Any:
                nonlocal steps
                steps += 1
                future = execute(*args)
                if steps == at:
                    raise KeyboardInterrupt  # while the ranks are at work
                return future

            rank.start = interrupted
            with pytest.raises(KeyboardInterrupt):
                tokens_of(llm)
            del rank.start
            assert tokens_of(llm) == expected


def children_of(llm: LLM) -> list[Any]:
    executor: Any = llm.llm_engine.core.executor
    assert isinstance(executor, MultiprocExecutor)
    return executor.children


@pytest.mark.parametrize(("when", "mode"), [("idle", "off"), ("stopped in a step", "on")])
def test_a_killed_worker_ends_the_engine_in_seconds(model: Path, when: str, mode: str) -> None:
    with open_llm(model, 4, "mp", async_scheduling=mode) as llm:
        children = children_of(llm)
        assert len(children) == 3
        victim = children[1].popen
        if when == "idle":
            victim.kill()
            victim.wait()
        else:  # the others wait for it in a collective when it is killed
            victim.send_signal(signal.SIGSTOP)
            killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {victim.pid}"])
        start = time.monotonic()
        with naming(LlaisysError, "rank 2", "-9"):
            tokens_of(llm)
        assert time.monotonic() - start < 30
        if when != "idle":
            killer.wait()
    assert all(child.popen.poll() is not None for child in children)


def test_workers_end_when_the_driver_is_killed(model: Path, tmp_path: Path) -> None:
    program = (
        "import time; from llaisys import LLM\n"
        f"llm = LLM(model={str(model)!r}, tensor_parallel_size=2,"
        " distributed_executor_backend='mp', num_kv_blocks=16)\n"
        "print(llm.llm_engine.core.executor.children[0].popen.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with open(tmp_path / "errors", "w") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 30
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(worker)
    assert "Warning" not in (tmp_path / "errors").read_text()


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_shared_memory_is_freed(model: Path) -> None:
    gc.collect()  # what other tests left
    memory, files = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    with open_llm(model, 2, "mp") as llm:
        tokens_of(llm)
    assert set(os.listdir("/dev/shm")) <= memory
    assert set(os.listdir("/proc/self/fd")) <= files
