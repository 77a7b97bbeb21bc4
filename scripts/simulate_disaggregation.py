"""Simulate prefill and decode on different GPU replicas (`serve --prefill-replicas`).

    python scripts/simulate_disaggregation.py [--replicas 4] [--seconds 300] [--seed 0]

Requests arrive at random: chats with short prompts and documents with long ones. Every replica runs
steps. A step decodes its running sequences and computes up to CHUNK prompt tokens; a decode replica
restores up to RESTORED received tokens instead. The time of a step follows from the bytes it reads
and the operations of its prompt tokens (see GPUS). The roles are those of
`engine_client.replicas.disaggregation`. The table shows the latency between tokens, compared with
streams on the decode replicas beside which prompts cost nothing, and the time to first token.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field, replace

from llaisys.engine.core import MAX_RESTORED_TOKENS
from llaisys.server.engine_client.replicas.disaggregation import Disaggregation

CHUNK = 2_048  # max_num_batched_tokens
MIN_CHUNK = 64  # min_prefill_chunk
PREFILL_CHUNK = 8_192  # of a replica without streams
RESTORED = MAX_RESTORED_TOKENS["cuda"]
THRESHOLDS = (512, 64)
SYNC_SECONDS = 1.0e-3  # of a step that restores: the queue of steps is empty before and after it
LONG_SHARE = 0.25
SHORT, LONG, ANSWER = (200, 0.7), (8_000, 0.5), (250, 0.6)  # (median, sigma), log-normal


@dataclass(frozen=True)
class Gpu:
    """Seconds and bytes of one replica."""

    name: str
    step: float  # a decode step without context: weights over memory bandwidth, launches
    context: float  # per token of context of a decoded sequence: its KV bytes over bandwidth
    prompt: float  # per prompt token: operations over the arithmetic rate
    attention: float  # per prompt token and token of context before it
    restored: float  # per token, from host memory, in a step
    moved: float  # per token, to host memory and between host memories, beside steps


# H200: 3.6 TB/s and 500 Tflop/s achieved, 41 GB/s between GPU and host memory (measured),
# 10 GB/s between host memories.
GPUS = [
    Gpu("Qwen2.5 7B, one H200", 5.2e-3, 16e-9, 31e-6, 0.8e-9, 1.4e-6, 7.1e-6),
    Gpu("Llama 70B, four H200", 12e-3, 23e-9, 79e-6, 1.3e-9, 2.0e-6, 35e-6),
]


@dataclass
class Request:
    arrival: float
    prompt: int
    answer: int
    computed: int = 0
    last: float = -1.0  # time of the last token; -1: none
    done: int = 0


@dataclass
class Received:
    """A prompt in host memory."""

    request: Request
    left: int  # tokens


@dataclass
class Replica:
    gpu: Gpu
    index: int
    chunk: int
    prompts: deque[Request] = field(default_factory=deque)  # to be computed
    received: deque[Received] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    busy: bool = False

    @property
    def load(self) -> float:
        waiting = sum(request.prompt - request.computed for request in self.prompts)
        return waiting + 4 * sum(request.answer - request.done for request in self.running)

    def has_work(self) -> bool:
        return bool(self.prompts or self.received or self.running)


class Simulation:
    def __init__(self, gpu: Gpu, count: int, roles: Disaggregation, seed: int) -> None:
        self.gpu = gpu
        self.roles = roles
        self.replicas = [
            Replica(gpu, index, PREFILL_CHUNK if index < roles.num_prefill else CHUNK)
            for index in range(count)
        ]
        self.events: list[tuple[float, int, object]] = []
        self.count = 0
        self.latencies: list[float] = []
        self.first: list[float] = []
        self.rng = random.Random(seed)

    def push(self, when: float, item: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, item))

    def run(self, rate: float, seconds: float) -> None:
        now = 0.0
        while (now := now + self.rng.expovariate(rate)) < seconds:
            lengths = LONG if self.rng.random() < LONG_SHARE else SHORT
            self.push(now, Request(now, self._length(lengths), self._length(ANSWER)))
        while self.events:
            now, _, item = heapq.heappop(self.events)
            if isinstance(item, Request):
                self._arrive(now, item)
            elif isinstance(item, Replica):
                self._end_step(now, item)
            elif isinstance(item, tuple):
                request, replica = item
                replica.received.append(Received(request, request.prompt))
                self._start_step(now, replica)

    def _length(self, kind: tuple[float, float]) -> int:
        return max(1, min(32_000, int(self.rng.lognormvariate(0, kind[1]) * kind[0])))

    def _arrive(self, now: float, request: Request) -> None:
        everyone = range(len(self.replicas))
        decoders = self.roles.decoders(everyone)
        replica = min((self.replicas[i] for i in decoders), key=lambda r: (r.load, r.index))
        others = self.roles.prefillers(everyone, replica.index)
        if others and request.prompt >= self.roles.threshold:
            replica = min((self.replicas[i] for i in others), key=lambda r: (r.load, r.index))
        replica.prompts.append(request)
        self._start_step(now, replica)

    def _start_step(self, now: float, replica: Replica) -> None:
        if replica.busy or not replica.has_work():
            return
        gpu, seconds = self.gpu, 0.0
        if replica.running:
            context = sum(request.prompt + request.done for request in replica.running)
            seconds = gpu.step + gpu.context * context
        left = replica.chunk
        for number, request in enumerate(replica.prompts, 1):
            part = left if number == len(replica.prompts) else max(left // 2, MIN_CHUNK)
            count = min(left, part, request.prompt - request.computed)
            seconds += count * (gpu.prompt + gpu.attention * (request.computed + count / 2))
            request.computed += count
            left -= count
            if not left:
                break
        if replica.received:
            received = replica.received[0]
            part = min(RESTORED, received.left) if replica.running else received.left
            received.left -= part
            seconds += SYNC_SECONDS + part * gpu.restored
        replica.busy = True
        self.push(now + max(seconds, gpu.step), replica)

    def _end_step(self, now: float, replica: Replica) -> None:
        replica.busy = False
        for request in replica.running:
            self._token(now, request)
        replica.running = [r for r in replica.running if r.done < r.answer]
        if replica.received and not replica.received[0].left:
            replica.running.append(replica.received.popleft().request)
        done = [request for request in replica.prompts if request.computed >= request.prompt]
        for request in done:
            replica.prompts.remove(request)
            self._prefilled(now, replica, request)
        self._start_step(now, replica)

    def _prefilled(self, now: float, replica: Replica, request: Request) -> None:
        if replica.index >= self.roles.num_prefill:
            self._token(now, request)
            replica.running.append(request)
            return
        decoders = self.roles.decoders(range(len(self.replicas)))
        target = min((self.replicas[i] for i in decoders), key=lambda r: (r.load, r.index))
        self.push(now + request.prompt * self.gpu.moved, (request, target))

    def _token(self, now: float, request: Request) -> None:
        if request.last >= 0:
            self.latencies.append(now - request.last)
        else:
            self.first.append(now - request.arrival)
        request.last = now
        request.done += 1


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--load", type=float, default=0.35, help="of the prefill capacity of all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| | between tokens, p50 | p99 | p99 / idle | first token, p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for gpu in GPUS:
        tokens = LONG_SHARE * 1.13 * LONG[0] + (1 - LONG_SHARE) * 1.28 * SHORT[0]
        rate = options.load * options.replicas / (tokens * gpu.prompt)
        idle, half = 0.0, options.replicas // 2
        runs = {
            f"streams alone on {half}": (
                replace(gpu, prompt=0.0, attention=0.0),
                Disaggregation(0, 1),
            ),
            "prefill and decode together": (gpu, Disaggregation(0, 1)),
        }
        for threshold in THRESHOLDS:
            roles = Disaggregation(half, threshold)
            runs[f"{half} of {options.replicas} prefill from {threshold} tokens on"] = (gpu, roles)
        for name, (modelled, roles) in runs.items():
            count = half if modelled is not gpu else options.replicas
            run = Simulation(modelled, count, roles, options.seed)
            run.run(rate, options.seconds)
            p50, p99 = quantile(run.latencies, 0.5), quantile(run.latencies, 0.99)
            idle = idle or p99
            print(
                f"| {gpu.name}, {name} | {1e3 * p50:.1f} ms | {1e3 * p99:.1f} ms "
                f"| {p99 / idle:.2f} | {quantile(run.first, 0.5):.2f} s "
                f"| {quantile(run.first, 0.99):.2f} s |"
            )


if __name__ == "__main__":
    main()
