"""FP8 directories: scales per tensor, row and block, values equal to the definition of e4m3, and
errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fp8_files import BLOCK, CONFIG, Q_PROJ, SECTIONS, write_fp8
from gguf_blocks import e4m3_values

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_dtype
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.convert import Array
from llaisys.models.loading.shard import Shard

DOWN = "model.layers.1.mlp.down_proj"


def values_of(rows: Array, shape: tuple[int, ...]) -> Array:
    blocks = rows.reshape(shape[0], -1, 132)
    scales = blocks[:, :, :4].copy().view("<f4")
    return np.asarray(e4m3_values()[blocks[:, :, 4:]] * scales, np.float32).reshape(shape)


@pytest.mark.parametrize("kind", SECTIONS)
def test_values_and_blocks_are_exact(kind: str, tmp_path: Path) -> None:
    worth = write_fp8(tmp_path, kind)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, expected in worth.items():
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
            blocks = checkpoint.read_blocks(name)
            assert (blocks is None) == ("proj.weight" not in name)
            if blocks is not None:
                assert checkpoint.block_type(name) == blocks.type_name == "F8_G128"
                np.testing.assert_array_equal(values_of(blocks.rows, blocks.shape), expected)
        for part in (Shard(0, 32, 96), Shard(1, 128, 256)):
            blocks = checkpoint.read_blocks(DOWN + ".weight", part)
            assert blocks is not None
            expected = worth[DOWN + ".weight"][part.index()]
            np.testing.assert_array_equal(values_of(blocks.rows, blocks.shape), expected)
        assert checkpoint.read_blocks(DOWN + ".weight", Shard(1, 0, 96)) is None
        name = Q_PROJ + ".weight"
        assert weight_dtype(checkpoint, name, AdapterOptions(device="cuda")) == "f8_g128"
        assert weight_dtype(checkpoint, name, AdapterOptions()) == "f32"  # widened on the CPU


def test_cpu_runs_the_widened_model(tmp_path: Path) -> None:
    write_fp8(tmp_path, "fp8 block")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(tmp_path, device="cpu") as llm:
        assert len(llm.generate([[5, 9, 200, 31]], params)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "fp8 block",
            {"weight_scale_inv": np.ones((1, 2), "<f4")},
            r"q_proj.weight_scale_inv' is f32 of shape \[1, 2\]; .* shape \[2, 2\]",
        ),
        (
            "compressed channel",
            {"weight_scale": np.ones((255, 1), "<f4")},
            r"q_proj.weight_scale' is f32 of shape \[255, 1\]; .* shape \[256, 1\]",
        ),
        (
            "compressed channel",
            {"weight_scale": np.full((256, 1), np.nan, "<f4")},
            r"q_proj.weight': a scale is not finite",
        ),
        (
            "fp8 tensor",
            {"weight": np.full((256, 256), 127, np.uint8)},
            r"q_proj.weight': a value is NaN",
        ),
        (
            "fp8 tensor",
            {"weight": np.ones((256, 256), "<f4")},
            r"q_proj.weight' is f32 of shape \[256, 256\]; the config requires F8_E4M3",
        ),
    ],
)
def test_inconsistent_tensors_are_named(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_fp8(tmp_path, kind, **changes)
    with pytest.raises(ModelLoadError, match=words), LLM(tmp_path, device="cpu"):
        pass


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (BLOCK | {"weight_block_size": [128, 96]}, "columns must be a multiple of 128"),
        (BLOCK | {"weight_block_size": [128]}, "expected rows and columns of a block"),
        (BLOCK | {"fmt": "e5m2"}, "only 'e4m3' is supported"),
    ],
)
def test_unsupported_schemes_are_rejected_before_loading(
    section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": section}))
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(tmp_path)
