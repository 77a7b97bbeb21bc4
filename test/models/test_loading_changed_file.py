"""A model file that is truncated or overwritten: an error during the load, nothing afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import model_files
import numpy as np
import pytest

from llaisys.common.errors import ModelLoadError
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.sampling import SamplingParams
from llaisys.entrypoints.llm import LLM
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.loading import file_range
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.file_range import FileIdentity, read_rows
from llaisys.models.loading.gguf_file import unpermute_rows

OPTIONS = AdapterOptions(max_model_len=32, n_threads=1, kv_cache_layout="slot")


def truncate(path: Path) -> None:
    os.truncate(path, 4096)


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


def write_model(directory: Path, kind: str) -> Path:
    """The file with the weights."""
    if kind == "gguf":
        model_files.write_gguf(directory / "m.gguf", kind="Q8_0")
        return directory / "m.gguf"
    model_files.write_hf_model(directory, model_files.tiny_config())
    return directory / "model.safetensors"


class ChangingCheckpoint:
    """A checkpoint whose file changes when the n-th tensor is read."""

    def __init__(self, checkpoint: Checkpoint, at: int, meddle: Callable[[], None]) -> None:
        self.checkpoint, self.at, self.meddle = checkpoint, at, meddle
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def _count(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            self.meddle()

    def record(self, name: str) -> Any:
        self._count()
        return self.checkpoint.record(name)

    def read(self, name: str, dtype: str) -> Any:
        self._count()
        return self.checkpoint.read(name, dtype)


@pytest.mark.parametrize("meddle", [truncate, overwrite])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_file_change_during_load_is_an_error(
    tmp_path: Path, kind: str, meddle: Callable[[Path], None]
) -> None:
    for at in (1, 2, 3, 9, 20):
        path = write_model(tmp_path, kind)
        with (
            open_checkpoint(tmp_path) as checkpoint,
            pytest.raises(ModelLoadError, match=r"changed while it was being loaded"),
        ):
            adapter_class = get_adapter_class(checkpoint.config.model_type)
            meddled = ChangingCheckpoint(checkpoint, at, lambda path=path: meddle(path))  # type: ignore[misc]
            adapter_class.load(meddled, OPTIONS).close()


@pytest.mark.parametrize("meddle", [truncate, overwrite])
@pytest.mark.parametrize("stride", [0, 3000])
def test_file_change_within_a_tensor_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int, meddle: Callable[[Path], None]
) -> None:
    """The file changes between two reads of one tensor, or after the last read."""
    path, width = tmp_path / "weights", 2000
    read, asked = os.preadv, 0

    def meddling(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal asked
        count = read(descriptor, buffers, offset)
        asked += 1
        if asked == at:
            meddle(path)
        return count

    monkeypatch.setattr(file_range, "MAX_READ", 1000)
    monkeypatch.setattr(file_range.os, "preadv", meddling)
    for at in (1, 3, 6, 0):
        path.write_bytes(b"x" * 10_000)
        os.utime(path, ns=(1, 1))
        with path.open("rb") as file:
            expected = FileIdentity.of(file.fileno())
        asked = 0
        into = memoryview(bytearray(3 * width))
        if at == 0:
            read_rows(path, 0, width, stride, into, expected)
            assert bytes(into) == b"x" * len(into) and asked == 6
            continue
        with pytest.raises(ModelLoadError, match="changed while it was being loaded"):
            read_rows(path, 0, width, stride, into, expected)


def test_adjacent_rows_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer have hundreds of thousands of short rows."""
    path, width = tmp_path / "weights", 24
    path.write_bytes(bytes(range(240)))
    read, asked = os.preadv, 0

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal asked
        asked += 1
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(file_range.os, "preadv", counted)
    with path.open("rb") as file:
        expected = FileIdentity.of(file.fileno())
    for stride, reads in ((width, 1), (width + 6, 4)):
        asked, into = 0, memoryview(bytearray(4 * width))
        read_rows(path, 7, width, stride, into, expected)
        rows = [bytes(range(7 + i * stride, 7 + i * stride + width)) for i in range(4)]
        assert bytes(into) == b"".join(rows) and asked == reads


@pytest.mark.parametrize("meddle", [truncate, overwrite, os.remove])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loaded_model_does_not_need_its_file(
    tmp_path: Path, kind: str, meddle: Callable[[Path], None]
) -> None:
    path = write_model(tmp_path, kind)
    with LLM(str(tmp_path), max_model_len=64, warmup=False, num_kv_blocks=16) as llm:
        prompt = list(range(3, 40))
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        before = llm.generate([prompt], greedy)[0].outputs[0].token_ids
        meddle(path)
        prompt = [*prompt[::-1], 100]  # rows of the table that were not used before
        after = llm.generate([prompt], greedy)[0].outputs[0].token_ids
        assert len(before) == len(after) == 8
        name = str(path)
        assert all(name not in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_read_blocks_returns_the_file_contents(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    model_files.write_gguf(path, kind=kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read_blocks("model.norm.weight") is None
        for part, heads in (("self_attn.q_proj", 4), ("self_attn.k_proj", 2), ("mlp.up_proj", 0)):
            name = f"model.layers.1.{part}.weight"
            blocks = checkpoint.read_blocks(name)
            assert blocks is not None and blocks.type_name == kind
            assert blocks.shape == checkpoint.shape(name)
            tensor = stored[model_files.gguf_name(name)]
            sizes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            assert (blocks.block_elements, blocks.block_bytes) == sizes
            expected = tensor.data.reshape(blocks.shape[0], -1)
            if heads:
                expected = unpermute_rows(expected, heads)
            np.testing.assert_array_equal(blocks.rows, expected)
