"""These tests need a GPU: without one (or without libllaisys_cuda) they are skipped by name."""

from __future__ import annotations

import pytest

from llaisys.common.errors import LlaisysError
from llaisys.libllaisys.library import choose_library, lib
from llaisys.libllaisys.types import DEVICE_NVIDIA


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
