"""Ranks on a Ray cluster of two nodes; what happens when an actor, a node or the driver dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input, naming
from model_files import tiny_config, write_hf_model
from rank_matrix import PAIRWISE, Row, check_row, name_of, write_models

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'llaisys[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from llaisys import LLM, SamplingParams  # noqa: E402
from llaisys.common.errors import InvalidInputError  # noqa: E402
from llaisys.engine.executor import RayExecutor, WorkerLostError  # noqa: E402
from llaisys.engine.executor import ray as ray_module  # noqa: E402
from llaisys.engine.executor.ray_rank import Place, device_ids  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [250, 17]]
NODE = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 << 20}  # simulated GPUs


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    # Ray gives its processes 30 s to start; this is not configurable.
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    # Its own address, as the bundle of the driver rank is placed by that.
    made.add_node(**NODE, node_ip_address="127.0.0.2")
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "model"
    write_hf_model(path, tiny_config(num_attention_heads=8, num_key_value_heads=4), tokenizer=False)
    return path


def open_llm(model: Path, backend: str, tp_size: int = 2, **options: Any) -> LLM:
    return LLM(
        model=str(model),
        tensor_parallel_size=tp_size,
        distributed_executor_backend=backend,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
        block_size=4,
        n_threads=1,
        **options,
    )


def tokens_of(llm: LLM) -> list[list[int]]:
    seeded = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2}
    params = [
        SamplingParams(max_tokens=12 + i, ignore_eos=True, **({"temperature": 0}, seeded)[i % 2])
        for i in range(len(PROMPTS))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def executor_of(llm: LLM) -> RayExecutor:
    executor = llm.llm_engine.core.executor
    assert isinstance(executor, RayExecutor)
    return executor


def pid_of(llm: LLM) -> int:
    """The process of rank 1."""
    actor = executor_of(llm).children[0].actor
    pid: int = ray.get(actor.ping.options(concurrency_group="health").remote())
    return pid


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not runs(pid), f"process {pid} to end")


def test_ranks_of_a_cluster_give_the_same_tokens_and_leave_nothing(
    cluster: Any, model: Path
) -> None:
    with open_llm(model, "uni", tp_size=1) as llm:
        expected = tokens_of(llm)
    with open_llm(model, "ray") as llm:
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected and llm.stats()["prefix_cache_hits"] > 0
        executor_of(llm).check_health()
        pid = pid_of(llm)
        assert pid != os.getpid() and runs(pid)
    wait_until_gone(pid)
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "the end of the placement group")


def test_cluster_without_room_reports_its_cpus(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_module, "PLACEMENT_TIMEOUT", 0.5)
    with pytest.raises(InvalidInputError, match=r"no room for 4 ranks .* it has 2 CPUs"):
        open_llm(model, "ray", tp_size=4)
    with invalid_input("device"):
        open_llm(model, "ray", device="cuda")
    with monkeypatch.context() as context:
        context.setattr(ray_module, "gpus_per_rank", lambda config: 4)
        text = r"2 ranks with 1 CPUs and 4 GPUs each: it has 2 CPUs and 4 GPUs"
        with pytest.raises(InvalidInputError, match=text):
            open_llm(model, "ray")


def test_gpus_are_reserved_for_every_rank(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of this test compute on the CPU: the GPUs of the cluster are simulated."""
    with open_llm(model, "uni", tp_size=1) as llm:
        expected = tokens_of(llm)
    joined: list[Any] = []
    seen = ray_module.with_device_ids
    monkeypatch.setattr(
        ray_module, "with_device_ids", lambda *args: joined.append(args) or seen(*args)
    )
    for gpus in (1.0, 0.5):
        monkeypatch.setattr(ray_module, "gpus_per_rank", lambda config, gpus=gpus: gpus)
        left = 4 - 2 * gpus
        with open_llm(model, "ray") as llm:
            assert tokens_of(llm) == expected
            wait_until(lambda left=left: ray.available_resources().get("GPU") == left, "the GPUs")
            _, places, _ = joined.pop()
            assert places[0].node == ray.get_runtime_context().get_node_id()
            assert places[0].node != places[1].node and all(place.gpu for place in places)
        wait_until(lambda: ray.available_resources().get("GPU") == 4, "all GPUs again")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("row", [row for row in PAIRWISE if not row[4]], ids=name_of)
def test_combinations_give_the_tokens_of_one_rank(
    cluster: Any, models: tuple[Path, Path], row: Row
) -> None:
    check_row(models, "ray", row)


def test_device_ids_name_the_own_gpu_and_tell_whether_ranks_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [Place("a", "x", "2"), Place("b", "x", "3"), Place("c", "y", "2")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")  # of a driver: all of them
    assert device_ids(places, 0)[0] == 1 and len(set(device_ids(places, 0))) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # of an actor: its own
    assert device_ids(places, 1)[1] == 0 and len(set(device_ids(places, 1))) == 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_ids(places, 2)[2] == 2
    shared = [*places[:2], Place("c", "x", "3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device_ids(shared, 2) == (0, 0, 0)


def test_a_killed_actor_ends_the_engine_with_its_rank(cluster: Any, model: Path) -> None:
    with open_llm(model, "ray") as llm:
        tokens_of(llm)
        os.kill(pid_of(llm), signal.SIGKILL)
        with naming(WorkerLostError, "rank 1"):
            tokens_of(llm)
        with naming(WorkerLostError, "rank 1"):
            executor_of(llm).check_health()


def test_actors_end_with_their_driver(cluster: Any, model: Path) -> None:
    program = (
        "import ray, time; from llaisys import LLM\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False)\n"
        f"llm = LLM(model={str(model)!r}, tensor_parallel_size=2, n_threads=1,"
        " distributed_executor_backend='ray', num_kv_blocks=16)\n"
        "actor = llm.llm_engine.core.executor.children[0].actor\n"
        "ping = actor.ping.options(concurrency_group='health')\n"
        "print('pid', ray.get(ping.remote()), flush=True)\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("pid"))
    pid = int(line.split()[1])
    assert runs(pid)
    driver.kill()
    driver.wait()
    wait_until_gone(pid)


def test_a_node_that_dies_ends_the_engine(cluster: Any, model: Path) -> None:
    """The last one: the cluster has one node afterwards."""
    with open_llm(model, "ray") as llm:
        tokens_of(llm)
        pid = pid_of(llm)
        [node] = [
            node for node in cluster.list_all_nodes() if node is not cluster.head_node and runs(pid)
        ]
        cluster.remove_node(node, allow_graceful=False)
        wait_until_gone(pid)
        start = time.monotonic()
        with pytest.raises(WorkerLostError):
            tokens_of(llm)
        assert time.monotonic() - start < 30
