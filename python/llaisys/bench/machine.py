"""What this machine can do at most, measured by the library's own probes."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any

from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.library import lib


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits with `threads` threads; a 0 means that there is no instruction for it."""

    cpu: str
    isa: str
    threads: int
    read_bandwidth: float  # bytes/s
    f32: float  # operations/s, a multiply-add is two
    f16: float
    i8: float
    parallel_region: float  # seconds an empty parallel region takes

    def floor(self, n_bytes: float, operations: float) -> float:
        """Seconds that work on f32 arithmetic takes at least."""
        return max(n_bytes / self.read_bandwidth, operations / self.f32)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_machine(stream: Stream) -> Machine:
    return Machine(
        cpu=_cpu_name(),
        isa=lib().llaisysCpuIsa().decode(),
        threads=stream.n_threads,
        read_bandwidth=stream.probe("read_bandwidth"),
        f32=stream.probe("f32"),
        f16=stream.probe("f16"),
        i8=stream.probe("i8"),
        parallel_region=min(stream.parallel_region_seconds(10_000) for _ in range(5)) / 10_000,
    )


def probe_again(machine: Machine, stream: Stream) -> Machine:
    """The machine with what a second look at its limits finds, where that is more.

    Other work on a shared machine makes a probe read low; a limit is what was ever reached.
    """
    return replace(
        machine,
        read_bandwidth=max(machine.read_bandwidth, stream.probe("read_bandwidth")),
        f32=max(machine.f32, stream.probe("f32")),
    )


def print_machine(machine: Machine) -> None:
    print(f"{machine.cpu}, {machine.threads} threads, {machine.isa} kernels")
    print(f"  read       {machine.read_bandwidth / 1e9:8.1f} GB/s")
    for name, value in (("f32", machine.f32), ("f16", machine.f16), ("int8", machine.i8)):
        print(f"  {name:9s} {value / 1e9:9.1f} GOP/s" if value else f"  {name:9s}      none")
    print(f"  an empty parallel region {machine.parallel_region * 1e6:.2f} us")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{platform.machine()} ({os.cpu_count()} cores)"
