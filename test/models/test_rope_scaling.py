"""RoPE scaling against transformers: frequencies and logits, from config.json and GGUF, and context
shift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from error_helpers import naming
from reference_models import (
    Piece,
    Tiny,
    make_reference,
    opened,
    random_tokens,
    reference_logits,
    run_slot,
    save,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llaisys.common.errors import LlaisysError, ModelLoadError
from llaisys.models.families import open_checkpoint, parse_config
from llaisys.models.families.decoder import GgufFields
from llaisys.models.families.rope import (
    GivenRopeScaling,
    LinearRopeScaling,
    RopeScaling,
    YarnRopeScaling,
    rope_from_gguf,
)

ORIGINAL = 32
TOLERANCE = 2e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn-attention": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn-mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7},
    "yarn-not-truncated": {**YARN, "truncate": False, "beta_fast": 3.0},
    "llama3": LLAMA3,
}


def context_of(scheme: dict[str, Any]) -> int:
    """max_position_embeddings: the scaled context in llama3 configs, the original one in others."""
    return 8 * ORIGINAL if scheme["rope_type"] == "llama3" else ORIGINAL


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in SCHEMES), ("qwen2", "yarn"), ("qwen3", "yarn")]
)
def test_logits_at_three_times_the_context_equal_transformers(
    kind: str, name: str, tmp_path: Path
) -> None:
    scheme = SCHEMES[name]
    length = 3 * ORIGINAL
    factor = 4.0 if name == "dynamic" else scheme["factor"]  # allows the length
    tiny = Tiny(
        kind=kind,
        head_dim=18,
        layers=2,
        context=context_of(scheme),
        rope={**scheme, "factor": factor},
    )
    model = make_reference(tiny)
    save(model, tmp_path)
    tokens = random_tokens(length, tiny.vocab)
    with opened(tmp_path, kv_cache_layout="slot", max_model_len=length) as adapter:
        ours = run_slot(adapter, [Piece(0, tokens)])
    assert np.abs(ours - reference_logits(model, tokens)).max() < TOLERANCE


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCHEMES)
def test_rope_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    scheme = SCHEMES[name] | {"rope_theta": theta}
    if "original_max_position_embeddings" in scheme:
        scheme["original_max_position_embeddings"] = 8192
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    theirs = LlamaConfig(**sizes, max_position_embeddings=8192, rope_parameters=dict(scheme))
    kind, length = scheme["rope_type"], 12000
    inv_freq, attention = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    config = parse_config(
        model_files.tiny_config(
            "llama", **sizes, max_position_embeddings=8192, rope_theta=None, rope_parameters=scheme
        )
    )
    divisors = np.array(config.rope_scaling.divisors(config.rope_theta, head_dim, length))
    plain = theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    np.testing.assert_allclose(plain / divisors, inv_freq.numpy(), rtol=2e-6)
    assert config.rope_scaling.attention_factor == pytest.approx(attention, rel=1e-12)
    assert divisors.max() > 1.0


def test_context_limits_of_rope_scaling(tmp_path: Path) -> None:
    def contexts(scheme: dict[str, Any], **changes: Any) -> tuple[int, int]:
        config = parse_config(model_files.tiny_config(rope_scaling=scheme, **changes))
        return config.max_position_embeddings, config.longest_context

    assert contexts({"type": "default"}) == (512, 512)
    assert contexts({"type": "linear", "factor": 2.5}) == (512, 1280)
    assert contexts({"type": "dynamic", "factor": 2}) == (512, 1024)
    assert contexts({"type": "yarn", "factor": 4}) == (2048, 2048)
    stretched = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert contexts(stretched) == (512, 512)
    assert contexts({"type": "yarn", "original_max_position_embeddings": 128}) == (512, 512)
    assert contexts(LLAMA3) == (512, 512)
    # original_max_position_embeddings outside the section takes precedence.
    outside = parse_config(
        model_files.tiny_config(rope_scaling=stretched, original_max_position_embeddings=256)
    )
    assert outside.rope_scaling.original_max_position_embeddings == 256

    scheme = {"type": "dynamic", "factor": 2}
    model_files.write_hf_model(tmp_path, model_files.tiny_config(rope_scaling=scheme))
    with opened(tmp_path) as adapter:
        assert adapter.max_model_len == 512
    with opened(tmp_path, max_model_len=1024) as adapter:
        assert adapter.max_model_len == 1024
    with (
        naming(LlaisysError, "max_model_len"),
        opened(tmp_path, max_model_len=1025),
    ):
        pass


@pytest.mark.parametrize("name", ["yarn-attention", "dynamic", "llama3"])
def test_shifted_keys_equal_recomputed_keys(name: str, tmp_path: Path) -> None:
    """In a model of one layer only the position of a key depends on earlier tokens: after the first
    tokens are removed and keys are shifted, results equal those of the remaining text."""
    scheme = SCHEMES[name]
    config = model_files.tiny_config(
        num_hidden_layers=1, max_position_embeddings=context_of(scheme), rope_theta=None,
        rope_parameters={"rope_theta": 1e4, **scheme},
    )  # fmt: skip
    model_files.write_hf_model(tmp_path, config)
    dropped, total = 17, 2 * ORIGINAL
    tokens = random_tokens(total, config["vocab_size"])
    with opened(tmp_path, kv_cache_layout="slot", max_model_len=total) as adapter:
        run_slot(adapter, [Piece(0, tokens[:-1])])
        adapter.native.call("KvSeqRm", 0, 0, dropped)
        adapter.native.call("KvSeqAdd", 0, dropped, -1, -dropped)
        moved = run_slot(adapter, [Piece(0, tokens[-1:], total - 1 - dropped)])
        adapter.native.call("KvSeqRm", 0, -1, -1)
        fresh = run_slot(adapter, [Piece(1, tokens[dropped:])])
    assert np.abs(moved[0] - fresh[-1]).max() < 1e-5
    assert np.abs(fresh[-1] - fresh[-2]).max() > 1e-2


# -- GGUF -----------------------------------------------------------------------------------------


def of_gguf(**keys: Any) -> Any:
    values = {f"llama.rope.scaling.{name}": value for name, value in keys.items()}
    return scaling_of({"llama.context_length": 512, **values})


def scaling_of(metadata: dict[str, Any]) -> RopeScaling | None:
    fields = GgufFields(metadata, "f", "llama")
    return rope_from_gguf(fields, 16, True, lambda name, shape: None)[1]


def test_rope_scaling_from_gguf_metadata() -> None:
    assert of_gguf() is None and of_gguf(type="linear") is None
    assert of_gguf(type="linear", factor=4.0) == LinearRopeScaling(4.0)
    assert scaling_of({"llama.rope.scale_linear": 2.0}) == LinearRopeScaling(2.0)
    attention = 1 + 0.1 * float(np.log(4.0))
    assert of_gguf(type="yarn", factor=4.0) == YarnRopeScaling(4.0, 512, attention)
    found = of_gguf(
        type="yarn", factor=4.0, original_context_length=128, attn_factor=0.5, yarn_beta_fast=16.0,
        yarn_beta_slow=2.0, yarn_ext_factor=1.0,
    )  # fmt: skip
    assert found == YarnRopeScaling(4.0, 128, 0.5 * attention, 16.0, 2.0)
    for keys, words in (
        ({"type": "longrope"}, "'longrope' is not supported; known: none, linear, yarn"),
        ({"type": "yarn", "factor": 0.5}, "factor is 0.5"),
        ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"type": "yarn", "yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"type": "yarn", "yarn_beta_fast": 0.5}, "beta_fast is 0.5, below beta_slow 1.0"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            of_gguf(**keys)


def test_rope_freqs_tensor_gives_divisors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = model_files.tiny_config("llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    model_files.write_gguf(path, config, extra={"rope_freqs.weight": factors})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling == GivenRopeScaling(tuple(factors.tolist()))
    model_files.write_gguf(path, config, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling is None
    for bad in (0.0, -1.0, np.nan, np.inf):
        values = np.array([1, 1, bad, 1, 1, 1, 1, 1], np.float32)
        model_files.write_gguf(path, config, extra={"rope_freqs.weight": values})
        with naming(ModelLoadError, "rope_freqs.weight"):
            open_checkpoint(path)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    model_files.write_gguf(path, config, extra={"rope_freqs.weight": factors}, metadata=linear)
    with naming(ModelLoadError, "rope_freqs"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_gguf_logits_equal_those_of_the_directory(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    config = model_files.tiny_config(
        "llama", max_position_embeddings=context_of(scheme), rope_scaling=scheme
    )
    model_files.write_hf_model(tmp_path / "hf", config)
    extra, metadata = {}, {}
    if name == "llama3":
        divisors = parse_config(config).rope_scaling.divisors(1e4, 16, 0)
        extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    else:
        metadata = {
            "llama.rope.scaling.type": name, "llama.rope.scaling.factor": scheme["factor"],
            "llama.rope.scaling.original_context_length": ORIGINAL,
        }  # fmt: skip
    model_files.write_gguf(tmp_path / "m.gguf", config, extra=extra, metadata=metadata)
    tokens = random_tokens(3 * ORIGINAL, config["vocab_size"])
    found = []
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        with opened(path, kv_cache_layout="slot", max_model_len=len(tokens)) as adapter:
            found.append(run_slot(adapter, [Piece(0, tokens)]))
    np.testing.assert_array_equal(found[0], found[1])
