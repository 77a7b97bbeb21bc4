"""Pipeline stages in processes give the tokens of one rank, in shared memory and over TCP; failures
of a stage."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from encoder_models import make_encoder, save_encoder
from error_helpers import invalid_input, naming
from model_files import tiny_config, write_gguf, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor import Executor, WorkerError
from llaisys.engine.executor.mp import MultiprocExecutor, RankProcess
from llaisys.engine.executor.ray_rank import init_method, listen
from llaisys.models.sharding import stage_layers

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [3] * 40, [7, 8, 9] * 9 + [11, 12], [250, 17]]
LAYERS = 5


class TcpExecutor(MultiprocExecutor):
    """Processes of this machine that communicate over TCP, as Ray actors do."""

    def _init_ranks(self) -> None:
        config = self.config
        sockets = [listen("127.0.0.1") for _ in range(config.parallel.world_size)]
        addresses, token = [address for _, address in sockets], secrets.token_hex(8)
        methods = [init_method(file, token, addresses) for file, _ in sockets]
        self._context = zmq.Context()
        self._make_driver(config, methods[0])
        try:
            for rank in range(1, config.parallel.world_size):
                setup = {
                    "engine": config.to_wire(),
                    "rank": rank,
                    "local_rank": rank,
                    "init_method": methods[rank],
                    "log_level": "warning",
                    "log_format": "text",
                }
                child = RankProcess(self._context, rank, setup, (sockets[rank][0],))
                os.close(sockets[rank][0])
                self._children.append(child)
            self._load_models()
        except BaseException:
            self.shutdown()
            raise


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library uses TCP with the backend ray."""
    get_class = Executor.get_class

    def chosen(config: EngineConfig) -> type[Executor]:
        is_ray = config.parallel.distributed_executor_backend == "ray"
        return TcpExecutor if is_ray else get_class(config)

    monkeypatch.setattr(Executor, "get_class", chosen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pp") / "model"
    write_hf_model(path, tiny_config(num_hidden_layers=LAYERS), tokenizer=False)
    return path


def open_llm(model: Path, stages: int, backend: str = "mp", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": 4, "num_kv_blocks": 64, "block_size": 4}
    return LLM(
        model=str(model),
        pipeline_parallel_size=stages,
        distributed_executor_backend=backend,
        n_threads=1,
        device="cpu",
        **{**defaults, **options},
    )


def sampling() -> list[SamplingParams]:
    """Greedy and seeded, with penalties and without."""
    seeded = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2}
    return [
        SamplingParams(max_tokens=12 + i, ignore_eos=True, **({"temperature": 0}, seeded)[i % 2])
        for i in range(len(PROMPTS))
    ]


def tokens_of(llm: LLM, params: Any = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params or sampling())
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[list[int]]]:
    with open_llm(model, 1, "uni") as llm:
        yield tokens_of(llm)


@pytest.fixture(scope="module")
def two_stages(model: Path) -> Iterator[LLM]:
    """For tests after which an engine goes on."""
    with open_llm(model, 2, max_num_batched_tokens=16) as llm:
        yield llm


def children_of(llm: LLM) -> list[Any]:
    executor: Any = llm.llm_engine.core.executor
    assert isinstance(executor, MultiprocExecutor)
    return executor.children


@pytest.mark.usefixtures("tcp")
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_stages_give_the_tokens_of_one_rank(
    model: Path, expected: list[list[int]], backend: str
) -> None:
    """Chunked prompts beside decoding, five requests with max_num_seqs 4, and again from the prefix
    cache."""
    with open_llm(model, 3, backend, max_num_batched_tokens=16) as llm:
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected
        assert llm.stats()["prefix_cache_hits"] > 0


