#!/usr/bin/env python3
"""CPU time of the API process per streamed token and per request, without a model.

    scripts/bench_api_process.py [--streams 256] [--rounds 4] [--new-tokens 256] [--step-ms 3]
        [--prompt-tokens 128] [--chat] [--wave 0]

`llaisys serve` with an engine process that computes nothing: every `--step-ms` it sends one token
of each running request, and prompts take 1 ms per 150 tokens. One client process keeps `--streams`
streams open, each with `--rounds` requests in turn, and only looks for the end of an answer. With
a `--step-ms` that the API process cannot follow, the tokens of several steps share a write.
`--wave`: the same load again, beside a second client that sends so many requests of one token at
once, every second.

Prints one JSON line: CPU microseconds of the API process per token (all of it, requests included)
and per write that the client received, tokens per second (`of_engine`: as a share of the engine's
own speed), milliseconds between two reads of a stream and until the first one. Measure the cost of
a request with `--new-tokens 1`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from bench_gpu_server import wait_ready, write_tokenizer

from llaisys.common.request import RequestStatus
from llaisys.common.types import ModelInfo, TokenUpdate
from llaisys.processes.channel import bind_receiver, connect_sender, encode
from llaisys.processes.heartbeat import HeartbeatSender
from llaisys.processes.startup import init_child
from llaisys.server.engine_client.messages import (
    EngineSetup,
    EngineStats,
    Finish,
    Heartbeat,
    Outputs,
    Ready,
    Submit,
    decode_to_engine,
)
from llaisys.tokenization import TokenizerSource

VOCABULARY = 1024
MAX_MODEL_LEN = 1 << 15
WAVE_SECONDS = 1.0  # between two waves
PROMPT_SPEED = 150_000  # tokens per second
FOLDER, STEP = "LLAISYS_BENCH_FOLDER", "LLAISYS_BENCH_STEP"  # environment of the engine process
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# ---- engine process ------------------------------------------------------------------------------


def run_engine(setup: EngineSetup, folder: str, step_seconds: float) -> None:
    """Answer every request with its number of tokens, one per step."""
    context: Any = zmq.Context()
    outputs = connect_sender(context, setup.output_address, 1000)
    inputs = bind_receiver(context, setup.input_address)
    beat = encode(Heartbeat(0.0, 0.0, 0))
    HeartbeatSender(context, setup.output_address, setup.heartbeat_interval, lambda: beat)
    info = ModelInfo(
        *(folder, "bench", VOCABULARY, MAX_MODEL_LEN, (0,), 1, 16),
        tokenizer_source=TokenizerSource(directory=folder),
    )
    outputs.send(encode(Ready.of(info)))
    running: dict[str, int] = {}  # tokens that a request still gets
    stats, step, due = EngineStats(), 0, time.monotonic()
    while True:
        prompts = 0
        while inputs.poll(0 if running else 1000):
            message = decode_to_engine(inputs.recv())
            if isinstance(message, Submit):
                running[message.group] = message.sampling["max_tokens"]
                prompts += len(message.prompt_token_ids)
            elif isinstance(message, Finish):
                for name in message.request_ids:
                    running.pop(name, None)
        if not running:
            continue
        due = max(due, time.monotonic()) + step_seconds + prompts / PROMPT_SPEED
        time.sleep(max(0.0, due - time.monotonic()))
        updates, now = [], time.monotonic()
        for number, (name, left) in enumerate(list(running.items())):
            token = 256 + (step + 17 * number) % (VOCABULARY - 256)
            status = RequestStatus.RUNNING
            running[name] = left - 1
            if left == 1:
                status = RequestStatus.FINISHED_LENGTH_CAPPED
                del running[name]
            updates.append(TokenUpdate(name, [token], status, scheduled_time=now))
        outputs.send(encode(Outputs(updates, stats)))
        step += 1


# ---- API process ---------------------------------------------------------------------------------


def run_server(arguments: list[str]) -> int:
    """`llaisys serve` with `run_engine`."""
    from llaisys.common.flags import OptionParser
    from llaisys.server.http_server import serve
    from llaisys.server.options import add_arguments, config_from_args

    parser = OptionParser()
    add_arguments(parser)
    config = config_from_args(parser.parse_args(arguments))
    return serve(replace(config, engine_module="bench_api_process"))


def cpu_seconds(pid: int) -> float:
    """CPU time of the living threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---- client --------------------------------------------------------------------------------------


