#!/usr/bin/env python3
"""Data parallel replicas on the cores of this machine, compared with one engine on all cores.

    scripts/bench_replicas.py --model DIR [--replicas 2] [--concurrency 16] [--rounds 5]
    scripts/bench_replicas.py --model DIR --long-prompts 6 [--prompt-tokens 1000]

Starts two servers, `llaisys serve` with all cores and the same with --data-parallel-size, and sends
both the same load (`llaisys bench serve`) alternately. Reports the median ratio of the rounds.

With --long-prompts: inter-token latency of streams while long prompts arrive, of a replica that
also computes the prompts, and of a decode replica that receives their KV blocks
(--prefill-replicas). Each replica has a core of its own, whose clock is the CPU time of its
process: other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from llaisys import SamplingParams
from llaisys.engine.config import EngineConfig
from llaisys.engine.llm_engine import LLMEngine


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


# ---- long prompts beside streams -----------------------------------------------------------------


class Replica:
    """An engine with a clock of its own, in seconds."""

    def __init__(self, options: argparse.Namespace, folder: str, name: str) -> None:
        config = EngineConfig.of(
            model=options.model, device=options.device, dtype=options.dtype, n_threads=1,
            kv_transfer="shm", max_step_time=0.25, max_num_seqs=64, num_kv_blocks=4096,
        )  # fmt: skip
        self.engine = LLMEngine(config)
        self.core = self.engine.core
        self.address = self.core.start_kv_transfer(f"unix:{folder}/{name}", b"bench")
        self.now = 0.0
        self._timer = time.process_time if options.device == "cpu" else time.perf_counter

    def submit(self, name: str, prompt: list[int], count: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        [request] = self.engine.input_processor.process(prompt, params, name).requests
        for field, value in fields.items():
            setattr(request, field, value)
        self.core.add_requests([request])

    def step(self) -> list[str]:
        """Run one step, or wait for blocks; return the requests that got a token."""
        start = self._timer()
        self.core.poll()
        updates = self.core.step() if self.core.can_step else []
        self.now += self._timer() - start
        return [update.request_id for update in updates if update.token_ids]

    def run(self) -> None:
        while self.core.has_unfinished():
            self.step()


def measure_streams(
    options: argparse.Namespace,
    decoder: Replica,
    prefiller: Replica | None,
    prompts: int,
    seed: int,
) -> tuple[list[float], list[float]]:
    """Run streams while prompts arrive at the rate that one replica can compute; return the
    inter-token latencies and the times to first token of the long prompts. `prefiller`: computes
    the prompts; None: the decoder does."""
    rng = random.Random(seed)
    vocabulary = decoder.engine.model_info.vocab_size
    texts = [
        [rng.randrange(10, vocabulary) for _ in range(options.prompt_tokens)]
        for _ in range(prompts)
    ]
    streams = [f"stream-{seed}-{number}" for number in range(options.concurrency)]
    for name in streams:
        decoder.submit(name, [rng.randrange(10, vocabulary) for _ in range(16)], 100_000)
    last: dict[str, float] = {}
    latencies: list[float] = []
    arrivals = [(number + 0.5) * options.interval for number in range(prompts)]
    begin = decoder.now
    pending = list(zip(arrivals, texts, strict=True))
    ready: list[
        tuple[float, float, str, list[int], str]
    ] = []  # (when, arrival, name, text, source)
    busy_until = 0.0
    first: list[float] = []
    arrived: dict[str, float] = {}
    end = begin + options.interval * max(prompts, 1) + options.interval
    if not prompts:
        end = begin + 4 * options.interval
    while decoder.now < end or arrived or ready:
        clock = decoder.now - begin
        while pending and pending[0][0] <= clock:
            arrival, text = pending.pop(0)
            name = f"long-{seed}-{len(pending)}"
            if prefiller is None:
                ready.append((arrival, arrival, name, text, ""))
                continue
            before = prefiller.now
            prefiller.submit(f"{name}#kv", text, 0, kv_export=True)
            prefiller.run()
            busy_until = max(arrival, busy_until) + prefiller.now - before
            ready.append((busy_until, arrival, name, text, f"{name}#kv@{prefiller.address}"))
        while ready and ready[0][0] <= clock:
            _, arrived_at, name, text, source = ready.pop(0)
            arrived[name] = arrived_at
            decoder.submit(name, text, 4, kv_source=source)
        for name in decoder.step():
            if name in arrived:
                first.append(decoder.now - begin - arrived.pop(name))
            elif name in streams:
                if name in last:
                    latencies.append(decoder.now - last[name])
                last[name] = decoder.now
    for name in streams:
        decoder.core.finish_request(name)
    decoder.run()
    return latencies, first


def compare_long_prompts(options: argparse.Namespace) -> int:
    """Exit status 1 when disaggregated latency is not within 1.2 of idle."""
    with tempfile.TemporaryDirectory() as folder:
        decoder, prefiller = (Replica(options, folder, name) for name in ("d", "p"))
        warm = [1 + number % 200 for number in range(options.prompt_tokens)]
        for name in ("warm", "timed"):
            prefiller.now = 0.0
            prefiller.submit(name, [len(name), *warm], 0)
            prefiller.run()
        options.interval *= prefiller.now
        print(f"{options.prompt_tokens} prompt tokens: {prefiller.now:.3f} s alone")
        runs = {
            "idle": measure_streams(options, decoder, None, 0, 1),
            "prefill and decode apart": measure_streams(
                options, decoder, prefiller, options.long_prompts, 2
            ),
            "both on one replica": measure_streams(options, decoder, None, options.long_prompts, 3),
        }
        stats = decoder.engine.stats()
        for replica in (decoder, prefiller):
            replica.engine.close()
    ratios = {}
    idle = quantile(runs["idle"][0], 0.99)
    print(
        "| | tokens | p50 | p99 | max | p99 / idle | first token |\n|---|---|---|---|---|---|---|"
    )
    for name, (latencies, first) in runs.items():
        p50, p99 = quantile(latencies, 0.5), quantile(latencies, 0.99)
        ratios[name] = p99 / idle
        shown = f"{statistics.median(first):.2f} s" if first else ""
        print(
            f"| {name} | {len(latencies)} | {1e3 * p50:.1f} ms | {1e3 * p99:.1f} ms "
            f"| {1e3 * max(latencies):.1f} ms | {p99 / idle:.2f} | {shown} |"
        )
    print(json.dumps({name: stats[name] for name in stats if name.startswith("kv_transfer")}))
    return int(ratios["prefill and decode apart"] > 1.2)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-prompts", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="of --long-prompts; on cuda: wall time")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--interval", type=float, default=1.25, help="between long prompts, in their prefill times"
    )
    options = parser.parse_args()
    if options.long_prompts:
        return compare_long_prompts(options)
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
