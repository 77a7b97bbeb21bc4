"""Sets `llaisys bench ops` up: the machine first, then the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llaisys.bench.machine import measure_machine, print_machine
from llaisys.bench.ops import LINEAR_SHAPES, Result, run_ops
from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import Stream

DTYPES = ["f32", "bf16", "f16"]


def run(
    threads: int,
    models: list[str] | None,
    dtypes: list[str] | None,
    quick: bool,
    report: Callable[[Result], None] | None,
) -> dict[str, Any]:
    """{"machine": limits, "results": [...]}; `report` sees each result as it comes."""
    chosen_models = models or list(LINEAR_SHAPES)
    chosen_dtypes = dtypes or DTYPES
    for name, chosen, known in (
        ("--model", chosen_models, list(LINEAR_SHAPES)),
        ("--dtype", chosen_dtypes, DTYPES),
    ):
        for value in chosen:
            if value not in known:
                raise InvalidInputError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    with Stream(n_threads=threads) as stream:
        machine = measure_machine(stream)
        if report is not None:
            print_machine(machine)
        results = run_ops(
            stream, machine, chosen_models, chosen_dtypes, quick, report or (lambda result: None)
        )
    return {"machine": machine.as_json(), "results": results}
