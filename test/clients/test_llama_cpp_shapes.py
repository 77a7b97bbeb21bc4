"""llama.cpp's server tests as recorded shapes, on a real tiny model with marks for infill; and the
sums that docs/internals/peer_tests.md states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import llama_cpp_chat_shapes  # fills SHAPES
import pytest
from llama_cpp_shapes import ALIAS, BATCH, CONTEXT, KEY, NOT_HELD, ORIGIN, SEQUENCES, SHAPES, Shape
from model_files import CHATML, tiny_config, write_hf_model, write_tiny_tokenizer
from server_helpers import ROOT, ServerProcess

INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
THINKING = ("<think>", "</think>")
DOCUMENT = Path("docs/internals/peer_tests.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("llama") / "model"
    write_hf_model(path, tiny_config(max_position_embeddings=CONTEXT), tokenizer=False)
    more = dict.fromkeys(INFILL, True) | dict.fromkeys(THINKING, False)
    write_tiny_tokenizer(path, CHATML, more)
    options = {
        "--model": path, "--threads": 1, "--served-model-name": ALIAS, "--api-key": KEY,
        "--max-num-seqs": SEQUENCES, "--max-num-batched-tokens": BATCH,
        "--allowed-origin": ORIGIN, "--webui": ROOT / "webui",
    }  # fmt: skip
    flat = [str(item) for pair in options.items() for item in pair]
    with ServerProcess(*flat, real=True) as process:
        yield process.wait_ready()


@pytest.mark.parametrize("one", SHAPES, ids=lambda one: f"{one.file}-{one.check.__name__}")
def test_llama_cpp_server_test_shapes(client: httpx.Client, one: Shape) -> None:
    one.check(client)


def test_document_has_the_same_counts() -> None:
    assert llama_cpp_chat_shapes.CHAT
    covered: Counter[str] = Counter()
    for one in SHAPES:
        covered[one.file] += one.count
    rows = {file: (covered[file], 0) for file in covered}
    for file, count, _ in NOT_HELD:
        rows[file] = (covered[file], rows.get(file, (0, 0))[1] + count)
    text = (ROOT / DOCUMENT).read_text()
    documented = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert {file: (int(yes), int(total) - int(yes)) for file, total, yes in documented} == rows
    total, yes = sum(map(sum, rows.values())), sum(covered.values())
    assert f"**{yes} of {total}**" in text
