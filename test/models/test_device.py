"""Warning about a missing cuBLASLt."""

from __future__ import annotations

import logging

import pytest

from llaisys.models import device


@pytest.mark.parametrize("line", ["a GPU, 1 MiB", "a GPU, 1 MiB, without cuBLASLt"])
def test_missing_cublaslt_is_logged_once(
    line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "describe_devices", lambda _: [line])
    device.warn_if_cublaslt_missing.cache_clear()
    with caplog.at_level(logging.WARNING, logger="llaisys"):
        for _ in range(3):
            device.warn_if_cublaslt_missing("cuda")
            device.warn_if_cublaslt_missing("cpu")
    device.warn_if_cublaslt_missing.cache_clear()
    messages = [record.message for record in caplog.records if "cuBLASLt" in record.message]
    assert len(messages) == int(line.endswith("cuBLASLt"))
