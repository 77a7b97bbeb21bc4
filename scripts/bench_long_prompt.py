#!/usr/bin/env python3
"""Inter-token latency of a stream beside a long prompt, on this machine, with and without
`--max-step-time`.

    scripts/bench_long_prompt.py [--model MODEL] [--prompt 20000] [--seconds 60] [SECONDS ...]

MODEL: a directory, a GGUF file, or a shape with random weights and a context of 32,768 tokens
(default: smollm2-135m; qwen2.5-0.5b). SECONDS: values of --max-step-time, default 0 (no bound) and
0.25. The prompt is cancelled after --seconds. CPU: processor time of the server per step, divided
by the number of cores. Where it is much less than the latency, other programs had the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from llaisys.models.synthetic import SHAPES, write_shape_model


def random_model(shape: str, directory: Path) -> Path:
    write_shape_model(shape, "bf16", directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 32768}))
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"the server ended with status {server.returncode}")


def body(model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    fixed = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}  # it has no texts
    return {"model": model, "prompt": prompt, **fixed, **more}


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its children, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def measure(model: str, options: argparse.Namespace, bound: float) -> None:
    port = free_port()
    command = [sys.executable, "-m", "llaisys", "serve", model, "--port", str(port)]
    command += ["--device", options.device, "--max-step-time", str(bound), "--session-file"]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([*command, f"{folder}/sessions"], stderr=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base, timeout=3600) as client:
                wait_until_ready(client, server)
                run(client, options, bound, server.pid)
        finally:
            server.terminate()
            server.wait()


def run(client: httpx.Client, options: argparse.Namespace, bound: float, pid: int) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    rng = np.random.default_rng(1)
    progress = 0
    is_over = threading.Event()

    def send_long_prompt() -> None:
        """Follow the progress of the prompt, at most --seconds; leaving cancels it."""
        nonlocal progress
        end = time.perf_counter() + options.seconds
        ids = rng.integers(100, 40000, options.prompt).tolist()
        request = body(model, ids, max_tokens=1, stream=True, return_progress=True)
        with client.stream("POST", "/v1/completions", json=request) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: ")).get("prompt_progress")
                    progress = found["processed"] if found else options.prompt
                if time.perf_counter() > end:
                    break
        is_over.set()

    sender = threading.Thread(target=send_long_prompt)
    stream = body(model, [100, 200, 300], max_tokens=30000, stream=True)
    alone: list[float] = []
    beside: list[float] = []
    costs: list[float] = []  # processor time of each step beside the prompt
    num_cores = len(os.sched_getaffinity(0))
    started = used = 0.0
    with client.stream("POST", "/v1/completions", json=stream) as response:
        last = begin = time.perf_counter()
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            now = time.perf_counter()
            (beside if sender.ident else alone).append(now - last)
            last = now
            if sender.ident:
                before, used = used, cpu_seconds(pid)
                costs.append((used - before) / num_cores)
            elif now - begin > 5:
                started, used = now, cpu_seconds(pid)
                sender.start()
            if is_over.is_set():
                break
    for name, gaps in ("alone", alone), ("beside", beside), ("CPU", costs):
        half, high, most = (1e3 * np.percentile(gaps, q) for q in (50, 99, 100))
        print(
            f"max_step_time {bound:4g}  {name:6}  p50 {half:7.1f} ms  p99 {high:7.1f}  "
            f"max {most:7.1f}  ({len(gaps)} tokens)"
        )
    print(
        f"max_step_time {bound:4g}  {progress} of {options.prompt} tokens in "
        f"{last - started:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=60, help="limit beside the prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("bounds", type=float, nargs="*", default=[0.0, 0.25], metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        is_shape = options.model in SHAPES
        model = str(random_model(options.model, Path(folder))) if is_shape else options.model
        for bound in options.bounds:
            measure(model, options, bound)


if __name__ == "__main__":
    main()