def test_a_step_is_in_flight_for_each_stage(model: Path) -> None:
    """Running requests are divided, so that no stage waits for all of them."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    with open_llm(model, 2) as llm:
        core: Any = llm.llm_engine.core
        depths, collect = [], core.executor.sample_tokens

        def observed(*args: Any) -> Any:
            depths.append(1 + core.debug_state()["steps_in_flight"])
            return collect(*args)

        core.executor.sample_tokens = observed
        llm.generate(PROMPTS[:4], params)
        assert max(depths) == 2 and depths.count(2) > 30
        assert max(record.batch_size for record in list(core.steps)[4:]) == 2


@pytest.mark.parametrize(("tp_size", "tied"), [(1, True), (2, False)])
def test_stages_of_several_ranks(tmp_path: Path, tp_size: int, tied: bool) -> None:
    config = tiny_config(num_hidden_layers=3, tie_word_embeddings=tied)
    write_hf_model(tmp_path, config, tokenizer=False)
    with open_llm(tmp_path, 1, "uni") as llm:
        alone = tokens_of(llm)
    with open_llm(tmp_path, 2, "mp", tensor_parallel_size=tp_size) as llm:
        assert tokens_of(llm) == alone


def test_preempted_requests_resume_with_same_tokens(model: Path, expected: list[list[int]]) -> None:
    with open_llm(model, 2, num_kv_blocks=22) as llm:
        assert tokens_of(llm) == expected
        assert llm.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "model.gguf"
    config = tiny_config(
        hidden_size=256, intermediate_size=256, num_hidden_layers=3, tie_word_embeddings=tied
    )
    write_gguf(path, config, kind="Q8_0")
    tokens = []
    for stages in (1, 2):
        with open_llm(path, stages) as llm:
            tokens.append(tokens_of(llm))
    assert tokens[0] == tokens[1]


def test_evicted_blocks_return_to_every_stage(model: Path, expected: list[list[int]]) -> None:
    with open_llm(model, 3, num_kv_blocks=24, kv_offload=1 << 20) as llm:
        for _ in range(3):
            assert tokens_of(llm) == expected
        assert llm.stats()["kv_blocks_restored"] > 0


def test_shifted_context(tmp_path: Path) -> None:
    write_hf_model(
        tmp_path, tiny_config(num_hidden_layers=3, max_position_embeddings=32), tokenizer=False
    )
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    found = []
    for stages in (1, 2):
        with open_llm(tmp_path, stages, context_shift=True) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS[::4], params)])
            assert llm.stats()["num_context_shifts"] > 0
    assert found[0] == found[1]


def test_logprobs_prompt_logprobs_and_embeddings(model: Path, two_stages: LLM) -> None:
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, temperature=0, logprobs=3, prompt_logprobs=2
    )
    found = []
    with open_llm(model, 1, max_num_batched_tokens=16) as one_stage:
        for llm in (one_stage, two_stages):
            outputs = llm.generate(PROMPTS, params)
            texts = [(o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
            found.append((texts, [list(e.embedding) for e in llm.embed(PROMPTS)]))
    assert found[0] == found[1]


def test_structured_output(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config(num_hidden_layers=3))
    masked = SamplingParams(
        max_tokens=8, temperature=0, structured_outputs={"choice": ["yes", "no"]}
    )
    free = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts = []
    for stages in (1, 2):
        with open_llm(tmp_path, stages) as llm:
            outputs = llm.generate([[1, 2, 3], [7, 8], [9]], [masked, masked, free])
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1] and set(texts[0][:2]) <= {"yes", "no"}


def test_layers_of_stages() -> None:
    """The output matrix counts as layers of the last stage."""
    sizes = {
        case: [len(layers) for layers in stage_layers(*case)]
        for case in [(4, 2, 0.0), (24, 2, 9.0), (80, 4, 1.2), (3, 3, 50.0), (7, 3, 0.5)]
    }
    assert sizes == {
        (4, 2, 0.0): [2, 2],
        (24, 2, 9.0): [16, 8],
        (80, 4, 1.2): [21, 20, 20, 19],
        (3, 3, 50.0): [1, 1, 1],
        (7, 3, 0.5): [3, 2, 2],
    }
    for (num_layers, *_), lengths in sizes.items():
        assert sum(lengths) == num_layers
    starts = [layers.start for layers in stage_layers(80, 4, 1.2)]
    assert starts == [0, 21, 41, 61]


def test_too_many_stages_are_rejected(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config(num_hidden_layers=1), tokenizer=False)
    with invalid_input("pipeline_parallel_size"):
        open_llm(tmp_path, 2)


def test_encoders_are_rejected(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path)
    with invalid_input("pipeline_parallel_size"):
        open_llm(tmp_path, 2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"tensor_parallel_size": 64}, "pipeline_parallel_size"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "pipeline_parallel_size",
        ),
        ({"tensor_parallel_device_ids": (0,)}, "tensor_parallel_device_ids"),
    ],
    ids=str,
)
def test_options_that_cannot_be_combined(options: dict[str, Any], field: str) -> None:
    given = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", **options}
    with pytest.raises(InvalidInputError) as error:
        EngineConfig.of(model="somewhere", **given)
    assert error.value.field == field


@pytest.mark.usefixtures("tcp")
@pytest.mark.parametrize(
    ("backend", "victim", "when"),
    [  # every pair of values of two of them
        ("mp", 0, "idle"),
        ("mp", 1, "stopped in a step"),
        ("ray", 0, "stopped in a step"),
        ("ray", 1, "idle"),
    ],
)
def test_a_killed_stage_ends_the_engine(model: Path, backend: str, victim: int, when: str) -> None:
    with open_llm(model, 3, backend) as llm:
        children = children_of(llm)
        process = children[victim].popen
        if when == "idle":
            process.kill()
            process.wait()
        else:  # the others wait for it in the step when it is killed
            process.send_signal(signal.SIGSTOP)
            killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
        start = time.monotonic()
        with naming(LlaisysError, f"rank {victim + 1}"):
            tokens_of(llm)
        assert time.monotonic() - start < 30
        if when != "idle":
            killer.wait()
    assert all(child.popen.poll() is not None for child in children)


def test_a_failed_stage_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage fails: the other one leaves its wait."""
    with open_llm(model, 2) as llm:
        executor: Any = llm.llm_engine.core.executor

        def fail(*_: object) -> None:
            raise InvalidInputError("out of ideas")

        monkeypatch.setattr(executor.worker, "run_model_forward", fail)
        with naming(LlaisysError, "rank 0", "out of ideas"):
            tokens_of(llm)
        children = children_of(llm)
    assert all(child.popen.poll() is not None for child in children)


