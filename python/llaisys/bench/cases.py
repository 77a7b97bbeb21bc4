"""`llaisys bench ops`: times the operators, looks at the machine's limits all along, and sets the
one against the other at the end."""

from __future__ import annotations

from collections.abc import Callable

from llaisys.bench.machine import Machine, measure_machine, probe_again
from llaisys.bench.ops import LINEAR_SHAPES, Result, Timing, time_ops
from llaisys.common.validation import check_choice
from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.types import QUANTISED_DTYPES

DTYPES = ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_k", "i4_g128"]  # unless others are asked for
KNOWN = [*DTYPES[:3], *QUANTISED_DTYPES]


def run(
    threads: int,
    models: list[str] | None,
    dtypes: list[str] | None,
    quick: bool,
    progress: Callable[[str], None],
) -> tuple[Machine, list[Result]]:
    """Everything that was chosen; `progress` hears what is being timed."""
    chosen_models = models or list(LINEAR_SHAPES)
    chosen_dtypes = dtypes or DTYPES
    for name, chosen, known in (
        ("model", chosen_models, list(LINEAR_SHAPES)),
        ("dtype", chosen_dtypes, KNOWN),
    ):
        for value in chosen:
            check_choice(name, value, known)
    with Stream(n_threads=threads) as stream:
        machine = measure_machine(stream)
        timings: list[Timing] = []
        for timing in time_ops(stream, chosen_models, chosen_dtypes, quick):
            if not timings or timing.shape != timings[-1].shape:
                progress(f"{timing.op} {timing.dtype} {timing.shape}")
                machine = probe_again(machine, stream)
            timings.append(timing)
    return machine, [timing.against(machine) for timing in timings]
