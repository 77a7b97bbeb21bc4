"""KV blocks move between two engines on a GPU through host memory; tokens are those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import greedy
from kv_transfer_helpers import Pair, answer, run
from model_files import tiny_config, write_hf_model

from llaisys import SamplingParams
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.engine.llm_engine import LLMEngine

KINDS = [
    ("shm", "bf16", "auto", "on"), ("tcp", "bf16", "auto", "on"), ("shm", "f32", "auto", "off"),
    ("shm", "f16", "q8", "on"), ("tcp", "bf16", "fp8", "off"),
]  # fmt: skip


@pytest.mark.parametrize(("transport", "dtype", "kv_dtype", "async_scheduling"), KINDS)
def test_a_prompt_continues_on_another_engine(
    transport: str, dtype: str, kv_dtype: str, async_scheduling: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
    write_hf_model(tmp_path / "model", tiny_config(**sizes, head_dim=64, vocab_size=1000))
    config = EngineConfig(
        model=str(tmp_path / "model"),
        device="cuda",
        dtype=dtype,
        exact=True,  # the last token of a prompt is computed alone
        async_scheduling=async_scheduling,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        cache=CacheConfig(num_kv_blocks=64, kv_transfer=transport, kv_cache_dtype=kv_dtype),
    )
    alone, producer, consumer = engines = [LLMEngine(config) for _ in range(3)]
    try:
        pair = Pair(transport, producer, consumer, tmp_path)
        for length in (5, 17, 100, 207):
            prompt = [(7 * i + length) % 900 + 3 for i in range(length)]
            for params in (greedy(8), SamplingParams(max_tokens=8, seed=3, temperature=0.9)):
                expected = answer(alone, prompt, params)
                [name] = pair.submit(prompt, pair.prefill(prompt), params)
                assert run(consumer)[name] == expected
        stats = pair.stats()
        assert stats["kv_transfer_failures"] == 0
        assert stats["kv_transfer_received_blocks"] == 1 + 1 + 7 + 13
        pair.check_idle()
    finally:
        for engine in engines:
            engine.close()
