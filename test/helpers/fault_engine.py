"""The engine process of the test servers (`server_helpers`): the product's own, with a model that
has no weights and does what a fault file says."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from engine_fakes import FakeAdapter

from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput
from llaisys.models.base import AdapterOptions

FAULT_FILE = "LLAISYS_TEST_FAULT_FILE"
STEP_SECONDS = "LLAISYS_TEST_STEP_SECONDS"
CONTEXT = 2048


class FaultAdapter(FakeAdapter):
    """`FakeAdapter` that does what the fault file says: `raise`, `raise once`, `hang`, `exit`,
    `wait` for as long as it says so, `prefill N`: wait where a prompt is not complete, `steps COUNT
    N`: wait after so many. What it is waiting for then stands in the file `*.held`. `load DONE
    TOTAL`: stand there with loading. See `server_helpers.Gate`."""

    max_len = CONTEXT
    _steps_order = ""
    _steps_left = 0

    @classmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> FakeAdapter:
        while (fault := cls.fault()).startswith("load"):
            _, done, total = fault.split()
            report("loading weights", int(done), int(total))
            time.sleep(0.002)
        return super().load(checkpoint, options)

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        pause = float(os.environ.get(STEP_SECONDS, "0"))
        if pause:
            time.sleep(pause)
        halves = len(set(step.seq_ids.tolist())) > int(step.logits_mask.sum())
        held = ""
        while (
            (fault := self.fault()) == "wait"
            or (halves and fault.startswith("prefill"))
            or (fault.startswith("steps") and not self._may_step(fault))
        ):
            if held and fault != held:
                break  # another order: for the next step
            held = fault
            Path(os.environ[FAULT_FILE] + ".held").write_text(held)
            time.sleep(0.002)
        if fault == "raise once":
            Path(os.environ[FAULT_FILE]).unlink()
        if fault.startswith("raise"):
            raise RuntimeError("secret detail at 0x7f00deadbeef in /root/model")
        if fault == "hang":
            time.sleep(3600)
        if fault == "exit":
            os._exit(17)
        return super().forward(step, attention)

    def _may_step(self, order: str) -> bool:
        if order != self._steps_order:
            self._steps_order, self._steps_left = order, int(order.split()[1])
        self._steps_left -= 1
        return self._steps_left >= 0

    @staticmethod
    def fault() -> str:
        name = os.environ.get(FAULT_FILE)
        if not name or not os.path.exists(name):
            return ""
        with contextlib.suppress(FileNotFoundError):
            return Path(name).read_text()
        return ""


def main() -> None:
    from llaisys.common.model_registry import MODEL_REGISTRY
    from llaisys.server.engine_client import process as engine_process

    MODEL_REGISTRY["mock"] = "fault_engine:FaultAdapter"
    engine_process.main()


if __name__ == "__main__":
    main()
