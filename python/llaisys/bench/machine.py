"""What this machine can do at most, measured by the library's own probes."""

from __future__ import annotations

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
        i8=max(machine.i8, stream.probe("i8")),
    )


def print_machine(machine: Machine) -> None:
    print(f"{machine.cpu}, {machine.threads} threads, {machine.isa} kernels")
    print(f"  read       {machine.read_bandwidth / 1e9:8.1f} GB/s")
    for name, value in (("f32", machine.f32), ("f16", machine.f16), ("int8", machine.i8)):
        print(f"  {name:9s} {value / 1e9:9.1f} GOP/s" if value else f"  {name:9s}      none")
    print(f"  an empty parallel region {machine.parallel_region * 1e6:.2f} us")


# "CPU part" of Arm's own designs ("CPU implementer" 0x41), which have no name in /proc/cpuinfo.
_ARM_PARTS = {
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3",
    "0xd8e": "Neoverse-N3",
}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return cpu_name_of(file.read())
    except OSError:
        return platform.machine()


def cpu_name_of(cpuinfo: str) -> str:
    """The processor's name out of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" in facts:
        return facts["model name"]
    maker, part = facts.get("CPU implementer"), facts.get("CPU part")
    if maker is None or part is None:
        return platform.machine()
    known = _ARM_PARTS.get(part) if maker == "0x41" else None
    return known or f"{platform.machine()} implementer {maker} part {part}"
