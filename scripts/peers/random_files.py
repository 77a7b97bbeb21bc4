"""Hugging Face directories of known shapes with random weights, for other engines.

Files are written in chunks, so memory use does not depend on the shape.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llaisys.common.progress import report
from llaisys.common.validation import check_choice
from llaisys.models.families import file_tensors, parse_config
from llaisys.models.loading.convert import convert, storage_dtype
from llaisys.models.synthetic import TORCH_DTYPES, shape_config

_CHUNK = 1 << 20  # elements


def write_model_files(shape: str, dtype: str, directory: Path, layers: int | None = None) -> Path:
    """Write the model unless the directory already has it: one of another config, which an earlier
    release may have written, is replaced. `layers`: instead of the shape's."""
    config = shape_config(shape)
    check_choice("dtype", dtype, tuple(TORCH_DTYPES))
    full = {**config, "torch_dtype": TORCH_DTYPES[dtype]}
    if layers is not None:
        full["num_hidden_layers"] = layers
    text = json.dumps(full, indent=2).encode()
    path = directory / "config.json"
    if path.is_file():
        if path.read_bytes() == text:
            return directory
        path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = list(file_tensors(parse_config(full)))
    _write_atomically(
        directory / "model.safetensors", lambda file: _write_tensors(file, tensors, dtype)
    )
    # The config is written last: its presence marks a complete model.
    _write_atomically(path, lambda file: file.write(text))
    return directory


def _write_atomically(path: Path, write: Any) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write_tensors(file: BinaryIO, tensors: list[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensors:
        nbytes = int(np.prod(shape)) * storage_dtype(dtype).itemsize
        header[name] = {
            "dtype": dtype.upper(),
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    total, written = offset, 0
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # tensors start aligned
    file.write(len(text).to_bytes(8, "little") + text)
    values = np.random.default_rng(0).standard_normal(_CHUNK, np.float32) * np.float32(0.02)
    weights = convert(values, "f32", dtype)
    norm = convert(np.ones(_CHUNK, np.float32), "f32", dtype)
    for name, shape in tensors:
        chunk = norm if "norm" in name else weights
        left = int(np.prod(shape))
        while left > 0:
            count = min(left, _CHUNK)
            written += file.write(chunk[:count].tobytes())
            left -= count
            report("writing random weights", written, total)
