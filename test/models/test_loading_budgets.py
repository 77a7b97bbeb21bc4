"""Limits of time and memory to open or reject a model file, by class of file."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_files
import pytest
from error_helpers import naming

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import open_checkpoint
from llaisys.models.loading import gguf_reader
from llaisys.models.loading.gguf_reader import read_gguf_header
from llaisys.tokenization import Tokenizer

MIB = 1 << 20
FLAGS = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}


@contextmanager
def budget(seconds: float, mib: float) -> Iterator[None]:
    """Python allocations including numpy, and CPU time."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < seconds
    assert peak < mib


def change_tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("special", [False, True])
def test_28000_added_tokens_load_in_seconds(tmp_path: Path, special: bool) -> None:
    """Speech models have that many; adding them one by one would take minutes."""
    count = 28_000

    def change(state: dict[str, Any]) -> None:
        state["added_tokens"] += [
            {"id": 259 + i, "content": f"<|{i / 100:.2f}|>", "special": special, **FLAGS}
            for i in range(count)
        ]

    model_files.write_tiny_tokenizer(tmp_path)
    change_tokenizer(tmp_path, change)
    started = time.process_time()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert time.process_time() - started < 15
    name = "<|27.99|>"
    assert tokenizer.token_id(name) == 259 + 2799
    ids = tokenizer.encode(name)
    assert (ids == [259 + 2799]) is not special
    assert tokenizer.decode_tokens(ids, skip_special_tokens=False) == name


def added_tokens(count: int, chars: int) -> list[dict[str, Any]]:
    """Distinct contents without common prefixes: the most expensive ones."""
    return [
        {"id": 259 + i, "content": f"{i * 2654435761 % 2**32:0{chars}x}"[::-1], "special": True,
         **FLAGS}
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "chars"), [(20_000, 8), (600, 1_000)])
def test_added_tokens_load_in_time_linear_in_their_length(
    tmp_path: Path, count: int, chars: int
) -> None:
    seconds = []
    for share in (4, 1):
        model_files.write_tiny_tokenizer(tmp_path)
        many = added_tokens(count // share, chars)
        change_tokenizer(tmp_path, lambda state, many=many: state["added_tokens"].extend(many))
        started = time.process_time()
        Tokenizer.from_directory(tmp_path)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 8 * seconds[0], seconds  # quadratic would be 16


@pytest.mark.parametrize(("count", "chars"), [(140_000, 8), (5_000, 1_000)])
def test_added_tokens_beyond_the_limits_are_rejected_at_once(
    tmp_path: Path, count: int, chars: int
) -> None:
    model_files.write_tiny_tokenizer(tmp_path)
    many = added_tokens(count, chars)
    change_tokenizer(tmp_path, lambda state: state["added_tokens"].extend(many))
    started = time.process_time()
    with naming(ModelLoadError, "added tokens"):
        Tokenizer.from_directory(tmp_path)
    assert time.process_time() - started < 3


def test_control_tokens_of_a_gguf_file_load_in_seconds(tmp_path: Path) -> None:
    tokens = [f"<|c{i}|>" for i in range(20_000)]

    def add(writer: Any, config: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*model_files.byte_alphabet(), "!!", *tokens])
        writer.add_token_types([1] * 257 + [3] * len(tokens))
        writer.add_token_merges(["! !"])

    config = model_files.tiny_config("llama", vocab_size=257 + len(tokens), hidden_size=32)
    path = tmp_path / "m.gguf"
    model_files.write_gguf(path, config, add_tokenizer=add)
    started = time.process_time()
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    assert time.process_time() - started < 15
    assert tokenizer.token_id("<|c19999|>") == 257 + 19_999


RULE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
ANY = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 9}
EXPANDING: dict[str, tuple[str, Any]] = {
    "replace": ("normalizer", {"type": "Sequence", "normalizers": [RULE] * 8}),
    "empty regex": ("normalizer", {"type": "Sequence", "normalizers": [ANY] * 3}),
    "nested": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [RULE, RULE]}]},
    ),
    "prepend": ("normalizer", {"type": "Prepend", "prepend": "a" * 100}),
    "decompositions": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 9}),
    "decoder": ("decoder", {"type": "Sequence", "decoders": [RULE] * 8}),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_expanding_tokenizer_rules_are_rejected(tmp_path: Path, name: str) -> None:
    part, rules = EXPANDING[name]
    model_files.write_tiny_tokenizer(tmp_path)
    change_tokenizer(tmp_path, lambda state: state.update({part: rules}))
    with (
        budget(1.0, 64),
        naming(ModelLoadError, part),
    ):
        Tokenizer.from_directory(tmp_path)


