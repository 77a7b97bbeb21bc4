"""Replicas on a Ray cluster of two nodes, behind one server."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess, alive, wait_for

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'llaisys[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

# Simulated GPUs: the replicas reserve one each and compute on the CPU.
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    # Ray's process start timeout is fixed at 30 s.
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE, node_ip_address="127.0.0.2")
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ray") / "model"
    write_hf_model(path, tiny_config())
    return str(path)


@pytest.fixture(scope="module")
def server(cluster: Any, model: str) -> Iterator[ServerProcess]:
    replicas = ("--data-parallel-size", "2", "--data-parallel-backend", "ray", "--threads", "1")
    env = {"RAY_ADDRESS": cluster.address}
    with ServerProcess(model, *replicas, real=True, env=env) as process:
        yield process.wait_ready()


def ask(server: ServerProcess, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def engine_pids() -> list[int]:
    """Return the engine processes of the actors."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # processes end, and not all are folders
            pid = int(folder.name)
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if (Path("/proc") / parent / "cmdline").read_bytes().startswith(b"ray::RayEngine"):
                found.append(pid)
    return found


def up(server: ServerProcess) -> list[float]:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("llaisys:replica_up{")]


def test_ray_replicas_equal_one_engine(server: ServerProcess, model: str) -> None:
    wait_for(lambda: up(server) == [1.0, 1.0], "both replicas")
    with ServerProcess(model, real=True) as alone:
        alone.wait_ready()
        prompts = [f"question {i} " * (i + 1) for i in range(6)]
        assert [ask(server, prompt) for prompt in prompts] == [ask(alone, p) for p in prompts]


def test_replicas_have_a_node_and_a_gpu_each(server: ServerProcess, cluster: Any) -> None:
    wait_for(lambda: up(server) == [1.0, 1.0], "both replicas")
    found = [environment(pid) for pid in engine_pids()]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "0"]  # the first of their nodes
    assert len({env["RAY_RAYLET_PID"] for env in found}) == 2


def test_killed_engine_restarts(server: ServerProcess) -> None:
    wait_for(lambda: up(server) == [1.0, 1.0], "both replicas")
    expected = ask(server, "hello")
    os.kill(engine_pids()[0], signal.SIGKILL)
    wait_for(lambda: sum(up(server)) == 1, "one replica to be down")
    assert ask(server, "hello") == expected
    wait_for(lambda: up(server) == [1.0, 1.0], "it to be up again", seconds=120)


def test_killed_relay_ends_its_engine_and_restarts(server: ServerProcess) -> None:
    """The process of the server that forwards messages to the actor of a replica."""
    wait_for(lambda: up(server) == [1.0, 1.0], "both replicas", seconds=120)
    before = set(engine_pids())
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    relays = [c for c in children if b"ray_relay" in Path(f"/proc/{c}/cmdline").read_bytes()]
    assert len(relays) == 2
    os.kill(int(relays[0]), signal.SIGKILL)
    wait_for(lambda: len(before & set(engine_pids())) == 1, "its engine to end", seconds=60)
    wait_for(lambda: len(set(engine_pids()) - before) == 1, "another engine", seconds=120)
    wait_for(lambda: up(server) == [1.0, 1.0], "it to be up again", seconds=120)


def test_replica_of_a_dead_node_starts_on_another(server: ServerProcess, cluster: Any) -> None:
    wait_for(lambda: up(server) == [1.0, 1.0], "both replicas", seconds=120)
    expected = ask(server, "hello")
    before = set(engine_pids())
    (node,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: len(before & set(engine_pids())) == 1, "the engine to end with its node")
    wait_for(lambda: sum(up(server)) == 1, "one replica to be down", seconds=60)
    assert ask(server, "hello") == expected
    cluster.add_node(**NODE, node_ip_address="127.0.0.2")
    wait_for(lambda: up(server) == [1.0, 1.0], "a replica on the new node", seconds=180)


def test_engines_end_when_the_server_is_killed(server: ServerProcess) -> None:
    """The last one."""
    engines = engine_pids()
    assert len(engines) == 2
    server.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in engines), "the engines to end", seconds=60)
