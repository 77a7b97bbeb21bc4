"""`llaisys bench ops`: times the operators, probes the machine's limits in between, and reports
each time with its bytes and operations."""

from __future__ import annotations

from llaisys.bench.machine import Gpu, Machine, measure, probe_again
from llaisys.bench.ops import LINEAR_SHAPES, WORKLOADS, Timing, time_ops
from llaisys.bench.target import open_target
from llaisys.common.progress import report
from llaisys.common.validation import check_choice
from llaisys.libllaisys.library import choose_library
from llaisys.libllaisys.types import QUANTISED_DTYPES

_PLAIN = ["f32", "bf16", "f16"]
KNOWN = {
    "cpu": [*_PLAIN, *(dtype for dtype in QUANTISED_DTYPES if dtype != "f8_g128")],
    "cuda": [*_PLAIN, *QUANTISED_DTYPES],
}


def run(
    device: str,
    threads: int,
    models: list[str] | None,
    dtypes: list[str] | None,
    quick: bool,
) -> tuple[Machine | Gpu, list[Timing]]:
    """Run the selected cases; each is reported as progress."""
    workload = WORKLOADS[check_choice("device", device, list(WORKLOADS))]
    chosen_models = models or list(workload.models)
    chosen_dtypes = dtypes or list(workload.dtypes)
    for name, chosen, known in (
        ("model", chosen_models, list(LINEAR_SHAPES)),
        ("dtype", chosen_dtypes, KNOWN[device]),
    ):
        for value in chosen:
            check_choice(name, value, known)
    choose_library(device)
    with open_target(device, threads) as target:
        machine = measure(target)
        timings: list[Timing] = []
        for timing in time_ops(target, chosen_models, chosen_dtypes, quick):
            if not timings or timing.shape != timings[-1].shape:
                report(f"timing {timing.op} {timing.dtype} {timing.shape}")
                machine = probe_again(machine, target.stream)
            timings.append(timing)
    return machine, timings
