"""The GGUF header reader: correct values at every offset, linear memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llaisys.models.loading import gguf_reader
from llaisys.models.loading.gguf_reader import GgufHeader, read_gguf_header

BOUNDARIES = [1 << 20, 2 << 20, 4 << 20]
SCALARS: dict[str, tuple[int, str, Any]] = {
    **{"u8": (0, "<B", 200), "i8": (1, "<b", -5), "u16": (2, "<H", 60000), "i16": (3, "<h", -300)},
    **{"u32": (4, "<I", 4_000_000_000), "i32": (5, "<i", -70000), "f32": (6, "<f", 1.5)},
    **{"bool": (7, "<B", True), "u64": (10, "<Q", 1 << 60), "i64": (11, "<q", -(1 << 40))},
    **{"f64": (12, "<d", 0.1)},
}


def text(content: str) -> bytes:
    raw = content.encode()
    return struct.pack("<Q", len(raw)) + raw


def fields() -> dict[str, tuple[bytes, Any]]:
    """One metadata entry of every kind: its bytes and its value."""
    entries: dict[str, tuple[bytes, Any]] = {}
    for name, (kind, code, value) in SCALARS.items():
        packed = struct.pack(code, value)
        entries[name] = text(f"k.{name}") + struct.pack("<I", kind) + packed, value
        many = struct.pack("<IIQ", 9, kind, 5) + packed * 5
        entries[f"{name}[]"] = text(f"k.{name}[]") + many, [value] * 5
    entries["string"] = text("k.string") + struct.pack("<I", 8) + text("wörter"), "wörter"
    items = ["", "a", "日本語", "x" * 40, "é"]
    packed = b"".join(map(text, items))
    entries["string[]"] = text("k.string[]") + struct.pack("<IIQ", 9, 8, 5) + packed, items
    return entries


FIELDS = fields()


def padding(size: int) -> bytes:
    """A metadata entry of exactly `size` bytes."""
    head = text("pad") + struct.pack("<I", 8)
    return head + struct.pack("<Q", size - len(head) - 8) + b"p" * (size - len(head) - 8)


def tensor_row(name: str) -> bytes:
    return text(name) + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)


def write(path: Path, start: int, name: str) -> Path:
    """A file whose field `name` (or tensor row) starts at byte `start`."""
    entry = FIELDS[name][0] if name in FIELDS else b""
    keys = [padding(start - 24), entry] if entry else [padding(start - 24)]
    out = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensor_row("t.weight")
    path.write_bytes(out + bytes(-len(out) % 32) + bytes(32))
    return path


def check(header: GgufHeader, path: Path, name: str) -> None:
    if name in FIELDS:
        found, expected = header.metadata[f"k.{name}"], FIELDS[name][1]
        assert (list(found) if isinstance(expected, list) else found) == expected
    tensor = header.tensors["t.weight"]
    assert (tensor.shape, tensor.offset) == ((2, 4), path.stat().st_size - 32)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("name", [*FIELDS, "tensor row"])
def test_fields_across_window_boundaries_are_read(tmp_path: Path, name: str, boundary: int) -> None:
    """The field moves over the boundary byte by byte."""
    size = len(FIELDS[name][0] if name in FIELDS else tensor_row("t.weight"))
    for before in range(0, size + 1, 1 if boundary == BOUNDARIES[0] else 5):
        path = write(tmp_path / "m.gguf", boundary - before, name)
        check(read_gguf_header(path), path, name)


@pytest.mark.parametrize("name", [*FIELDS, "tensor row"])
def test_window_size_does_not_change_results(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", 100, name)
    for size in (1, 2, 3, 7, 8, 9, 16, 31, 64, 101):
        monkeypatch.setattr(gguf_reader, "READ_BYTES", size)
        check(read_gguf_header(path), path, name)


def vocabularies(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    letters = "abcdefghij éß日本語😀"
    while True:
        yield "".join(rng.choices(letters, k=rng.choice((0, 1, 2, 3, 5, 8, 40))))


@pytest.mark.parametrize("seed", range(6))
def test_large_vocabularies_equal_gguf_library(tmp_path: Path, seed: int) -> None:
    """Random vocabularies of 0.5 to 5 MiB, written by the gguf library."""
    rng = random.Random(seed)
    words = vocabularies(seed)
    tokens = [next(words) for _ in range(rng.randrange(20_000, 200_000))]
    scores = [rng.random() for _ in tokens]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.description", "d" * rng.randrange(1 << 20))
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_tensor("t.weight", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(path)
    assert list(header.metadata["tokenizer.ggml.tokens"]) == tokens
    found = np.asarray(header.metadata["tokenizer.ggml.scores"], np.float32)
    np.testing.assert_array_equal(found, np.asarray(scores, np.float32))
    assert header.tensors["t.weight"].shape == (3, 4)
