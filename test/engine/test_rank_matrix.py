"""The tokens of one rank for every pair of values of executor, ranks, asynchronous scheduling,
drafts, quantized weights and prefix cache; at night, with threads, in every combination. (Ray:
test_ray.py; pipeline stages: test_pipeline_parallel.py.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
from nightly import NIGHTLY
from rank_matrix import EVERY, PAIRWISE, Row, check_row, name_of, pairs, write_models

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("matrix"))


def test_every_pair_of_values_is_among_the_pairwise_rows() -> None:
    assert set(pairs(PAIRWISE)) == set(pairs(EVERY))


@pytest.mark.parametrize("row", EVERY if NIGHTLY else PAIRWISE, ids=name_of)
def test_threads(models: tuple[Path, Path], row: Row) -> None:
    check_row(models, "uni", row)


@pytest.mark.parametrize("row", PAIRWISE, ids=name_of)
def test_processes(models: tuple[Path, Path], row: Row) -> None:
    check_row(models, "mp", row)
