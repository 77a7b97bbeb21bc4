"""The server on the GPU: tokens match the engine, GPU metrics, faults as on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess, alive

from llaisys import LLM, SamplingParams
from llaisys.common.errors import LlaisysError

DEVICE = "cuda"
PROMPTS = [[5, 9, 2, 77, 31], list(range(3, 90)), [11] * 33, [8], list(range(200, 17, -1))] * 3
HELPERS = Path(__file__).resolve().parents[1] / "helpers"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-server")
    config = tiny_config(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=360, vocab_size=1000, max_position_embeddings=1024,
    )  # fmt: skip
    write_hf_model(path, config)
    return path


def start(directory: Path, *options: str) -> ServerProcess:
    fixed = (
        "--model",
        str(directory),
        "--device",
        DEVICE,
        "--dtype",
        "f32",
        "--num-kv-blocks",
        "600",
    )
    return ServerProcess(*fixed, *options, real=True)


@pytest.fixture(scope="module", params=["off", "on"], ids=["synchronous", "asynchronous"])
def server(directory: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with start(directory, "--async-scheduling", request.param) as process:
        yield process.wait_ready()
        process.wait_idle()
        assert process.stop() == 0


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True} | fields


def ask(client: httpx.Client, prompt: list[int], **fields: Any) -> str:
    answer = client.post("/v1/completions", json=body(prompt, **fields))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_concurrent_clients_get_the_texts_of_the_engine(
    directory: Path, server: ServerProcess
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(str(directory), device=DEVICE, dtype="f32", num_kv_blocks=600) as llm:
        expected = [output.text for output in llm.generate(PROMPTS, params)]
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS)) == expected


def test_seeded_answer_is_reproducible(server: ServerProcess) -> None:
    with server.client() as client:
        fields: dict[str, Any] = {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.4}
        assert ask(client, PROMPTS[1], **fields) == ask(client, PROMPTS[1], **fields)


def test_metrics_include_the_gpu(server: ServerProcess) -> None:
    with server.client() as client:
        ask(client, PROMPTS[0])
    server.wait_for(lambda: "gpu_memory_total" in _metrics(server), "figures of the GPU")
    used, total = (server.metric(f"gpu_memory_{name}_bytes") for name in ("used", "total"))
    assert 0 < used < total


def _metrics(server: ServerProcess) -> str:
    with server.client() as client:
        return client.get("/metrics").text


def test_killed_engine_ends_every_stream_and_the_server(directory: Path) -> None:
    with start(directory) as process:
        engine = process.wait_ready().engine_pid
        asked = body([3, 4], max_tokens=900, stream=True)
        with process.client() as client, client.stream("POST", "/v1/completions", json=asked) as s:
            lines = s.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            rest = "".join(lines)
        assert "error" in rest and "[DONE]" not in rest.split("error")[0]
        process.wait_for(lambda: process.process.poll() is not None, "the end of the server")
        assert process.process.returncode != 0 and not alive(engine)


def test_too_large_kv_cache_is_rejected_with_byte_counts(directory: Path) -> None:
    with pytest.raises(LlaisysError):
        LLM(str(directory), device=DEVICE, dtype="f32", kv_cache_memory_bytes=1 << 45)
    with LLM(str(directory), device=DEVICE, dtype="f32", num_kv_blocks=40) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        assert len(llm.generate([[1, 2]], params)[0].token_ids) == 4


BROKEN_KERNEL = """
import sys
import numpy as np
from native_helpers import lib, tensor
from llaisys import LLM, SamplingParams
from llaisys.libllaisys.handles import Stream, Tensor

params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
with LLM(sys.argv[1], device="cuda", dtype="f32", num_kv_blocks=40) as llm:
    assert len(llm.generate([[1, 2]], params)[0].token_ids) == 4
    stream = Stream("cuda", 0)
    made = {name: Tensor.create(shape, "f32", "cuda") for name, shape in
            (("out", (1, 2, 64)), ("q", (1, 2, 64)), ("k", (16, 2, 64)), ("v", (16, 2, 64)))}
    lists = [Tensor.create((1,), "i32", "cuda") for _ in range(3)]
    table = Tensor.create((1, 1), "i32", "cuda")
    far = np.full((1, 1), 1 << 30, np.int32)  # block id out of range
    table.load(far.ctypes.data, far.nbytes)
    one = np.ones(1, np.int32)
    lists[2].load(one.ctypes.data, one.nbytes)
    head = (made[name].handle for name in ("out", "q", "k", "v"))
    handles = [t.handle for t in (*lists, table)]
    lib().llaisysAttention(stream.handle, *head, *handles, None, None, 0, 16, 0.1, 0.0)
    (output,) = llm.generate([[1, 2]], params)
    print(output.finish_reason, "|", output.outputs[0].error)
"""


def test_failing_kernel_is_reported_by_name(
    directory: Path,
) -> None:
    """In a separate process: the CUDA context is lost."""
    path = os.pathsep.join([*sys.path, str(HELPERS)])
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN_KERNEL, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.stdout.startswith("error | "), ended.stdout + ended.stderr
    assert "CUDA" in ended.stdout
