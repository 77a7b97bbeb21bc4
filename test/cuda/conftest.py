"""Tests that need a GPU; skipped without one or without libllaisys_cuda.

The CPU is the reference for many of them, without AMX, which rounds activations to bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llaisys.common.errors import LlaisysError
from llaisys.libllaisys.handles import Stream
from llaisys.libllaisys.library import choose_library, lib
from llaisys.libllaisys.types import DEVICE_NVIDIA

os.environ["LLAISYS_CPU_AMX"] = "off"  # read by the first GEMM


def why_not() -> str | None:
    try:
        choose_library("cuda")
    except LlaisysError as error:
        return str(error)
    count = lib().llaisysDeviceCount(DEVICE_NVIDIA)
    return None if count else "needs an NVIDIA GPU"


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def streams() -> Iterator[dict[str, Stream]]:
    with Stream("cpu", n_threads=4) as cpu, Stream("cuda") as cuda:
        yield {"cpu": cpu, "cuda": cuda}
