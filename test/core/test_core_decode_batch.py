"""Batch invariance: bitwise identical results for any batch, layout, order, chunking or threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_models import (
    BLOCK,
    Piece,
    Tiny,
    make_reference,
    opened,
    random_tokens,
    run_block,
    run_slot,
    save,
)

from llaisys.models.native import NativeAdapter

pytestmark = pytest.mark.parity

TINY = Tiny(layers=2)
TOKENS = {seq: random_tokens(40 + 13 * seq, TINY.vocab, seed=seq) for seq in range(4)}
BLOCKS = {seq: [8 * b + seq for b in range(8)] for seq in range(4)}  # interleaved


@pytest.fixture(scope="module", params=["f32", "bf16"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[request.param]
    return save(make_reference(TINY), tmp_path_factory.mktemp(request.param), dtype)


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[int, NDArray[np.float32]]:
    """Run each sequence alone in one step, with one thread, in the SLOT layout."""
    result = {}
    for seq, tokens in TOKENS.items():
        with opened(directory, kv_cache_layout="slot", max_model_len=128, n_threads=1) as adapter:
            result[seq] = run_slot(adapter, [Piece(0, tokens)])
    return result


@pytest.fixture(scope="module")
def block_adapter(directory: Path) -> Iterator[NativeAdapter]:
    with opened(
        directory, kv_cache_capacity_tokens=64 * BLOCK, max_model_len=128, n_threads=2
    ) as adapter:
        yield adapter


def check(
    logits: NDArray[np.float32], pieces: list[Piece], alone: dict[int, NDArray[np.float32]]
) -> None:
    row = 0
    for piece in pieces:
        n = len(piece.tokens)
        expected = alone[piece.seq_id][piece.start : piece.start + n]
        np.testing.assert_array_equal(logits[row : row + n], expected)
        row += n


def test_all_sequences_in_one_slot_step(
    directory: Path, alone: dict[int, NDArray[np.float32]]
) -> None:
    with opened(
        directory, kv_cache_layout="slot", kv_cache_capacity_tokens=512, max_model_len=128
    ) as adapter:
        pieces = [Piece(seq, TOKENS[seq]) for seq in (2, 0, 3, 1)]
        check(run_slot(adapter, pieces), pieces, alone)


@pytest.mark.parametrize("asked", [1, 2, 300, 600])
def test_tokens_without_logits_do_not_change_results(directory: Path, asked: int) -> None:
    """After the attention of the last layer a step may drop rows without outputs."""
    tokens = random_tokens(700, TINY.vocab, seed=9)
    rows = np.sort(np.random.default_rng(asked).permutation(700)[:asked])
    with opened(
        directory, kv_cache_layout="slot", kv_cache_capacity_tokens=1500, max_model_len=1024
    ) as adapter:
        whole = run_slot(adapter, [Piece(0, tokens)])
        few = run_slot(adapter, [Piece(1, tokens)], rows)
        np.testing.assert_array_equal(few, whole[rows])
        following = [run_slot(adapter, [Piece(seq, [5], 700)]) for seq in (0, 1)]
        np.testing.assert_array_equal(*following)


def test_chunk_without_logits_is_visible_to_the_next(directory: Path) -> None:
    tokens = TOKENS[3]
    no_rows = np.zeros(0, np.int64)
    with opened(directory, kv_cache_layout="slot", max_model_len=128) as adapter:
        whole = run_slot(adapter, [Piece(0, tokens)])
    with opened(directory, kv_cache_layout="slot", max_model_len=128) as adapter:
        assert len(run_slot(adapter, [Piece(0, tokens[:50])], no_rows)) == 0
        np.testing.assert_array_equal(run_slot(adapter, [Piece(0, tokens[50:], 50)]), whole[50:])


def test_micro_batch_size_does_not_change_results(
    directory: Path, alone: dict[int, NDArray[np.float32]]
) -> None:
    with opened(
        directory, kv_cache_capacity_tokens=64 * BLOCK, max_model_len=128, max_batch_tokens=7
    ) as adapter:
        pieces = [Piece(seq, TOKENS[seq]) for seq in range(4)]
        check(run_block(adapter, pieces, BLOCKS), pieces, alone)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_results_are_bitwise_identical_for_any_chunking(
    data: st.DataObject,
    block_adapter: NativeAdapter,
    alone: dict[int, NDArray[np.float32]],
) -> None:
    """Random steps: any subset of the sequences, any number of tokens each, any order."""
    done = dict.fromkeys(TOKENS, 0)
    while any(done[seq] < len(TOKENS[seq]) for seq in TOKENS):
        left = [seq for seq in TOKENS if done[seq] < len(TOKENS[seq])]
        chosen = data.draw(st.permutations(left))[: data.draw(st.integers(1, len(left)))]
        pieces = []
        for seq in chosen:
            n = data.draw(st.integers(1, len(TOKENS[seq]) - done[seq]))
            pieces.append(Piece(seq, TOKENS[seq][done[seq] : done[seq] + n], done[seq]))
            done[seq] += n
        check(run_block(block_adapter, pieces, BLOCKS), pieces, alone)
