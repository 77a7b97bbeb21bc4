"""Faster GGUF loading in transformers, with the same result. transformers parses a GGUF file twice
with the gguf package, and rebuilds the table of tensor names for every submodule; `quick_gguf` does
each once."""

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
        whole = np.fromfile(path, np.uint8)  # slices of a memory map are three times slower
        with mock.patch("gguf.gguf_reader.np.memmap", lambda *_, **__: whole):
            return plain(path)

    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch("gguf.GGUFReader", read), mock.patch("gguf.get_tensor_name_map", names):
        yield