def test_common_tokenizer_rules_are_accepted(tmp_path: Path) -> None:
    usual = [
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
    ]
    model_files.write_tiny_tokenizer(tmp_path)
    change_tokenizer(
        tmp_path, lambda s: s.update(normalizer={"type": "Sequence", "normalizers": usual})
    )
    assert Tokenizer.from_directory(tmp_path).encode("a  b")


def gguf_header(path: Path, *values: bytes) -> Path:
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for number, value in enumerate(values):
        key = f"k{number}".encode()
        out += struct.pack("<Q", len(key)) + key + value
    path.write_bytes(out)
    return path


def test_numeric_arrays_use_their_size_in_memory(tmp_path: Path) -> None:
    """Python integers would cost 40 times as much."""
    one = struct.pack("<IIQ", 9, 1, 8 * MIB) + bytes(range(128, 256)) * (8 * MIB // 128)
    path = gguf_header(tmp_path / "m.gguf", *[one] * 8)
    with budget(5.0, 200):
        header = read_gguf_header(path)
    assert header.metadata["k7"][-1] == -1 and len(header.metadata["k0"]) == 8 * MIB


def test_string_limit_applies_to_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_reader, "MAX_STRINGS", 1000)
    half = struct.pack("<IIQ", 9, 8, 501) + bytes(8 * 501)
    path = gguf_header(tmp_path / "m.gguf", half, half)
    with naming(ModelLoadError, "'k1'"):
        read_gguf_header(path)


@pytest.mark.parametrize("gib", [6, 1024])
def test_rope_factors_of_the_wrong_shape_are_never_read(tmp_path: Path, gib: int) -> None:
    """The file is sparse: it has the size in its header and no data."""
    elements = (gib << 30) // 4
    name = b"rope_freqs.weight"
    good = tmp_path / "good.gguf"
    model_files.write_gguf(good)
    data = good.read_bytes()
    header = read_gguf_header(good)
    start = min(t.offset for t in header.tensors.values())
    # One more tensor, after the data of all others.
    end = max(t.offset + t.nbytes for t in header.tensors.values())
    offset = -(-(end - start) // 32) * 32 + 64
    row = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, elements, 0, offset)
    count = struct.unpack_from("<Q", data, 8)[0] + 1
    last = struct.pack("<Q", max(t.offset for t in header.tensors.values()) - start)
    table_end = data[:start].rindex(last) + 8
    head = data[:8] + struct.pack("<Q", count) + data[16:table_end] + row
    head += bytes(-len(head) % 32)
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(head + data[start:])
        try:
            file.truncate(len(head) + offset + elements * 4)
        except OSError:
            pytest.skip(f"the file system holds no file of {gib} GiB")
    with budget(2.0, 64), naming(ModelLoadError, "rope_freqs.weight"):
        open_checkpoint(path)


LINKED_FILES = {
    "model.safetensors": "",
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.json": "",
    "tokenizer_config.json": "{}",
    "config.json": "",
}


@pytest.mark.parametrize("name", LINKED_FILES)
def test_link_outside_the_directory_is_rejected(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    model_files.write_hf_model(model)
    path = model / name
    secret = tmp_path / "elsewhere"
    secret.write_bytes(path.read_bytes() if path.is_file() else LINKED_FILES[name].encode())
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    with naming(ModelLoadError, name):
        open_checkpoint(model)
        Tokenizer.from_directory(model)
    inside = model / "other"
    path.unlink()
    secret.rename(inside)
    path.symlink_to("other")
    open_checkpoint(model).close()
    Tokenizer.from_directory(model)


def test_gguf_link_out_of_a_directory_is_rejected(tmp_path: Path) -> None:
    file, model = tmp_path / "m.gguf", tmp_path / "model"
    model_files.write_gguf(file, model_files.tiny_config("llama"))
    model.mkdir()
    (model / "m.gguf").symlink_to(file)
    with naming(ModelLoadError, "m.gguf"):
        open_checkpoint(model)
    open_checkpoint(file).close()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "m.gguf"])
def test_error_about_another_kind_of_file_shows_no_content(tmp_path: Path, name: str) -> None:
    model_files.write_hf_model(tmp_path)
    if name == "m.gguf":
        (tmp_path / "config.json").unlink()
    (tmp_path / name).write_text("hunter2!secret token: abcdef\n" * 20)
    with pytest.raises(ModelLoadError) as error:
        open_checkpoint(tmp_path)
        Tokenizer.from_directory(tmp_path)
    shown = [str(int.from_bytes(b"hunter2!", order)) for order in ("little", "big")]
    for part in ("hunter", "secret", "abcdef", *shown):
        assert part not in str(error.value)


def test_links_of_the_hub_cache_are_accepted(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    model_files.write_hf_model(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"blob{number}")
        path.symlink_to(Path("../../blobs") / f"blob{number}")
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.read("model.norm.weight", "f32").size == 64
        Tokenizer.from_source(checkpoint.tokenizer_source)