class Stream:
    """One connection with a request at a time."""

    def __init__(self, port: int, request: bytes, rounds: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.request = request
        self.left = rounds
        self.tail = b""
        self.sent = self.last = 0.0

    def send(self) -> None:
        self.left -= 1
        self.sent, self.last = time.perf_counter(), 0.0
        self.socket.send(self.request)


def run_client(port: int, request: bytes, streams: int, rounds: int) -> dict[str, Any]:
    """Read all streams to their ends."""
    selector = selectors.EpollSelector()
    found = [Stream(port, request, rounds) for _ in range(streams)]
    gaps: deque[float] = deque()
    first: list[float] = []
    reads = 0
    for stream in found:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
        stream.send()
    while selector.get_map():
        for key, _ in selector.select():
            stream = key.data
            data = stream.socket.recv(1 << 20)
            if not data or (data.startswith(b"HTTP/1.1 ") and data[9:12] != b"200"):
                raise SystemExit(f"a request failed: {data[:500]!r}")
            now = time.perf_counter()
            reads += 1
            if stream.last:
                gaps.append(now - stream.last)
            else:
                first.append(now - stream.sent)
            stream.last = now
            stream.tail = (stream.tail + data)[-20:]
            if stream.tail.endswith(b"\r\n0\r\n\r\n"):
                stream.tail = b""
                if stream.left:
                    stream.send()
                else:
                    selector.unregister(stream.socket)
    return {"reads": reads, "gap_ms": percentiles(list(gaps)), "first_ms": percentiles(first)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {
        f"p{q}": round(1e3 * ordered[math.ceil(len(ordered) * q / 100) - 1], 2) for q in (50, 99)
    }


def request_bytes(options: argparse.Namespace, prompt_tokens: int, new_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    text = "x" * prompt_tokens
    if options.chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--wave", type=int, default=0, help="requests of one token")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        settings = {"chat_template": CHATML}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        (Path(folder) / "config.json").write_text("{}")
        os.environ[FOLDER], os.environ[STEP] = folder, str(options.step_ms / 1e3)
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = ["--model", folder, "--port", str(port), "--log-level", "warning"]
        arguments += ["--session-file", f"{folder}/sessions"]
        server = subprocess.Popen([sys.executable, __file__, "serve", *arguments])
        try:
            print(json.dumps(measure(server, port, options)), flush=True)
        finally:
            server.terminate()
            server.wait(60)
    return 0


def measure(
    server: subprocess.Popen[bytes], port: int, options: argparse.Namespace
) -> dict[str, Any]:
    wait_ready(server, f"http://127.0.0.1:{port}/health")
    request = request_bytes(options, options.prompt_tokens, options.new_tokens)
    run_client(port, request, options.streams, 1)  # warm
    cpu, start = cpu_seconds(server.pid), time.perf_counter()
    found = run_client(port, request, options.streams, options.rounds)
    seconds, cpu = time.perf_counter() - start, cpu_seconds(server.pid) - cpu
    requests = options.streams * options.rounds
    tokens = requests * options.new_tokens
    steps = options.new_tokens * options.step_ms / 1e3
    alone = steps + options.streams * options.prompt_tokens / PROMPT_SPEED
    result = {
        "streams": options.streams,
        "step_ms": options.step_ms,
        "new_tokens": options.new_tokens,
        "us_per_token": round(1e6 * cpu / tokens, 2),
        "us_per_read": round(1e6 * cpu / found["reads"], 1),
        "us_per_request": round(1e6 * cpu / requests, 1),
        "busy": round(cpu / seconds, 3),
        "tok_s": round(tokens / seconds),
        "of_engine": round(options.rounds * alone / seconds, 3),
        "tokens_per_read": round(tokens / found["reads"], 2),
        **found,
    }
    if options.wave:
        short = request_bytes(options, 1, 1)
        waves = multiprocessing.Process(target=send_waves, args=(port, short, options.wave))
        waves.start()
        try:
            beside = run_client(port, request, options.streams, options.rounds)
        finally:
            waves.kill()
        result["beside_waves"] = beside
    return result


def send_waves(port: int, request: bytes, count: int) -> None:
    while True:
        run_client(port, request, count, 1)
        time.sleep(WAVE_SECONDS)


if __name__ == "__main__":
    if FOLDER in os.environ and len(sys.argv) == 1:  # as `ChildProcess` starts it
        run_engine(init_child(EngineSetup), os.environ[FOLDER], float(os.environ[STEP]))
    sys.exit(run_server(sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main())
