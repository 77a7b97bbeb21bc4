"""transformers reads a GGUF file through the package gguf: once for the configuration and once for
the weights, string by string, and it makes the table of the tensors' names anew for every
submodule. With `quick_gguf` each is done once; what is read stays the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np


@contextlib.contextmanager
def quick_gguf() -> Iterator[None]:
    plain = gguf.GGUFReader

    @functools.cache
    def read(path: Path | str) -> Any:
        whole = np.fromfile(path, np.uint8)  # slices of a memory map cost three times as much
        with mock.patch("gguf.gguf_reader.np.memmap", lambda *_, **__: whole):
            return plain(path)

    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch("gguf.GGUFReader", read), mock.patch("gguf.get_tensor_name_map", names):
        yield
