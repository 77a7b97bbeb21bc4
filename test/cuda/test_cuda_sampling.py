"""Device sampler: tokens and logprobs match the host sampler, bit for bit.

A chain that starts with a link over whole rows that changes nothing (XTC with probability 0) is
sampled on the host. Both samplers read logits of the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams

PROMPTS = [[5, 9, 2, 77, 31], list(range(3, 90)), [11] * 33, [8], list(range(200, 17, -1))]
CHAIN = ["penalties", "temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc"]
OVER_THE_HOST: dict[str, Any] = {"samplers": ["xtc", *CHAIN[:-1]], "xtc_probability": 1e-30}


@pytest.fixture(scope="module", params=[1000, 40_003], ids=["small", "large"])
def llm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Vocabularies of 2 and 79 blocks of weights, the last block partial."""
    path: Path = tmp_path_factory.mktemp("cuda-sampling")
    config = tiny_config(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        intermediate_size=96, vocab_size=request.param, num_hidden_layers=2,
        max_position_embeddings=512,
    )  # fmt: skip
    write_hf_model(path, config)
    # Without prefix caching a prompt is always computed in the same steps.
    options: dict[str, Any] = {"num_kv_blocks": 200, "enable_prefix_caching": False}
    with LLM(str(path), device="cuda", dtype="bf16", **options) as opened:
        yield opened


def sampled(llm: LLM, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 11} | fields
    params = SamplingParams(ignore_eos=True, detokenize=False, **asked)
    outputs = llm.generate(PROMPTS, params)
    return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]


def sample_counts(llm: LLM) -> dict[str, int]:
    found: dict[str, int] = llm.profile()["sample_counts"]
    return found


BIAS = {7: -3.5, 8: 100.0, 9: 2.25, 31: -100.0}
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "as it is": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 40},
    "top_k and all behind": {"temperature": 0.9, "top_k": 200, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"temperature": 0.05, "top_p": 0.9},
    "top_p of few": {"temperature": 1.0, "top_p": 0.002},
    "top_p that goes far": {"temperature": 2.0, "top_p": 0.95},
    "min_p": {"temperature": 0.05, "min_p": 0.2},
    "min_p that goes far": {"temperature": 2.0, "min_p": 0.001},
    "bias": {"temperature": 0.8, "logit_bias": BIAS},
    "greedy with bias": {"temperature": 0.0, "logit_bias": {k: v / 50 for k, v in BIAS.items()}},
    "penalties": {
        "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.4},
    "logprobs": {"temperature": 0.7, "top_k": 30, "logprobs": 5},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 0},
    "all": {
        "temperature": 0.6, "top_k": 60, "top_p": 0.8, "logit_bias": BIAS, "logprobs": 20,
        "repetition_penalty": 1.1, "frequency_penalty": -0.25, "min_p": 0.02,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_device_samples_match_host(llm: LLM, name: str) -> None:
    before = sample_counts(llm)
    on_device = sampled(llm, **CASES[name])
    between = sample_counts(llm)
    assert sampled(llm, **CASES[name], **OVER_THE_HOST) == on_device
    after = sample_counts(llm)
    assert after["device"] == between["device"]
    assert after["host"] - between["host"] >= 12 * len(PROMPTS)
    assert between["device"] > before["device"] and between["host"] == before["host"]


@pytest.mark.parametrize("name", ["temperature", "as it is", "top_k", "penalties", "bias"])
def test_without_logprobs_no_logits_are_copied_to_the_host(llm: LLM, name: str) -> None:
    before = sample_counts(llm)
    sampled(llm, **CASES[name])
    after = sample_counts(llm)
    assert after["host"] == before["host"] and after["device"] > before["device"]


def test_mixed_sampling_parameters_share_a_step(llm: LLM) -> None:
    fixed: dict[str, Any] = {"max_tokens": 8, "seed": 5, "ignore_eos": True, "detokenize": False}
    cases = [*CASES.values(), {"temperature": 0.8, "typical_p": 0.7}, {"temperature": 0.0}]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(cases))]

    def run(**changes: Any) -> list[Any]:
        params = [SamplingParams(**fixed | case | changes) for case in cases]
        outputs = llm.generate(prompts, params)
        return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]

    assert run() == run(**OVER_THE_HOST)


def test_only_allowed_tokens_are_sampled_under_a_mask(llm: LLM) -> None:
    """Grammar masks with device and host sampling."""
    allowed = {"allowed_token_ids": [3, 5, 8, 700, 999], "temperature": 1.3}
    on_device = sampled(llm, **allowed)
    assert {token for tokens, _ in on_device for token in tokens} <= {3, 5, 8, 700, 999}
    assert sampled(llm, **allowed, **OVER_THE_HOST) == on_device
