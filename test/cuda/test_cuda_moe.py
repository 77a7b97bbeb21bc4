"""Mixtures of experts on the GPU: operators against the CPU, models against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_helpers import IS_SMALL, Side, random_weight
from family_parity import check_cuda_greedy_tokens, chunked_cuda_logits
from moe_models import MODELS, VOCAB, make_moe_model, write_moe_gguf, write_mxfp4
from native_helpers import EPSILON, Array, normal
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block, save

from llaisys import LLM, SamplingParams
from llaisys.libllaisys.handles import Stream
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_dtype
from llaisys.models.families import open_checkpoint
from llaisys.models.tensors import tensor_from_blocks


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "top_groups"),
    [(1, 1, 1, 1), (5, 2, 1, 1), (60, 4, 1, 1), (128, 8, 1, 1), (64, 6, 8, 3), (256, 8, 8, 4),
     (300, 40, 1, 1), (9, 2, 9, 4)],
)  # fmt: skip
def test_route(
    streams: dict[str, Stream],
    experts: int,
    k: int,
    groups: int,
    top_groups: int,
    is_sigmoid: bool,
    has_bias: bool,
) -> None:
    for n in (1, 3, 130):
        results = {}
        for device, stream in streams.items():
            with Side(device, stream) as side:
                ids, weights = side.empty((n, k), "i32"), side.empty((n, k), "f32")
                bias = side.tensor(normal(experts, seed=5), "f32") if has_bias else None
                logits = side.tensor(normal(n, experts) * 2, "f32")
                side.run("MoeRoute", ids, weights, logits, bias, int(is_sigmoid), 1, groups,
                         top_groups, 1.5)  # fmt: skip
                results[device] = side.array(ids), side.array(weights)
        np.testing.assert_array_equal(results["cuda"][0], results["cpu"][0])
        np.testing.assert_allclose(results["cuda"][1], results["cpu"][1], rtol=1e-5)


def test_route_of_ties_and_nan(streams: dict[str, Stream]) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[1, [0, 3, 35]] = np.nan
    logits[2] = np.nan
    for stream in [streams["cuda"]]:
        with Side("cuda", stream) as side:
            ids, weights = side.empty((3, 4), "i32"), side.empty((3, 4), "f32")
            side.run("MoeRoute", ids, weights, side.tensor(logits, "f32"), None, 0, 1, 1, 1, 1.0)
            np.testing.assert_array_equal(side.array(ids)[:2], [[0, 1, 2, 3], [1, 2, 4, 5]])
            assert (np.sort(side.array(ids)[2]) < 40).all()


def experts_of(n: int, k: int, experts: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng([seed, n, k, experts])
    popularity = rng.random(experts) + np.arange(experts) / experts  # some experts are popular
    ids = np.stack([np.argsort(-rng.random(experts) * popularity)[:k] for _ in range(n)])
    return ids, rng.random((n, k), np.float32)


def run(
    side: Side, dtype: str, n: int, k: int, experts: int, hidden: int, inner: int,
    has_bias: bool = False, limit: float = 0.0, out_dtype: str = "f32",
    rows: slice | None = None,
) -> Array:  # fmt: skip
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    ids, weights = experts_of(n, k, experts)
    x = normal(n, hidden)
    if rows is not None:
        ids, weights, x = ids[rows], weights[rows], x[rows]
    parts = [
        side.tensor(normal(experts * r, c, seed=i) / np.sqrt(c), dtype)
        for i, (r, c) in enumerate(shapes)
    ]
    biases = [
        side.tensor(normal(experts, r, seed=7 + i), "f32") if has_bias else None
        for i, (r, _) in enumerate(shapes)
    ]
    out = side.empty((len(ids), hidden), out_dtype)
    side.run("MoeMlp", out, side.tensor(x, dtype), side.tensor(ids, "i32"),
             side.tensor(weights, "f32"), *parts, *biases, experts, limit, 1.7)  # fmt: skip
    return side.array(out)


# (tokens, experts of a token, experts, hidden size, inner size): every tile of pairs
SHAPES = [
    (1, 1, 1, 8, 8),
    (1, 8, 16, 256, 96),
    (4, 2, 5, 136, 72),
    (5, 2, 40, 64, 200),
    (9, 3, 7, 72, 136),
    (40, 2, 5, 128, 64),
    (64, 4, 6, 200, 72),
    (150, 2, 3, 264, 136),
    (300, 4, 8, 64, 328),
    (500, 4, 6, 520, 328),
]
if IS_SMALL:
    SHAPES = [(1, 8, 16, 256, 96), (5, 2, 40, 64, 200), (64, 4, 6, 200, 72), (150, 2, 3, 72, 136)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("has_bias", "limit"), [(False, 0.0), (True, 1.5)])
def test_mlp(streams: dict[str, Stream], dtype: str, has_bias: bool, limit: float) -> None:
    for shape in SHAPES:
        for out_dtype in ("f32", dtype):
            results = {}
            for device, stream in streams.items():
                with Side(device, stream) as side:
                    results[device] = run(side, dtype, *shape, has_bias, limit, out_dtype)
            largest = float(np.abs(results["cpu"]).max())
            np.testing.assert_allclose(  # hidden values and expert outputs are rounded
                results["cuda"], results["cpu"], rtol=0, atol=4 * EPSILON[dtype] * largest,
                err_msg=str(shape),
            )  # fmt: skip


def test_mlp_of_any_dtype_and_size(streams: dict[str, Stream]) -> None:
    for dtype, shape in (("f32", (5, 2, 4, 33, 17)), ("bf16", (7, 2, 3, 30, 21))):
        results = {}
        for device, stream in streams.items():
            with Side(device, stream) as side:
                results[device] = run(side, dtype, *shape, True)
        largest = float(np.abs(results["cpu"]).max())
        room = 4 * EPSILON[dtype] * largest
        np.testing.assert_allclose(results["cuda"], results["cpu"], rtol=0, atol=room)


def test_a_row_does_not_depend_on_the_rows_beside_it(streams: dict[str, Stream]) -> None:
    """The grouped GEMM adds in the same order for every tile of pairs."""
    shape = (90, 4, 8, 128, 136)
    with Side("cuda", streams["cuda"]) as side:
        together = run(side, "bf16", *shape)
        again = run(side, "bf16", *shape)
        np.testing.assert_array_equal(together, again)
        for rows in (slice(0, 5), slice(7, 60), slice(20, 85)):
            alone = run(side, "bf16", *shape, rows=rows)
            np.testing.assert_array_equal(alone, together[rows])


# (gate and up, down); the last ones have no fast kernel
QUANTISED = [
    ("q4_k", "q6_k"), ("q4_1", "q8_0"), ("i4_g128", "i4_g32"), ("f8 by row", "f8 by row"),
    ("f8 by block", "q5_k"), ("q2_k", "i8_g128"), ("q8_0", "q4_1"), ("i8_g128", "q8_0"),
    ("q4_0+q5_0", "q4_0"), ("bf16", "q8_0"),
]  # fmt: skip
# (tokens, experts of a token, experts): few tokens, tiles of 16, 32, 64 and 128 pairs
QUANTISED_TOKENS = [
    (1, 1, 2), (1, 8, 16), (4, 2, 5), (3, 10, 12), (5, 2, 14), (30, 4, 9), (90, 4, 8), (150, 4, 6),
]  # fmt: skip
if IS_SMALL:
    QUANTISED_TOKENS = [(1, 2, 3), (5, 2, 3), (40, 2, 3)]


def random_experts(kind: str, count: int, rows: int, columns: int) -> tuple[str, Array, Array]:
    """(dtype, rows of blocks or values, values)."""
    if kind == "bf16":
        values = normal(count * rows, columns) / 50
        return kind, values, values
    return random_weight(kind, count * rows, columns)


@pytest.mark.parametrize(("n", "k", "experts"), QUANTISED_TOKENS)
@pytest.mark.parametrize(("outer", "down"), QUANTISED)
def test_quantised_experts_match_dequantised_ones(
    streams: dict[str, Stream], outer: str, down: str, n: int, k: int, experts: int
) -> None:
    """Against the CPU with the same weights in f32. Some sizes end in the middle of a step."""
    hidden, inner = (512, 256) if "_k" in outer + down else (2304, 128)
    if down in ("i4_g32", "q4_0", "q8_0"):
        inner = 160
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    kinds = [*(outer.split("+") * 2)[:2], down]
    ids, weights = experts_of(n, k, experts)
    made = [random_experts(kind, experts, *s) for kind, s in zip(kinds, shapes, strict=True)]

    def run_on(device: str, dtype: str, has_bias: bool) -> Array:
        with Side(device, streams[device]) as side:
            parts = []
            for (rows, columns), (kind, blocks, values) in zip(shapes, made, strict=True):
                if device == "cpu" or kind == "bf16":
                    parts.append(side.tensor(values, "f32" if device == "cpu" else kind))
                else:
                    size = (experts * rows, columns)
                    parts.append(side.keep(tensor_from_blocks(blocks, size, kind)))
            biases = [
                side.tensor(normal(experts, r, seed=7 + i), "f32") if has_bias else None
                for i, (r, _) in enumerate(shapes)
            ]
            out = side.empty((n, hidden), "f32")
            x = side.tensor(normal(n, hidden) / 100, dtype)
            side.run("MoeMlp", out, x, side.tensor(ids, "i32"), side.tensor(weights, "f32"),
                     *parts, *biases, experts, 0.0, 1.0)  # fmt: skip
            return side.array(out)

    for has_bias in (False, True):
        expected = run_on("cpu", "f32", has_bias)
        for dtype in ("bf16", "f16", "f32"):
            got = run_on("cuda", dtype, has_bias)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error < 0.02, (has_bias, dtype, error)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_gguf_experts_stay_quantised(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 160, "head_dim": 64}
    path = tmp_path / "model.gguf"
    write_moe_gguf(make_moe_model("qwen3_moe", **sizes), path, "qwen3moe", kind)
    with open_checkpoint(path) as checkpoint:
        name = "model.layers.0.mlp.experts.down_proj.weight"
        assert weight_dtype(checkpoint, name, AdapterOptions(device="cuda")) == kind.lower()
    tokens = random_tokens(41, 160)
    wide = chunked_cuda_logits(path, tokens, "f32")
    kept = chunked_cuda_logits(path, tokens, "auto")
    distance = np.linalg.norm(kept - wide, axis=1) / np.linalg.norm(wide, axis=1)
    assert 0 < np.median(distance) < 0.05


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_experts_are_quantised_at_load(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    directory = save(make_moe_model("qwen3_moe", **sizes), tmp_path)
    tokens = random_tokens(41, VOCAB)
    plain = chunked_cuda_logits(directory, tokens, "bf16")
    got = chunked_cuda_logits(directory, tokens, "bf16", quantization=quantization)
    distance = np.linalg.norm(got - plain, axis=1) / np.linalg.norm(plain, axis=1)
    limit = {"int8": 0.05, "int4": 0.4, "fp8": 0.2}[quantization]
    assert 0 < np.median(distance) < limit


# In 16 bits sizes that the fast kernels support, and sizes that they do not.
SIZES: list[dict[str, Any]] = [{}, {"hidden_size": 256, "intermediate_size": 264, "head_dim": 64}]


@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "aligned"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = make_moe_model(name, **sizes)
    directory = save(model, tmp_path)
    tokens = random_tokens(41, VOCAB)
    expected = reference_logits(model, tokens)
    for dtype in ("f32", "bf16"):
        got = chunked_cuda_logits(directory, tokens, dtype)
        if dtype == "f32":
            assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        else:  # rounding selects another expert for a few tokens
            distance = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert np.median(distance) < 0.1


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe"])
def test_few_tokens_are_routed_as_in_exact_mode(name: str, tmp_path: Path) -> None:
    """Up to 32 tokens have the norm, the router and the routing in one kernel, unless exact."""
    directory = save(make_moe_model(name, **SIZES[1], num_hidden_layers=4), tmp_path)
    tokens, steps = random_tokens(60, VOCAB), (1, 32, 2, 9, 1, 4, 7, 4)
    found = []
    for exact in (False, True):
        size = {"kv_cache_capacity_tokens": 4 * BLOCK, "max_model_len": 60, "exact": exact}
        with opened(directory, device="cuda", dtype="bf16", **size) as adapter:
            begin, parts = 0, []
            for n in steps:
                piece = Piece(0, tokens[begin : begin + n], begin)
                parts.append(run_block(adapter, [piece], {0: [2, 0, 1, 3]}))
                begin += n
            found.append(np.concatenate(parts))
    distance = np.linalg.norm(found[0] - found[1], axis=1) / np.linalg.norm(found[1], axis=1)
    assert 0 < np.median(distance) < 0.02  # rounding selects another expert for a few tokens


# Sizes that are no multiple of a pipeline stage or of the SMs, more experts than SMs, shared
# experts, biases, groups.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {"hidden_size": 520, "moe_intermediate_size": 72}),
        ("qwen3_moe", {"hidden_size": 264, "moe_intermediate_size": 1160, "num_experts": 5}),
        ("qwen3_moe", {"hidden_size": 2120, "moe_intermediate_size": 40, "num_experts": 150,
                       "num_experts_per_tok": 17, "num_hidden_layers": 1}),
        ("qwen2_moe", {"hidden_size": 264, "moe_intermediate_size": 136}),
        ("gpt_oss", {"hidden_size": 264, "intermediate_size": 200}),
        ("glm4_moe", {"hidden_size": 264, "moe_intermediate_size": 72}),
    ],
)  # fmt: skip
def test_experts_of_one_token_match_exact_mode(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """One token has norm, router, routing and experts in one kernel, unless exact."""
    directory = save(make_moe_model(name, head_dim=64, **sizes), tmp_path)
    tokens = random_tokens(40, VOCAB)
    found = []
    for exact in (False, False, True):
        size = {"kv_cache_capacity_tokens": 4 * BLOCK, "max_model_len": 60, "exact": exact}
        with opened(directory, device="cuda", dtype="bf16", **size) as adapter:
            parts = [run_block(adapter, [Piece(0, tokens[:8], 0)], {0: [2, 0, 1, 3]})]
            for at in range(8, 40):
                piece = Piece(0, tokens[at : at + 1], at)
                parts.append(run_block(adapter, [piece], {0: [2, 0, 1, 3]}))
            found.append(np.concatenate(parts[1:]))
    np.testing.assert_array_equal(found[0], found[1])
    distance = np.linalg.norm(found[0] - found[2], axis=1) / np.linalg.norm(found[2], axis=1)
    assert 0 < np.median(distance) < 0.03  # rounding selects another expert for a few tokens


# DeepSeek-V2-Lite, and heads that are no multiple of a tile.
@pytest.mark.parametrize("heads", [16, 20])
def test_latent_attention_of_real_head_sizes(heads: int, tmp_path: Path) -> None:
    model = make_moe_model(
        "deepseek_v2", hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=heads,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=3,
    )  # fmt: skip
    directory = save(model, tmp_path)
    tokens = random_tokens(41, VOCAB)
    expected = reference_logits(model, tokens)
    largest = float(np.abs(expected).max())
    for dtype, tolerance in (("f32", 1e-4), ("bf16", 0.15)):
        got = chunked_cuda_logits(directory, tokens, dtype)
        assert np.abs(got - expected).max() < tolerance * largest, dtype
    check_exact_tokens(directory)


def check_exact_tokens(directory: Path) -> None:
    """With `exact` the tokens and logprobs in bf16 do not depend on the batch."""
    prompts = [random_tokens(length, VOCAB, length) for length in (5, 33, 18)]
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2
    )
    with LLM(
        str(directory), device="cuda", dtype="bf16", max_model_len=64, num_kv_blocks=40, exact=True,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.logprobs for a in together] == [a.logprobs for a in alone]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_in_graphs_and_from_the_prefix_cache(name: str, tmp_path: Path) -> None:
    check_cuda_greedy_tokens(save(make_moe_model(name), tmp_path), VOCAB)


def test_mxfp4_experts(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    tokens = random_tokens(41, 160)
    expected = reference_logits(model, tokens)
    got = chunked_cuda_logits(tmp_path, tokens, "f32")
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    got = chunked_cuda_logits(tmp_path, tokens, "auto")
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.3
