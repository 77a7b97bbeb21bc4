"""Time per stage of a worker's steps."""

import time
from collections.abc import Mapping
from typing import Any

STAGES = (
    "prepare_step_inputs",
    "build_attention_metadata",
    "run_model_forward",
    "sample",
    "postprocess",
)


class Timer:
    """Accumulates the seconds of its `with` blocks, which must not be nested."""

    __slots__ = ("_start", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


class StageTimers:
    """A timer per stage, one for the time inside the model, and the number of steps. With a draft
    model or head there is one more stage, "draft"."""

    def __init__(self) -> None:
        self._timers = {stage: Timer() for stage in STAGES}
        self.native = Timer()
        self.num_steps = 0

    def add(self, stage: str) -> None:
        self._timers[stage] = Timer()

    def __getitem__(self, stage: str) -> Timer:
        return self._timers[stage]

    def report(self, native: Mapping[str, tuple[float, int]], reset: bool) -> dict[str, Any]:
        """Return seconds per stage and inside the model since the last reset. `native`: (seconds,
        count) per native stage; they appear as "native_..." in `stages` and `counts` and are parts
        of run_model_forward and sample."""
        own = {stage: timer.seconds for stage, timer in self._timers.items()}
        result = {
            "steps": self.num_steps,
            "native_seconds": self.native.seconds,
            "stages": own | {f"native_{stage}": seconds for stage, (seconds, _) in native.items()},
            "counts": {f"native_{stage}": count for stage, (_, count) in native.items()},
        }
        if reset:
            for timer in (*self._timers.values(), self.native):
                timer.seconds = 0.0
            self.num_steps = 0
        return result
