"""GGUF models in several files: equal to the single file, and every inconsistency is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType
from model_files import tiny_config, write_gguf

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import open_checkpoint

PARTS = 3


def split(path: Path, change: Callable[[int, dict[str, int]], None] | None = None) -> list[Path]:
    """Write the tensors of a GGUF file to PARTS files; `change(part, keys)` edits split keys."""
    reader = GGUFReader(path)
    found = []
    for part in range(PARTS):
        to = path.with_name(f"model-{part + 1:05}-of-{PARTS:05}.gguf")
        writer = GGUFWriter(to, "qwen2")
        if part == 0:
            for field in reader.fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                kind = field.types[0]
                sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type)
        keys = {"no": part, "count": PARTS, "tensors.count": len(reader.tensors)}
        if change is not None:
            change(part, keys)
        for key, value in keys.items():
            writer.add_uint32(f"split.{key}", value)
        for tensor in reader.tensors[part::PARTS]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(to)
    path.unlink()
    return found


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    weights = write_gguf(tmp_path / "whole.gguf", tiny_config("qwen2"), kind="Q8_0")
    return tmp_path / "whole.gguf", weights


def test_parts_are_one_model(whole: tuple[Path, dict[str, Any]]) -> None:
    path, weights = whole
    with open_checkpoint(path) as checkpoint:
        expected = {name: checkpoint.read(name, "f32") for name in weights}
    parts = split(path)
    for spec in (parts[0], parts[2], path.parent):
        with open_checkpoint(spec) as checkpoint:
            assert checkpoint.config.num_layers == 2
            for name, values in expected.items():
                np.testing.assert_array_equal(checkpoint.read(name, "f32"), values)
                blocks = checkpoint.read_blocks(name)
                assert (blocks is None) == (checkpoint.block_type(name) is None)


def test_missing_part_is_named(whole: tuple[Path, dict[str, Any]]) -> None:
    parts = split(whole[0])
    parts[1].unlink()
    with naming(ModelLoadError, "model-00002-of-00003.gguf"):
        open_checkpoint(parts[0])


def test_renamed_part_is_rejected(whole: tuple[Path, dict[str, Any]]) -> None:
    parts = split(whole[0])
    other = parts[0].rename(parts[0].with_name("first.gguf"))
    with naming(ModelLoadError, "3 files"):
        open_checkpoint(other)


@pytest.mark.parametrize(
    ("part", "key", "value", "words"),
    [
        (1, "no", 2, "split.no is 2 of 3; expected 1 of 3"),
        (2, "count", 4, "split.no is 2 of 4; expected 2 of 3"),
        (0, "tensors.count", 5, "tensors; expected 5"),
    ],
)
def test_inconsistent_parts_are_rejected(
    whole: tuple[Path, dict[str, Any]], part: int, key: str, value: int, words: str
) -> None:
    def change(number: int, keys: dict[str, int]) -> None:
        if number == part:
            keys[key] = value

    parts = split(whole[0], change)
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(parts[0])
