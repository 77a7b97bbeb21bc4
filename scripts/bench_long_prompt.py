#!/usr/bin/env python3
"""Inter-token latency of a stream beside a long prompt, on this machine, with and without
`--max-step-time`.

    scripts/bench_long_prompt.py [--model DIR] [--prompt 20000] [--device cpu] [SECONDS ...]

Without a model: random weights of SmolLM2-135M's shape with a context of 32,768 tokens. SECONDS:
values of --max-step-time, default 0 (no bound) and 0.25.
"""

from __future__ import annotations

import argparse
import json
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

from llaisys.models.synthetic import write_shape_model


def random_model(directory: Path) -> Path:
    write_shape_model("smollm2-135m", "bf16", directory)
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
    return {"model": model, "prompt": prompt, "ignore_eos": True, "temperature": 0, **more}


def measure(model: Path, prompt: int, device: str, bound: float) -> None:
    port = free_port()
    command = [sys.executable, "-m", "llaisys", "serve", str(model), "--port", str(port)]
    command += ["--device", device, "--max-step-time", str(bound), "--session-file"]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([*command, f"{folder}/sessions"], stderr=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base, timeout=3600) as client:
                wait_until_ready(client, server)
                run(client, prompt, bound)
        finally:
            server.terminate()
            server.wait()


def run(client: httpx.Client, prompt: int, bound: float) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    rng = np.random.default_rng(1)
    took: list[float] = []

    def send_long_prompt() -> None:
        begin = time.perf_counter()
        ids = rng.integers(100, 40000, prompt).tolist()
        client.post("/v1/completions", json=body(model, ids, max_tokens=1)).raise_for_status()
        took.append(time.perf_counter() - begin)

    sender = threading.Thread(target=send_long_prompt)
    stream = body(model, [100, 200, 300], max_tokens=30000, stream=True)
    alone: list[float] = []
    beside: list[float] = []
    with client.stream("POST", "/v1/completions", json=stream) as response:
        last = begin = time.perf_counter()
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            now = time.perf_counter()
            (beside if sender.ident else alone).append(now - last)
            last = now
            if not sender.ident and now - begin > 5:
                sender.start()
            if took:
                break
    for name, gaps in ("alone", alone), ("beside", beside):
        half, high, most = (1e3 * np.percentile(gaps, q) for q in (50, 99, 100))
        print(
            f"max_step_time {bound:4g}  {name:6}  p50 {half:7.1f} ms  p99 {high:7.1f}  "
            f"max {most:7.1f}  ({len(gaps)} tokens)"
        )
    print(f"max_step_time {bound:4g}  prompt of {prompt}: {took[0]:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", type=int, default=20000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("bounds", type=float, nargs="*", default=[0.0, 0.25], metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_model(Path(folder))
        for bound in options.bounds:
            measure(model, options.prompt, options.device, bound)


if __name__ == "__main__":
    main()
