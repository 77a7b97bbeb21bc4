"""8-bit KV caches on the GPU: bytes against a naive reference, attention against the CPU over the
dequantised values, and the engine: batches, prefix cache, offload, context shift, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_helpers import IS_SMALL, PROMPTS, VARIANTS, Side, matching, shape
from kv_bytes import cuda_layout, dequantised, from_e4m3, quantised, to_e4m3
from model_files import tiny_config, write_hf_model
from native_helpers import EPSILON, REALS, Array, normal

from llaisys import LLM, SamplingParams
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.estimate import estimate_memory
from llaisys.libllaisys.handles import Stream, Tensor

FORMATS = ("i8", "f8_e4m3")
KV_DTYPES = ("q8", "fp8")


def cache_of(side: Side, stored: Array, scales: Array, dtype: str) -> Tensor:
    laid_out = cuda_layout(stored, scales)
    made: Tensor = side.keep(Tensor.create(laid_out.shape, dtype, side.device))
    made.load(laid_out.ctypes.data, laid_out.nbytes)
    return made


def bytes_of(cache: Tensor) -> Array:
    found = np.empty(cache.shape, np.uint8)
    cache.store(found.ctypes.data, found.nbytes)
    return found


def test_naive_e4m3_is_the_field_format() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate([normal(4000) * 100, np.float32([0, -0.0, 448, 2**-9, 2**-10])])
    values = np.clip(values, -448, 448)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(to_e4m3(values), expected.view(torch.uint8).numpy())
    np.testing.assert_array_equal(from_e4m3(to_e4m3(values)), expected.float().numpy())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("d", [1, 7, 16, 20, 64, 80, 128, 1024])
def test_kv_store_matches_naive_bytes(streams: dict[str, Stream], dtype: str, d: int) -> None:
    n, heads = 5, 3
    values = normal(n, heads, d) * 3
    if d > 2:
        values[1, 0, 0], values[1, 1, 1], values[2, 0] = np.nan, -np.inf, 0
        values[2, 0, 1] = 1e-37
    slots = np.array([7, 0, 3, 8, 5])
    stored, scales = np.zeros((9, heads, d), np.uint8), np.zeros((9, heads), np.float32)
    with Side("cuda", streams["cuda"]) as side:
        cache = cache_of(side, stored, scales, dtype)
        side.run("KvStore", cache, side.strided(values, "f32", 3), side.tensor(slots, "i32"))
        found = bytes_of(cache)
    stored[slots], scales[slots] = quantised(values, dtype)
    expected = cuda_layout(stored, scales)
    split = 9 * heads * d
    np.testing.assert_array_equal(found.ravel()[:split], expected.ravel()[:split])
    got = found.ravel()[split:].view(np.float32)
    np.testing.assert_array_equal(got, expected.ravel()[split:].view(np.float32))


# Latent attention has no 8-bit cache.
@pytest.mark.parametrize(
    ("case", "variant"), [entry for entry in VARIANTS if isinstance(entry[0][4], int)]
)
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("kind", FORMATS)
def test_attention_matches_cpu_over_dequantised_values(
    streams: dict[str, Stream], kind: str, dtype: str, case: tuple[Any, ...], variant: str
) -> None:
    lengths, fresh, heads, kv_heads, d, block, window = case
    rng = np.random.default_rng(7)
    n_blocks = sum(-(-length // block) for length in lengths) + 3
    order = rng.permutation(n_blocks)
    width = max(-(-length // block) for length in lengths)
    tables = np.full((len(lengths), width), -1, np.int32)
    seen, used = [], 0
    for row, length in enumerate(lengths):
        count = -(-length // block)
        tables[row, :count] = order[used : used + count]
        used += count
        for end in range(max(1, length - fresh + 1), length + 1):
            seen.append((row, max(0, end - window) if window else 0, end))
    seen.append((0, 3, 3) if lengths[0] > 3 else (0, 1, 1))  # empty range
    rows, begin, end = np.array(seen, np.int32).T
    q = normal(len(seen), heads, d)
    # Scales of tokens differ by a factor of 1,000.
    sizes = np.exp2(rng.uniform(-5, 5, (n_blocks * block, kv_heads, 1))).astype(np.float32)
    k = quantised(normal(n_blocks * block, kv_heads, d, seed=1), kind)
    v = quantised(normal(n_blocks * block, kv_heads, d) * sizes, kind)

    def run(side: Side, keys: Tensor, values: Tensor) -> Array:
        out = side.empty(q.shape, dtype)
        lists = (side.tensor(t, "i32") for t in (rows, begin, end, tables))
        queries = side.strided(q, dtype, 8)
        given = side.tensor(normal(heads) * 2 + 1, "f32") if "sinks" in variant else None
        cap = 0.5 if "cap" in variant else 0.0
        side.run("Attention", out, queries, keys, values, *lists, given, None, 0, block, 0.1, cap)
        return side.array(out)

    with Side("cpu", streams["cpu"]) as side:
        expected = run(side, *(side.tensor(dequantised(*x, kind), "f32") for x in (k, v)))
    with Side("cuda", streams["cuda"]) as side:
        got = run(side, *(cache_of(side, *x, kind) for x in (k, v)))
    # Probabilities and, for runs, dequantised keys and values are rounded to 16 bits.
    unit = max(EPSILON[dtype], 0 if dtype == "f32" else EPSILON["f16"])
    largest = float(np.abs(expected).max(initial=1e-3))
    np.testing.assert_allclose(got, expected, rtol=0, atol=16 * unit * largest)


# ---- the engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-kv8")
    write_hf_model(path, shape("float32"))
    return path


def open_llm(model: Path, kv_dtype: str, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "num_kv_blocks": 200}
    return LLM(str(model), kv_cache_dtype=kv_dtype, **{**defaults, **options})


def tokens(model: Path, kv_dtype: str, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    with open_llm(model, kv_dtype, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rows", [5, 40, 2048])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tokens_mostly_match_16_bits(directory: Path, kv_dtype: str, dtype: str, rows: int) -> None:
    limits = {"max_num_batched_tokens": rows, "max_num_seqs": min(rows, 8), "dtype": dtype}
    ours = tokens(directory, kv_dtype, **limits)
    assert matching(ours, tokens(directory, "auto", **limits)) >= 0.4, ours


@pytest.mark.parametrize(("family", "head_dim"), [("qwen2", 80), ("qwen2", 192), ("qwen3", 128)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_head_dims_and_qk_norm_mostly_match_16_bits(
    tmp_path: Path, kv_dtype: str, family: str, head_dim: int
) -> None:
    """head_dim 80 and 192 are stored by kv_store, 128 by the fused kernel."""
    config = tiny_config(
        family, hidden_size=256, num_attention_heads=6, num_key_value_heads=2, head_dim=head_dim,
        intermediate_size=360, vocab_size=1000, num_hidden_layers=3, max_position_embeddings=1024,
    )  # fmt: skip
    write_hf_model(tmp_path, config)
    assert matching(tokens(tmp_path, kv_dtype), tokens(tmp_path, "auto")) >= 0.4


def test_q8_prompt_logprobs_match_the_cpu(directory: Path) -> None:
    """f32 activations: the bytes of both devices are the same except for rounding."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    found = []
    for device in ("cpu", "cuda"):
        with open_llm(directory, "q8", device=device, dtype="f32") as llm:
            prompt = llm.generate(PROMPTS[1], params)[0].prompt_logprobs
        assert prompt is not None
        found.append([entry.logprob for entry in prompt[1:]])
    assert found[1] == pytest.approx(found[0], abs=0.01)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_exact_bits_do_not_depend_on_batch_and_chunks(directory: Path, kv_dtype: str) -> None:
    options: dict[str, Any] = {"exact": True, "enable_prefix_caching": False}
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, detokenize=False
    )

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        outputs = llm.generate(prompts, params)
        return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]

    with open_llm(directory, kv_dtype, **options) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS) == alone
    with open_llm(directory, kv_dtype, max_num_batched_tokens=19, max_num_seqs=5, **options) as llm:
        assert answers(llm, PROMPTS) == alone


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (10, 1)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_offloaded_prefix_has_the_same_bits(
    tmp_path: Path, kv_dtype: str, head_dim: int, block_size: int
) -> None:
    """The second shape has blocks that are not a multiple of 16 bytes."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
    write_hf_model(tmp_path, tiny_config(**sizes, head_dim=head_dim, vocab_size=1000))
    prompts = [[(7 * i + 31 * p) % 900 + 3 for i in range(45 + p)] for p in range(3)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, logprobs=2)

    def ask(llm: LLM, prompt: list[int]) -> tuple[Any, ...]:
        output = llm.generate(prompt, params)[0]
        choice, usage = output.outputs[0], output.usage
        return choice.token_ids, choice.logprobs, usage.cached_tokens, usage.host_cached_tokens

    options: dict[str, Any] = {"block_size": block_size, "max_num_seqs": 2}
    room = -(-53 // block_size)
    with open_llm(tmp_path, kv_dtype, num_kv_blocks=4 * room, **options) as llm:
        for prompt in prompts:
            ask(llm, prompt)
        kept = [ask(llm, prompt) for prompt in prompts]
    options |= {"num_kv_blocks": room, "kv_offload": "16MiB"}
    with open_llm(tmp_path, kv_dtype, **options) as llm:
        for prompt in prompts:
            ask(llm, prompt)
        for prompt, (answer, logprobs, cached, _) in zip(prompts, kept, strict=True):
            assert cached > 0
            assert ask(llm, prompt) == (answer, logprobs, cached, cached)


def test_context_shift_matches_the_cpu(directory: Path) -> None:
    """Keys are dequantised, rotated and quantised again; three shifts. f32 activations."""
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, n_keep=3)
    options: dict[str, Any] = {"context_shift": True, "max_model_len": 64, "block_size": 4}
    found = []
    for device in ("cpu", "cuda"):
        with open_llm(directory, "q8", device=device, dtype="f32", **options) as llm:
            found.append(llm.generate(PROMPTS[0], params)[0].token_ids)
    assert len(found[0]) == len(found[1]) == 150
    assert matching([found[1]], [found[0]]) >= 0.9, found


def test_fp8_context_shift_generates(directory: Path) -> None:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, n_keep=3)
    options: dict[str, Any] = {"context_shift": True, "max_model_len": 64, "block_size": 4}
    found = {}
    for kv_dtype in ("bf16", "fp8"):
        with open_llm(directory, kv_dtype, **options) as llm:
            found[kv_dtype] = llm.generate(PROMPTS[0], params)[0].token_ids
    assert len(found["fp8"]) == 150
    assert matching([found["fp8"]], [found["bf16"]]) > 0.02, found


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_sequences_beside_short_ones_mostly_match_16_bits(
    tmp_path_factory: pytest.TempPathFactory, kv_dtype: str
) -> None:
    """Sequences over several clusters, mixed with short ones and with prompt chunks."""
    path = tmp_path_factory.mktemp("cuda-kv8-long")
    write_hf_model(path, {**shape("float32"), "max_position_embeddings": 8192})
    lengths = (300, 20) if IS_SMALL else (4088, 20, 5000, 300)
    prompts = [[(i * 389 + n) % 997 for i in range(n)] for n in lengths]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    found = {}
    for dtype in ("auto", kv_dtype):
        with open_llm(path, dtype, num_kv_blocks=700) as llm:
            found[dtype] = [output.token_ids for output in llm.generate(prompts, params)]
    assert matching(found[kv_dtype], found["auto"]) >= 0.4, found


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_are_half_of_16_bits_and_a_scale(directory: Path, kv_dtype: str) -> None:
    """2 KV heads of 64, 3 layers, keys and values; a scale has 4 bytes."""
    wanted = 200 * 16 * 2 * 3 * 2 * (64 + 4)
    config = EngineConfig.of(
        model=str(directory), num_kv_blocks=200, kv_cache_dtype=kv_dtype, device="cuda"
    )
    assert estimate_memory(config).kv_cache == wanted
    with open_llm(directory, kv_dtype) as llm:
        assert llm.stats()["kv_cache_bytes"] == wanted
