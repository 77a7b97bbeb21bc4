"""Mutated model files: each opens or raises `ModelLoadError` within its time limit.

Every kind of file is mutated as bytes (flips, words that stand for sizes, cuts, repeats) and the
JSON ones as values too. Seeds are fixed, and the number of files is bounded by a time budget.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_files
import pytest
from lora_files import Lora
from nightly import NIGHTLY
from quantised_files import Scheme, write_quantised

from llaisys.common.errors import ModelLoadError
from llaisys.common.model_registry import get_adapter_class
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint, parse_config
from llaisys.models.loading.checkpoint import check_coverage
from llaisys.models.lora import open_lora
from llaisys.tokenization import Tokenizer

SEEDS = [1, 2] if NIGHTLY else [1]
FILES = 150 if NIGHTLY else 60  # of a seed
BUDGET = 20.0  # seconds of a seed, however slow the machine is
SLOWEST = 5.0  # seconds of CPU time of one file
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 264}
WORDS = (0, 1, 2, 4, 9, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1 << 31, 1 << 64, 1e308, -1e308, "", "x", "a" * 5000),
    *([], {}, [[]] * 50, {"type": "Sequence", "normalizers": []}, "\ud800", 0.5, [1, "2", None]),
)


def mutate_bytes(data: bytes, rng: random.Random, limit: int) -> bytes:
    """Change one to three bytes or ranges among the first `limit` bytes."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(max(1, min(limit, len(out))))
        kind = rng.randrange(5)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            size = rng.choice((1, 4, 8))
            word = rng.choice(WORDS) & ((1 << 8 * size) - 1)
            out[at : at + size] = word.to_bytes(size, "little")
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = out[at : at + rng.randrange(1, 64)]
        else:
            del out[at : at + rng.randrange(1, 64)]
    return bytes(out)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of all values inside a JSON value; a few items of long arrays."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)[:40]
    elif isinstance(value, list):
        keys = list(range(len(value)))[:8]
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate_json(data: bytes, rng: random.Random, _: int) -> bytes:
    value = json.loads(data)
    for _ in range(rng.randrange(1, 3)):
        container, key = rng.choice(list(places(value)))
        kind = rng.randrange(4)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container[key], list):
            container[key] = container[key] * rng.choice((0, 2, 50))
        elif kind == 2:
            other, other_key = rng.choice(list(places(value)) or [(container, key)])
            container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = rng.choice(VALUES)
        if not any(True for _ in places(value)):
            break
    return json.dumps(value).encode()


def mutate_header(data: bytes, rng: random.Random, _: int) -> bytes:
    """Change values of a safetensors header: names, shapes, types and offsets."""
    (size,) = struct.unpack("<Q", data[:8])
    header = mutate_json(data[8 : 8 + size], rng, 0)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


BASE = model_files.tiny_config(**SIZES)  # of the adapter


def write_model(directory: Path, target: str) -> Path:
    """Write the model or the adapter of a file; "awq/config.json": of a quantised model."""
    scheme, _, target = target.rpartition("/")
    if scheme:
        write_quantised(directory, Scheme(scheme, 4, 32))
    elif target.startswith("adapter"):
        Lora(BASE).write_peft(directory)
    elif target == "m.gguf":
        config = model_files.tiny_config("llama", **SIZES)
        model_files.write_gguf(directory / target, config, kind="Q8_0")
    else:
        model_files.write_hf_model(directory, model_files.tiny_config(**SIZES))
    return directory / target


def try_model(directory: Path) -> None:
    """Load the file as a start does: header, coverage, tokenizer, weights."""
    try:
        if (directory / "adapter_model.safetensors").exists():
            for pair in open_lora(str(directory), parse_config(BASE)).pairs:
                assert pair.a.read().shape == pair.a.shape and pair.b.read().shape == pair.b.shape
            return
        with open_checkpoint(directory) as checkpoint:
            check_coverage(checkpoint)
            tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
            tokenizer.decode_tokens(tokenizer.encode("Hello <|im_start|> wörld 123"))
            adapter_class = get_adapter_class(checkpoint.config.model_type)
            length = min(16, checkpoint.config.max_position_embeddings)
            options = AdapterOptions(max_model_len=length, n_threads=1, kv_cache_layout="slot")
            adapter_class.load(checkpoint, options).close()
    except ModelLoadError:
        pass


CASES: list[tuple[str, Callable[[bytes, random.Random, int], bytes]]] = [
    ("model.safetensors", mutate_bytes),
    ("m.gguf", mutate_bytes),
    ("tokenizer.json", mutate_bytes),
    ("tokenizer.json", mutate_json),
    ("tokenizer_config.json", mutate_json),
    ("config.json", mutate_bytes),
    ("config.json", mutate_json),
    ("gptq/config.json", mutate_json),
    ("gptq/model.safetensors", mutate_header),
    ("awq/model.safetensors", mutate_header),
    ("adapter_config.json", mutate_json),
    ("adapter_model.safetensors", mutate_header),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("target", "mutate"), CASES)
def test_mutated_file_opens_or_is_rejected(
    tmp_path: Path, target: str, mutate: Callable[[bytes, random.Random, int], bytes], seed: int
) -> None:
    path = write_model(tmp_path, target)
    good = path.read_bytes()
    header = 8192 if target in ("model.safetensors", "m.gguf") else len(good)
    rng = random.Random(f"{seed} {target} {mutate.__name__}")
    started = time.perf_counter()
    done = 0
    while done < FILES and time.perf_counter() - started < BUDGET:
        data = mutate(good, rng, header)
        path.write_bytes(data)
        before = time.process_time()
        try:
            try_model(tmp_path)
        except BaseException:
            (tmp_path / "culprit").write_bytes(data)
            print(f"mutation {done} of {target}: kept as {tmp_path / 'culprit'}")
            raise
        assert time.process_time() - before < SLOWEST, f"mutation {done} of {target}"
        done += 1
    assert done >= 10
