"""Profile of steps in the native library."""

from __future__ import annotations

import ctypes
import time

import numpy as np
from native_helpers import MockModel

from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import STAGES, LlaisysProfile

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_stages_are_counted_without_overlap() -> None:
    with MockModel(max_batch_tokens=3) as model:
        assert all(getattr(model.profile(), stage).count == 0 for stage in STAGES)
        start = time.perf_counter()
        model.run(TOKENS)
        model.sample_rows(0)
        elapsed = time.perf_counter() - start
        profile = model.profile()
        assert (profile.prepare.count, profile.sample.count) == (1, 1)
        assert (profile.attn_meta.count, profile.forward.count) == (
            3,
            3,
        )  # micro-batches of 3, 3 and 2
        assert profile.memcpy.count > 3
        assert (profile.collective.count, profile.collective.seconds) == (0, 0)  # one rank
        seconds = [getattr(profile, s).seconds for s in STAGES if s != "collective"]
        assert min(seconds) > 0 and sum(seconds) < elapsed


def test_reset_returns_the_profile_and_clears_it() -> None:
    with MockModel() as model:
        model.run(TOKENS)
        counted = model.profile(reset=True)
        assert counted.forward.count == 1
        again = model.profile()
        assert all(getattr(again, stage).seconds == 0 for stage in STAGES)
        assert again.struct_size == ctypes.sizeof(LlaisysProfile)


def test_rejected_step_counts_only_prepare() -> None:
    with MockModel() as model:
        assert model.try_step([-1]) == -1
        assert (model.profile().prepare.count, model.profile().forward.count) == (1, 0)
        assert np.isfinite(model.run(TOKENS)).all()
        assert model.profile().forward.count == 1


def test_wrong_struct_size_and_null_are_rejected() -> None:
    with MockModel() as model:
        profile = lib().llaisysModelProfile
        wrong = LlaisysProfile(struct_size=8)
        assert profile(model.handle, ctypes.byref(wrong), 0) == -1
        assert b"profile.struct_size must be 104, got 8" in lib().llaisysLastError()
        assert profile(model.handle, None, 0) == -1
        wrong.struct_size = ctypes.sizeof(wrong)
        assert profile(None, ctypes.byref(wrong), 0) == -1
