"""GGUF: equal to the gguf library on valid files, a load error on every invalid one."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import model_files
import numpy as np
import pytest
from quick_gguf import quick_gguf

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import check_coverage
from llaisys.models.loading.convert import f32_to_bf16
from llaisys.models.loading.gguf_file import dequantize, unpermute_rows
from llaisys.models.loading.gguf_reader import GGML_TYPES, read_gguf_header
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.tokenization import Tokenizer

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "TQ2_0", "MXFP4"])
def test_tensors_equal_gguf_library(tmp_path: Path, arch: str, kind: str) -> None:
    path = tmp_path / "m.gguf"
    config = model_files.tiny_config(arch, **WIDE)
    weights = model_files.write_gguf(path, config, kind=kind)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.names()) == set(weights)
        for name, values in weights.items():
            tensor = stored[model_files.gguf_name(name)]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
            permuted = arch == "llama" and (".q_proj." in name or ".k_proj." in name)
            if permuted:
                expected = unpermute_rows(expected, 4 if ".q_proj." in name else 2)
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
            np.testing.assert_array_equal(checkpoint.read(name, "bf16"), f32_to_bf16(expected))
            if kind == "F32":
                np.testing.assert_array_equal(expected, values)
            record = checkpoint.record(name)
            plain = tensor.tensor_type.name in ("F32", "F16", "BF16")
            assert (record is not None) == (plain and not permuted)
            if record is not None:
                raw = path.read_bytes()[record.offset : record.offset + record.nbytes]
                assert raw == checkpoint.read(name, record.dtype).tobytes()


def test_every_ggml_type_is_dequantised() -> None:
    rng = np.random.default_rng(0)
    done = []
    for name, block, size in GGML_TYPES.values():
        data = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
        qtype = gguf.GGMLQuantizationType[name]
        assert gguf.GGML_QUANT_SIZES[qtype] == (block, size)
        try:
            with np.errstate(all="ignore"):
                expected = gguf.dequantize(data, qtype)
        except NotImplementedError:
            continue
        found = dequantize(data.reshape(-1), name, (3, 2 * block))
        np.testing.assert_array_equal(found, expected.reshape(3, 2 * block))
        done.append(name)
    assert len(done) >= 24


def test_unpermute_inverts_the_converter() -> None:
    for heads, dim in ((1, 2), (3, 8), (5, 14)):
        values = np.arange(heads * dim * 3, dtype=np.float32).reshape(heads * dim, 3)
        permuted = model_files.permute_rows(values, heads)
        np.testing.assert_array_equal(unpermute_rows(permuted, heads), values)
        if dim > 2:
            assert not np.array_equal(permuted, values)


def test_default_model_equals_transformers() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    path = resolve_model(DEFAULT_MODEL, progress=False)
    started = time.process_time()
    with open_checkpoint(path) as checkpoint:
        opened = time.process_time() - started
        config = checkpoint.config
        assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (30, 576, 3)
        assert config.tie_word_embeddings and config.rope_theta == 100000.0
        with quick_gguf():
            stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
        processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"model.layers.7.self_attn.{part}.weight"
            raw = stored[model_files.gguf_name(name)]
            values = gguf.dequantize(raw.data, raw.tensor_type)
            expected = processor.process(values, model_files.gguf_name(name)).weights
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
    assert opened < 2.0


def test_tokenizer_and_template_from_metadata(tmp_path: Path) -> None:
    model_files.write_gguf(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.eos_token_ids == (2,) and checkpoint.config.vocab_size == 320
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids[0] == 1 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode_tokens(ids) == "user\nhello\nassistant\n"


def value(kind: int, data: bytes) -> bytes:
    return struct.pack("<I", kind) + data


def text(content: bytes | str) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def u32(number: int) -> bytes:
    return value(4, struct.pack("<I", number))


def tensor_info(name: str = "a", dims: Any = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", d) for d in dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def raw_gguf(
    path: Path,
    keys: dict[bytes, bytes] | list[tuple[bytes, bytes]] = {},  # noqa: B006
    infos: Any = (),
    data: int = 0,
    **header: Any,
) -> Path:
    """A GGUF file with arbitrary, possibly invalid fields."""
    pairs = list(keys.items()) if isinstance(keys, dict) else keys
    out = header.get("magic", b"GGUF") + struct.pack("<I", header.get("version", 3))
    out += struct.pack("<Q", header.get("num_tensors", len(infos)))
    out += struct.pack("<Q", header.get("num_keys", len(pairs)))
    out += b"".join(text(key) + item for key, item in pairs) + b"".join(infos)
    path.write_bytes(out + bytes(-len(out) % 32) + bytes(data))
    return path


BIG = (1 << 63) + 5
BAD_FILES: list[tuple[str, dict[str, Any]]] = [
    ("magic", {"magic": b"GGML"}),
    ("version 1 ", {"version": 1}),
    ("big-endian", {"version": 3 << 24}),
    ("version 4", {"version": 4}),
    ("tensor count", {"num_tensors": BIG}),
    ("tensor count", {"num_tensors": 70_000, "data": 1 << 22}),
    ("metadata count", {"num_keys": BIG}),
    ("metadata count", {"num_keys": 70_000, "data": 1 << 22}),
    ("end past the file", {"num_keys": 2, "keys": {b"a" * 24: u32(1)}}),
    ("given twice", {"keys": [(b"a", u32(1)), (b"a", u32(2))]}),
    ("empty key", {"keys": {b"": u32(1)}}),
    ("not UTF-8", {"keys": {b"\xff\xfe": u32(1)}}),
    ("not UTF-8", {"keys": {b"a": value(8, text(b"\xc3"))}}),
    ("unknown value type 13", {"keys": {b"a": value(13, b"")}}),
    ("string of", {"keys": {b"a": value(8, struct.pack("<Q", BIG))}}),
    ("end past the file", {"keys": {b"a": value(8, struct.pack("<Q", 4096))}}),
    ("boolean with value 2", {"keys": {b"a": value(7, b"\2")}}),
    ("nested array", {"keys": {b"a": value(9, struct.pack("<IQ", 9, 1))}}),
    ("array of unknown type 77", {"keys": {b"a": value(9, struct.pack("<IQ", 77, 1))}}),
    ("does not fit", {"keys": {b"a": value(9, struct.pack("<IQ", 4, BIG))}}),
    ("does not fit", {"keys": {b"a": value(9, struct.pack("<IQ", 12, 1 << 40))}}),
    ("does not fit", {"keys": {b"a": value(9, struct.pack("<IQ", 8, 1 << 40))}}),
    ("value above 1", {"keys": {b"a": value(9, struct.pack("<IQ", 7, 1) + b"\3")}}),
    ("general.alignment", {"keys": {b"general.alignment": u32(0)}}),
    ("general.alignment", {"keys": {b"general.alignment": u32(13)}}),
    ("general.alignment", {"keys": {b"general.alignment": u32(1 << 31)}}),
    ("general.alignment", {"keys": {b"general.alignment": value(8, text("32"))}}),
    ("0 dimensions", {"infos": [tensor_info(dims=())], "data": 128}),
    ("5 dimensions", {"infos": [tensor_info(dims=(1,) * 5)], "data": 128}),
    ("empty or too large", {"infos": [tensor_info(dims=(0,))], "data": 128}),
    ("empty or too large", {"infos": [tensor_info(dims=(BIG,))], "data": 128}),
    ("empty or too large", {"infos": [tensor_info(dims=(1 << 40, 1 << 40))], "data": 128}),
    ("unknown tensor type 4", {"infos": [tensor_info(kind=4)], "data": 128}),
    ("unknown tensor type 999", {"infos": [tensor_info(kind=999)], "data": 128}),
    ("not a multiple of Q4_0's 32", {"infos": [tensor_info(dims=(33,), kind=2)], "data": 128}),
    ("not a multiple of 32", {"infos": [tensor_info(offset=8)], "data": 256}),
    ("past the file's", {"infos": [tensor_info(offset=32)], "data": 128}),
    ("past the file's", {"infos": [tensor_info(offset=(1 << 64) - 32)], "data": 128}),
    ("past the file's", {"infos": [tensor_info()], "data": 64}),
    ("given twice", {"infos": [tensor_info(), tensor_info(offset=128)], "data": 256}),
    ("overlap", {"infos": [tensor_info(), tensor_info("b", offset=64)], "data": 256}),
    ("string of 300 bytes", {"infos": [tensor_info("n" * 300)], "data": 128}),
    ("general.architecture is missing", {}),
    ("unknown architecture 'x'", {"keys": {b"general.architecture": value(8, text("x"))}}),
    ("must be a string", {"keys": {b"general.architecture": u32(1)}}),
]


@pytest.mark.parametrize(("message", "parts"), BAD_FILES)
def test_invalid_gguf_field_is_rejected(
    tmp_path: Path, message: str, parts: dict[str, Any]
) -> None:
    path = raw_gguf(tmp_path / "m.gguf", **parts)
    started = time.process_time()
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)
    assert time.process_time() - started < 0.5


def tiny_file(path: Path) -> bytes:
    config = model_files.tiny_config("llama", num_hidden_layers=1, hidden_size=32, vocab_size=264)
    model_files.write_gguf(path, config, kind="Q8_0")
    return path.read_bytes()


def open_or_reject(path: Path, data: bytes) -> float:
    """CPU seconds to open the file (with tokenizer) or to raise ModelLoadError."""
    path.write_bytes(data)
    started = time.process_time()
    try:
        with open_checkpoint(path) as checkpoint:
            check_coverage(checkpoint)
            for name in checkpoint.names()[:3]:
                checkpoint.read(name, "f32")
            Tokenizer.from_source(checkpoint.tokenizer_source)
    except ModelLoadError:
        pass
    return time.process_time() - started


def test_truncated_gguf_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    good = tiny_file(path)
    for length in range(0, len(good), 64):
        path.write_bytes(good[:length])
        with pytest.raises(ModelLoadError):
            open_checkpoint(path)


def test_damaged_files_raise_only_load_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    good = tiny_file(path)
    header = min(t.offset for t in read_gguf_header(path).tensors.values())
    rng = random.Random(1)
    slowest = 0.0
    for _ in range(800):
        data = bytearray(good)
        at = rng.randrange(header)
        if rng.random() < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        else:
            word = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1, 4, 9])
            size = rng.choice([1, 4, 8])
            data[at : at + size] = (word & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        slowest = max(slowest, open_or_reject(path, bytes(data)))
    assert slowest < 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": 10**6}, "llama.block_count is 1000000; it must be"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads are not a multiple of 3"),
        ({"llama.embedding_length": 66}, "66 is not a multiple of 4"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.block_count": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"llama.feed_forward_length": 100}, "has shape [96, 64], the config requires [100, 64]"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            "'model.layers.0.mlp.gate.weight' is missing",
        ),
        ({"tokenizer.ggml.eos_token_id": 320}, "tokenizer.ggml.eos_token_id is 320"),
    ],
)
def test_inconsistent_metadata_is_named(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    path = tmp_path / "m.gguf"
    model_files.write_gguf(path)
    data = path.read_bytes()
    for key, number in changes.items():
        old = text(key)
        if old in data:
            at = data.index(old) + len(old) + 4
            data = data[:at] + struct.pack("<I", number) + data[at + 4 :]
        else:  # rename another key of the same length, so that no offset changes
            spare = text("general.architecture") + value(8, text("llama"))
            new = spare + old + u32(number)
            data = data.replace(spare, new, 1)
            count = struct.unpack_from("<Q", data, 16)[0] + 1
            data = data[:16] + struct.pack("<Q", count) + data[24:]
            data += bytes(64)
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        check_coverage(open_checkpoint(path))
    assert message in str(caught.value)
