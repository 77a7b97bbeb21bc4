"""Fixture: a model directory for the command line."""

from __future__ import annotations

import pytest
from model_files import write_hf_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_hf_model(directory)
    return str(directory)
