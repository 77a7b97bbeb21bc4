"""Several models: the --models file, and several names on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llaisys.common.errors import InvalidInputError
from llaisys.server.model_entries import entries_of, read_models_file


def test_file_names_models_and_options(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.small]\nmodel = "mock"\naliases = ["s"]\nmax_model_len = 64\n[models.mock]\n'
    )
    small, mock = read_models_file(file, {"max_num_seqs": 3})
    assert small.names == ("small", "s") and small.engine.max_model_len == 64
    assert mock.engine.model == "mock" and mock.engine.max_model_len is None
    assert mock.engine.scheduler.max_num_seqs == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[models.a]\nmax_modl_len = 3", "[models.a]: unknown option 'max_modl_len'; did you mean"),
        ("[models.a]\nmax_model_len = 1", "[models.a]: max_model_len is 1; it must be"),
        ("[model.a]", "unknown table 'model'; did you mean 'models'?"),
        ("", "there is no table"),
        ('[models.a]\naliases = ["b"]\n[models.b]', "two models are named 'b'"),
        ("[models", "--models"),
    ],
)
def test_error_in_the_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_models_file(file, {})
    assert expected in str(caught.value) and (
        "two models" in expected or str(file) in str(caught.value)
    )


def test_model_paths_are_named_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    first, second = entries_of([str(tmp_path / "one"), "org/two"], {})
    assert (first.names, second.names) == (("one",), ("org/two",))
    with pytest.raises(InvalidInputError):
        entries_of(["mock", "mock"], {})
