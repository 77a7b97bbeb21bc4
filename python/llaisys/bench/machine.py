"""Hardware limits of this machine, measured by the library's probes."""

import platform
from dataclasses import dataclass, replace

from llaisys.bench.target import BenchTarget
from llaisys.libllaisys.handles import Stream, describe_devices
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import QUANTISED_DTYPES


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU limits with `threads` threads; 0: no such instruction."""

    cpu: str
    isa: str
    threads: int
    read_bandwidth: float  # bytes/s
    f32: float  # operations/s, a multiply-add is two
    f16: float
    i8: float  # with AMX where kernels use it
    bf16: float  # with AMX where kernels use it
    parallel_region: float  # seconds per empty parallel region

    def peak_of(self, op: str, dtype: str) -> tuple[float, str]:
        """(operations/s with weights of this dtype, name of the unit for 1e9 of them)."""
        if dtype in QUANTISED_DTYPES and self.i8 > 0:
            return self.i8, "GOP/s"
        is_tiled = op == "linear" and dtype == "bf16" and self.bf16 > 0
        return self.bf16 if is_tiled else self.f32, "GFLOP/s"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Limits of a GPU, timed by CUDA events."""

    gpu: str
    read_bandwidth: float  # bytes/s
    f32: float  # operations/s, a multiply-add is two
    bf16: float  # of a large GEMM; 0: without cuBLASLt

    def peak_of(self, op: str, dtype: str) -> tuple[float, str]:
        return self.bf16 if dtype in ("bf16", "f16") and self.bf16 > 0 else self.f32, "GFLOP/s"


Limits = Machine | Gpu  # that kernels are compared with


def measure(target: BenchTarget) -> Limits:
    stream = target.stream
    if target.device != "cpu":
        return Gpu(
            gpu=describe_devices(target.device)[0],
            read_bandwidth=stream.probe("read_bandwidth"),
            f32=stream.probe("f32"),
            bf16=stream.probe("f16"),
        )
    return Machine(
        cpu=_cpu_name(),
        isa=lib().llaisysCpuIsa().decode(),
        threads=stream.n_threads,
        **{name: stream.probe(name) for name in ("read_bandwidth", "f32", "f16", "i8", "bf16")},
        parallel_region=min(stream.parallel_region_seconds(10_000) for _ in range(5)) / 10_000,
    )


def probe_again(machine: Limits, stream: Stream) -> Limits:
    """Probe again and keep the maximum of each limit.

    Other load on a shared machine makes a probe read low. A GPU is not shared and not probed again.
    """
    if isinstance(machine, Gpu):
        return machine
    names = ("read_bandwidth", "f32", "i8", "bf16")
    return replace(machine, **{n: max(getattr(machine, n), stream.probe(n)) for n in names})


def describe_machine(machine: Limits) -> str:
    """The limits, one per line."""
    if isinstance(machine, Gpu):
        lines = [machine.gpu]
        rates = [("f32", machine.f32), ("bf16", machine.bf16)]
    else:
        lines = [f"{machine.cpu}, {machine.threads} threads, {machine.isa} kernels"]
        rates = [("f32", machine.f32), ("f16", machine.f16)]
        rates += [("bf16", machine.bf16), ("int8", machine.i8)]
    lines.append(f"  read       {machine.read_bandwidth / 1e9:8.1f} GB/s")
    for name, value in rates:
        rate = f"{value / 1e9:9.1f} GOP/s" if value else "     none"
        lines.append(f"  {name:9s} {rate}")
    if isinstance(machine, Machine):
        lines.append(f"  an empty parallel region {machine.parallel_region * 1e6:.2f} us")
    return "\n".join(lines)


# "CPU part" of Arm's designs ("CPU implementer" 0x41); /proc/cpuinfo has no name for them.
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
    """The CPU name from the text of /proc/cpuinfo."""
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
