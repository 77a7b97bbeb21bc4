"""`exact` on the GPU: results are batch-invariant, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config, write_hf_model
from native_helpers import Array, handle_array, to_bits

from llaisys import LLM, SamplingParams
from llaisys.libllaisys.handles import LinearWeight, Stream, Tensor
from llaisys.libllaisys.library import check, lib

LENGTHS = [3, 40, 1, 17, 129, 64, 300, 5]
PROMPTS = [
    np.random.default_rng(i).integers(3, 1000, LENGTHS[i % len(LENGTHS)]).tolist()
    for i in range(40)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-exact")
    config = tiny_config(
        hidden_size=256, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        intermediate_size=360, vocab_size=1000, num_hidden_layers=3,
        max_position_embeddings=1024,
    )  # fmt: skip
    write_hf_model(path, config)
    return path


def answers(llm: LLM, prompts: list[list[int]], **fields: Any) -> list[Any]:
    """Tokens and all their logprobs, unrounded."""
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 3} | fields
    params = SamplingParams(ignore_eos=True, detokenize=False, **asked)
    return [
        (output.token_ids, output.outputs[0].logprobs) for output in llm.generate(prompts, params)
    ]


@pytest.fixture(scope="module", params=["bf16", "f16", "f32"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def exact_llm(directory: Path, dtype: str) -> Iterator[LLM]:
    with LLM(
        str(directory), device="cuda", dtype=dtype, num_kv_blocks=1200, exact=True,
        enable_prefix_caching=False, max_num_batched_tokens=512,
    ) as llm:  # fmt: skip
        yield llm


def test_request_bits_do_not_depend_on_the_batch(exact_llm: LLM) -> None:
    """In a batch the token budget splits prompts at other positions than alone."""
    alone = [answers(exact_llm, [prompt])[0] for prompt in PROMPTS[:8]]
    for size in (2, 3, 7, 16, 17, 40):
        assert answers(exact_llm, PROMPTS[:size])[:8] == alone[:size], size


def test_seeded_samples_do_not_depend_on_the_batch(exact_llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    alone = answers(exact_llm, PROMPTS[:1], **fields)
    assert answers(exact_llm, PROMPTS[:24], **fields)[:1] == alone


def test_chunked_prefill_has_the_same_bits(directory: Path, exact_llm: LLM, dtype: str) -> None:
    whole = answers(exact_llm, PROMPTS[:8])
    with LLM(
        str(directory), device="cuda", dtype=dtype, num_kv_blocks=1200, exact=True,
        enable_prefix_caching=False, max_num_batched_tokens=19, max_num_seqs=5,
    ) as llm:  # fmt: skip
        assert answers(llm, PROMPTS[:8]) == whole


def rows_of(stream: Stream, x: Array, weight: LinearWeight, n: int, dtype: str) -> Array:
    bits = to_bits(x, dtype)
    out = np.empty((len(x), n), np.float32)
    with (
        Tensor.create(x.shape, dtype, "cuda") as given,
        Tensor.create(out.shape, "f32", "cuda") as made,
    ):
        given.load(bits.ctypes.data, bits.nbytes)
        arrays = (handle_array([weight]), None, handle_array([made]))
        check(lib().llaisysLinear(stream.handle, given.handle, None, 1, *arrays))
        stream.synchronize()
        made.store(out.ctypes.data, out.nbytes)
    return out


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("n", "k"), [(2048, 1536), (1536, 8960), (1000, 264), (37, 64)])
def test_linear_row_bits_do_not_depend_on_other_rows(kind: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((300, k), np.float32)
    w = to_bits(rng.standard_normal((n, k), np.float32), kind)
    with Stream("cuda") as stream, Tensor.create((n, k), kind, "cuda") as source:
        stream.make_exact()
        source.load(w.ctypes.data, w.nbytes)
        with LinearWeight(source, stream) as weight:
            whole = rows_of(stream, x, weight, n, kind)
            for rows in (1, 2, 15, 16, 17, 40, 127, 128, 129, 255):
                for first in (0, 300 - rows):
                    chosen = slice(first, first + rows)
                    part = rows_of(stream, x[chosen], weight, n, kind)
                    assert part.tobytes() == whole[chosen].tobytes(), (rows, first)
