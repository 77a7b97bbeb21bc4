"""A tiny tokenizer for every test of this folder."""

from __future__ import annotations

from pathlib import Path

import model_files
import pytest

from llaisys.tokenization import Tokenizer


@pytest.fixture()
def tiny(tmp_path: Path) -> Tokenizer:
    model_files.write_tiny_tokenizer(tmp_path)
    return Tokenizer.from_directory(tmp_path)