def test_a_step_that_cannot_be_sampled_fails_alone(
    two_stages: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = two_stages.llm_engine.core.executor
    sample, calls = executor.worker.sample, []

    def fail_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise InvalidInputError("no finite logit")
        return sample(*args)

    monkeypatch.setattr(executor.worker, "sample", fail_once)
    outputs = two_stages.generate(PROMPTS, sampling())
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert "error" in reasons and "length" in reasons
    assert executor.stats.worker_errors == 1
    assert tokens_of(two_stages) == expected
    assert issubclass(WorkerError, LlaisysError)


def test_stages_stay_together_when_the_caller_is_interrupted(
    two_stages: LLM, expected: list[list[int]]
) -> None:
    executor: Any = two_stages.llm_engine.core.executor
    (rank,) = executor.local_ranks
    execute = rank.start
    for at in (1, 2, 3, 8):
        steps = 0

        def interrupted(*args: Any, at: int = at) -> Any:
            nonlocal steps
            steps += 1
            future = execute(*args)
            if steps == at:
                raise KeyboardInterrupt  # while the stages are at work
            return future

        rank.start = interrupted
        with pytest.raises(KeyboardInterrupt):
            tokens_of(two_stages)
        del rank.start
        assert tokens_of(two_stages) == expected


def test_profile_and_health_while_steps_are_in_flight(model: Path) -> None:
    """A stage may wait for the last one, which computes a step when it is collected."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    with open_llm(model, 2, max_num_batched_tokens=256) as llm:
        core: Any = llm.llm_engine.core
        step, seen = core.step, []

        def observed() -> Any:
            updates = step()
            seen.append(core.executor.worker.num_planned)
            core.executor.check_health()
            core.executor.profile()
            return updates

        core.step = observed
        llm.generate([[5] * 120] * 4, params)
        assert max(seen) > 0
