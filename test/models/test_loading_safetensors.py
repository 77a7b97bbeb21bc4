"""safetensors directories: valid files are read, errors name the fault."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from error_helpers import naming

from llaisys.common.errors import ClosedError, ModelLoadError
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import check_coverage
from llaisys.models.loading.convert import bf16_to_f32, f32_to_bf16
from llaisys.models.loading.safetensors_dir import read_header


def header_file(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_records_locate_tensor_bytes(tmp_path: Path, dtype: str, shards: int) -> None:
    weights = model_files.write_hf_model(tmp_path, dtype=dtype, shards=shards)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(weights)
        for name, values in weights.items():
            record = checkpoint.record(name)
            assert record is not None and record.dtype == dtype and record.shape == values.shape
            raw = record.path.read_bytes()[record.offset : record.offset + record.nbytes]
            assert raw == checkpoint.read(name, dtype).tobytes()
            step = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3}[dtype]
            np.testing.assert_allclose(checkpoint.read(name, "f32"), values, rtol=step, atol=1e-6)
    with pytest.raises(ClosedError):
        checkpoint.record("model.norm.weight")


def test_metadata_has_the_keys_of_gguf_files(tmp_path: Path) -> None:
    weights = model_files.write_hf_model(tmp_path, dtype="bf16")
    with open_checkpoint(tmp_path) as checkpoint:
        found = checkpoint.metadata()
        assert found["general.parameter_count"] == sum(v.size for v in weights.values())
        assert found["general.architecture"] == "qwen2"
        assert found["qwen2.block_count"] == 2 and found["qwen2.attention.head_count_kv"] == 2
        assert checkpoint.weight_type() == checkpoint.config.dtype.upper()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dtype_of_weights_is_used_without_config_dtype(tmp_path: Path, dtype: str) -> None:
    model_files.write_hf_model(tmp_path, model_files.tiny_config(torch_dtype=None), dtype=dtype)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.dtype == dtype
    (tmp_path / "config.json").write_text(json.dumps(model_files.tiny_config(dtype="float16")))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.dtype == "f16"  # the config takes precedence


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model_files.write_hf_model(tmp_path)
    weights = model_files.tiny_weights(model_files.tiny_config())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        for name, values in weights.items():
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), values)


def test_bf16_rounding_equals_torch() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint64)
    values = np.concatenate(
        [bits.astype("<u4").view("<f4"), np.float32([0, -0.0, np.inf, -np.inf, 1.00390625, 3e38])]
    )
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert (bf16_to_f32(f32_to_bf16(values)) == expected.float().numpy()).all()
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.float32([np.nan, -np.nan])))).all()
    payload = np.array([0x7F800001, 0xFFFFFFFF], dtype="<u4").view("<f4")
    assert np.isnan(bf16_to_f32(f32_to_bf16(payload))).all()


def test_unused_tensor_of_unsupported_dtype_is_ignored(tmp_path: Path) -> None:
    path = header_file(tmp_path / "x.safetensors", {"a": entry("I64", [2], 0, 16)}, bytes(16))
    assert read_header(path)["a"].dtype == "I64"


F32 = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("header", "size", "text"),
    [
        ({"a": F32, "b": entry("F32", [2], 4, 12)}, 12, "overlaps"),
        ({"a": F32, "b": entry("F32", [2], 12, 20)}, 20, "leaves a gap"),
        ({"a": entry("F32", [2], 4, 12)}, 12, "leaves a gap"),
        ({"a": F32}, 12, "the file at"),
        ({"a": F32}, 4, "do not lie in a file"),
        ({"a": entry("F32", [3], 0, 8)}, 8, "is 12 bytes, the header gives 8"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 8)}, 8, "too large"),
        ({"a": entry("F32", [-1], 0, 8)}, 8, "shape"),
        ({"a": entry("F32", [2.0], 0, 8)}, 8, "shape"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "shape"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "do not lie"),
        ({"a": entry("F32", [2], 0, 1 << 80)}, 8, "data_offsets"),
        ({"a": entry("F33", [2], 0, 8)}, 8, "unknown dtype 'F33'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
        ({"a": [1]}, 8, "expected exactly"),
        ({"__metadata__": {"x": 1}, "a": F32}, 8, "__metadata__"),
        (
            b'{"a":' + json.dumps(F32).encode() + b',"a":' + json.dumps(F32).encode() + b"}",
            8,
            "twice",
        ),
        (b'{"a": ' + b"[" * 50_000, 0, "JSON"),
        (b"{\xff}", 0, "JSON"),
        (b"[]", 0, "not a JSON object"),
    ],
)
def test_invalid_safetensors_header_is_rejected(
    tmp_path: Path, header: Any, size: int, text: str
) -> None:
    path = header_file(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    assert text in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 20, 100_000_001, (1 << 64) - 1])
def test_excessive_header_length_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError):
        read_header(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    model_files.write_hf_model(tmp_path, shards=3)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = tmp_path / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    with naming(ModelLoadError, "model-00002-of-00003"):
        open_checkpoint(tmp_path)
    shard.write_bytes(content)
    for target in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 7, ""):
        bad = {"weight_map": {**index["weight_map"], "model.norm.weight": target}}
        index_path.write_text(json.dumps(bad))
        with naming(ModelLoadError, "model.norm.weight"):
            open_checkpoint(tmp_path)
    absent = {"weight_map": {**index["weight_map"], "model.extra": shard.name}}
    index_path.write_text(json.dumps(absent))
    with naming(ModelLoadError, "'model.extra'"):
        open_checkpoint(tmp_path)
    index_path.unlink()
    with naming(ModelLoadError, "3 safetensors"):
        open_checkpoint(tmp_path)


def test_misshaped_tensors_are_named(tmp_path: Path) -> None:
    weights = model_files.write_hf_model(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.k_proj.weight"
    model_files.write_safetensors(file, {k: v for k, v in weights.items() if k != name})
    with naming(ModelLoadError, name):
        check_coverage(open_checkpoint(tmp_path))
    model_files.write_safetensors(file, {**weights, name: weights[name].T.copy()})
    with naming(ModelLoadError, name, "[64, 32]", "[32, 64]"):
        check_coverage(open_checkpoint(tmp_path))
    model_files.write_safetensors(file, weights)
    data = file.read_bytes().replace(b'"F32"', b'"I32"')
    file.write_bytes(data)
    with naming(ModelLoadError, "I32"):
        check_coverage(open_checkpoint(tmp_path))


def test_directory_without_weights_error_lists_files(tmp_path: Path) -> None:
    with naming(ModelLoadError, "config.json"):
        check_coverage(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(model_files.tiny_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with naming(ModelLoadError, "pytorch_model.bin"):
        check_coverage(open_checkpoint(tmp_path))
    with pytest.raises(ModelLoadError):
        open_checkpoint(tmp_path / "absent")


def accepted_by_the_library(data: bytes) -> bool:
    import safetensors

    try:
        safetensors.deserialize(data)
        return True
    except Exception:
        return False


def test_damaged_files_raise_only_load_errors(tmp_path: Path) -> None:
    """Truncations and bit flips of the header; accepted files are accepted by the reference too."""
    path = tmp_path / "x.safetensors"
    tensors = {name: np.ones((2, 3), np.float32) for name in ("a", "model.norm.weight", "é")}
    model_files.write_safetensors(path, tensors)
    good = path.read_bytes()
    rng = random.Random(0)
    cases = [good[:length] for length in range(0, len(good), 3)]
    header = len(good) - 72
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        cases.append(bytes(data))
    started = time.process_time()
    for case in cases:
        path.write_bytes(case)
        try:
            read_header(path)
        except ModelLoadError:
            continue
        assert accepted_by_the_library(case), case
    assert (time.process_time() - started) / len(cases) < 0.05
