"""A custom model type that is not a decoder: its own config, tensor names and forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import gguf
import model_files
import numpy as np
import pytest
from error_helpers import naming

from llaisys import LLM, SamplingParams
from llaisys.common import model_registry
from llaisys.common.errors import ModelLoadError
from llaisys.common.model_registry import register_model
from llaisys.common.step import ModelStepInput
from llaisys.libllaisys.handles import dtype_code
from llaisys.libllaisys.types import LlaisysDecoderMeta
from llaisys.models import families
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import check_coverage
from llaisys.models.loading.family import CheckpointConfig, Family
from llaisys.models.loading.fields import Fields
from llaisys.models.mock import MockAdapter, MockShape
from llaisys.models.native import NativeAdapter
from llaisys.models.tensors import tensor_from

SHAPE = MockShape(vocab_size=40, heads=2, kv_heads=1, head_dim=6, seed=3)
CONFIG = {"model_type": "toy", "n_heads": 2, "head_width": 6, "n_words": 40, "reach": 512}
TABLE = "toy.table"


@dataclass(frozen=True, slots=True)
class ToyConfig(CheckpointConfig):
    heads: int
    head_dim: int


class ToyFamily(Family):
    name = "toy"

    def config_from_json(self, fields: Fields, generation: Fields) -> ToyConfig:
        words = fields.integer("n_words", 1, 1000)
        return ToyConfig(
            model_type=self.name,
            vocab_size=words,
            max_position_embeddings=fields.integer("reach", 1, 4096),
            eos_token_ids=generation.id_list("eos_token_id", words),
            dtype="auto",
            generation={},
            heads=fields.integer("n_heads", 1, 8),
            head_dim=fields.integer("head_width", 2, 64),
        )

    def tensors(self, config: ToyConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield TABLE, (config.vocab_size, config.heads * config.head_dim)


class ToyAdapter(NativeAdapter):
    """The forward of the mock model with a table from a file."""

    @classmethod
    def kv_bytes_per_token(cls, checkpoint: Any, options: AdapterOptions) -> int:
        return 2 * checkpoint.config.head_dim * 4

    @classmethod
    def _create(cls, checkpoint: Any, options: AdapterOptions) -> Self:
        check_coverage(checkpoint)
        config = checkpoint.config
        meta = LlaisysDecoderMeta(
            dtype=dtype_code("f32"), nlayer=1, hs=config.heads * config.head_dim, nh=config.heads,
            nkvh=1, dh=config.head_dim, di=1, maxseq=config.max_position_embeddings,
            voc=config.vocab_size, epsilon=1e-6, theta=10000.0, end_token=-1,
        )  # fmt: skip
        adapter = cls("mock", meta, options)
        adapter.eos_token_ids = config.eos_token_ids
        return adapter

    def _fill(self, checkpoint: Any, options: AdapterOptions, check: Callable[[], None]) -> None:
        with tensor_from(checkpoint.read(TABLE, "f32"), "f32") as tensor:
            self.native.replace_weight("in_embed", 0, tensor)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(model_registry.MODEL_REGISTRY)
    monkeypatch.setattr(model_registry, "MODEL_REGISTRY", registry)
    register_model("toy", f"{__name__}:ToyAdapter")
    monkeypatch.setitem(families.FAMILIES, "toy", ToyFamily())


def write_toy(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    model_files.write_safetensors(directory / "model.safetensors", {TABLE: SHAPE.table()})
    return directory


def mock_tokens(tokens: list[int], count: int) -> list[int]:
    """Tokens that the mock model with the same table samples, recomputing the whole sequence."""
    prompt = len(tokens)
    while len(tokens) < prompt + count:
        with MockAdapter.load(SHAPE, AdapterOptions(kv_cache_layout="slot")) as model:
            ids = np.asarray(tokens, np.int64)
            places, owner = np.arange(len(ids)), np.zeros(len(ids), np.int64)
            model.forward(ModelStepInput(ids, places, owner, np.ones(len(ids), np.int8)), None)
            tokens = [*tokens, int(model.logits()[-1].argmax())]
    return tokens[prompt:]


def test_custom_forward_generates(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(write_toy(tmp_path), num_kv_blocks=8) as llm:
        assert llm.model_info.model_type == "toy" and llm.model_info.vocab_size == 40
        (found,) = llm.generate([[1, 2, 3]], params)
    assert found.token_ids == mock_tokens([1, 2, 3], 6)


def test_custom_config_and_tensors_are_checked(tmp_path: Path) -> None:
    with naming(ModelLoadError, "n_heads"):
        open_checkpoint(write_toy(tmp_path, n_heads=9))
    with (
        open_checkpoint(write_toy(tmp_path, n_words=41)) as checkpoint,
        naming(ModelLoadError, "'toy.table'", "[40, 12]", "[41, 12]"),
    ):
        check_coverage(checkpoint)


def test_dtype_is_the_most_common_of_the_matrices(tmp_path: Path) -> None:
    write_toy(tmp_path)
    model_files.write_safetensors(tmp_path / "model.safetensors", {TABLE: SHAPE.table()}, "bf16")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.dtype == "bf16"


@pytest.mark.parametrize("name", ["toy", "mistral"])
def test_family_without_gguf_support_rejects_gguf(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with naming(ModelLoadError, f"m.gguf: {name}"):
        open_checkpoint(path)
