#!/usr/bin/env python3
"""Data parallel replicas on the cores of this machine, compared with one engine on all cores.

    scripts/bench_replicas.py --model DIR [--replicas 2] [--concurrency 16] [--rounds 5]

Starts two servers, `llaisys serve` with all cores and the same with --data-parallel-size, and sends
both the same load (`llaisys bench serve`) alternately. Reports the median ratio of the rounds.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(
    options: argparse.Namespace, folder: str, extra: list[str]
) -> tuple[subprocess.Popen[bytes], str]:
    """`folder`: of its session file, which only one server may use."""
    port = free_port()
    command = [sys.executable, "-m", "llaisys", "serve", options.model, "--port", str(port)]
    command += ["--session-file", f"{folder}/{port}.sqlite3", "--no-prefix-caching"]
    server = subprocess.Popen([*command, "--log-level", "warning", *extra])
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return server, url
        except OSError:
            if server.poll() is not None:
                sys.exit(f"the server ended with status {server.returncode}")
            time.sleep(0.2)


def tokens_per_second(options: argparse.Namespace, url: str) -> float:
    command = [sys.executable, "-m", "llaisys", "bench", "serve", "--url", url, "--json"]
    for name in ("concurrency", "requests", "prompt_tokens", "new_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    answer = subprocess.run([*command, "--seed", "1"], check=True, capture_output=True, text=True)
    value: float = json.loads(answer.stdout)["throughput_tok_s"]
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    servers: list[tuple[subprocess.Popen[bytes], str]] = []
    folder = tempfile.TemporaryDirectory()
    try:
        for extra in ([], ["--data-parallel-size", str(options.replicas)]):
            servers.append(start_server(options, folder.name, extra))
        found: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for (_, url), values in zip(servers, found, strict=True):
                values.append(tokens_per_second(options, url))
    finally:
        for server, _ in servers:
            server.terminate()
            server.wait()
        folder.cleanup()
    one, several = (statistics.median(values) for values in found)
    ratio = statistics.median(b / a for a, b in zip(*found, strict=True))
    print(f"one engine    {one:9.1f} tok/s   {[round(v, 1) for v in found[0]]}")
    print(
        f"{options.replicas} replicas    {several:9.1f} tok/s   {[round(v, 1) for v in found[1]]}"
    )
    print(f"replicas / one engine: {ratio:.3f} (median of {options.rounds} rounds by turns)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
