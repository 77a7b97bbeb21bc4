"""The registry of adapters by model type, and the mock adapter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from error_helpers import invalid_input

from llaisys.common import model_registry
from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.model_registry import MODEL_REGISTRY, get_adapter_class, register_model
from llaisys.common.parallel import ParallelConfig
from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.mock import MockAdapter, MockShape


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_registry, "MODEL_REGISTRY", dict(MODEL_REGISTRY))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen2", "DecoderAdapter"),
        ("llama", "DecoderAdapter"),
        ("qwen3", "DecoderAdapter"),
        ("mock", "MockAdapter"),
    ],
)
def test_adapter_is_found_by_model_type(model_type: str, name: str) -> None:
    adapter = get_adapter_class(model_type)
    assert adapter.__name__ == name
    assert issubclass(adapter, ModelAdapter)


@pytest.mark.parametrize("model_type", ["", "gpt2", "QWEN2", "qwen2 ", "unknown", "qwen9"])
def test_unknown_model_type_error_lists_known_types(model_type: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        get_adapter_class(model_type)
    text = str(caught.value)
    assert repr(model_type) in text
    for known in ("llama", "mock", "qwen2"):
        assert known in text


def test_register_model() -> None:
    register_model("echo", "llaisys.models.mock:MockAdapter")
    assert get_adapter_class("echo") is MockAdapter
    for taken in ("echo", "qwen2"):
        with invalid_input("model_type"):
            register_model(taken, "llaisys.models.mock:MockAdapter")
    for location in ("", "module", "a:b:c", "module.Class"):
        with invalid_input("location"):
            register_model("other", location)
    assert "other" not in model_registry.MODEL_REGISTRY


def test_adapters_are_imported_on_demand() -> None:
    program = (
        "import sys\n"
        "from llaisys.common.model_registry import get_adapter_class\n"
        "loaded = lambda: {m for m in sys.modules if m.startswith('llaisys.models.')}\n"
        "assert not loaded(), loaded()\n"
        "assert 'llaisys.libllaisys' not in sys.modules\n"
        "get_adapter_class('mock')\n"
        "assert 'llaisys.models.mock' in loaded()\n"
        "assert not loaded() & {'llaisys.models.qwen2', 'llaisys.models.llama'}, loaded()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- The mock adapter over the native library -----------------------------------------------------


@pytest.fixture
def adapter() -> Iterator[ModelAdapter]:
    options = AdapterOptions(kv_cache_layout="slot", n_threads=1, kv_cache_capacity_tokens=32)
    made = get_adapter_class("mock").load(MockShape(), options)
    yield made
    made.close()


def step_of(*tokens: int, seq: int = 0) -> ModelStepInput:
    n = len(tokens)
    return ModelStepInput(
        np.array(tokens, np.int64), np.arange(n), np.full(n, seq), np.ones(n, np.int8)
    )


def test_mock_adapter_generates(adapter: ModelAdapter) -> None:
    assert (adapter.vocab_size, adapter.max_model_len, adapter.kv_capacity_tokens) == (64, 4096, 32)
    output = adapter.forward(step_of(1, 2, 3), None)
    assert output.n_outputs == 3 and output.output_ids.tolist() == [0, 1, 2]
    logits = adapter.logits()
    assert logits.shape == (3, 64)
    sampled = adapter.sample(
        SamplingMetadata(np.array([2], np.int32), numbers={
            "temperature": np.zeros(1), "n_logprobs": np.ones(1)})
    )  # fmt: skip
    assert sampled.tolist() == [int(logits[2].argmax())]
    found = adapter.logprobs(0)
    assert found is not None and found.rank == 1 and [found.top[0][0]] == sampled.tolist()
    adapter.sampler_reset(0, [1, 2])
    adapter.sampler_accept(0, [3])
    adapter.sampler_forget(0)
    assert adapter.kv_bytes_per_token(MockShape(), AdapterOptions(dtype="bf16")) == 2 * 2 * 8 * 2


def test_adapter_checks_array_lengths_and_dtypes(adapter: ModelAdapter) -> None:
    """Lengths, dtypes and layouts of arrays; the C side would read out of bounds."""
    good = step_of(1, 2, 3)
    for name in ("positions", "seq_ids", "logits_mask"):
        bad = step_of(1, 2, 3)
        setattr(bad, name, getattr(bad, name)[:2])
        with invalid_input(name):
            adapter.forward(bad, None)
        bad = step_of(1, 2, 3)
        setattr(bad, name, getattr(bad, name).astype(np.float64))
        with invalid_input(name):
            adapter.forward(bad, None)
    strided = step_of(1, 2, 3)
    strided.token_ids = np.zeros(6, np.int64)[::2]
    with invalid_input("token_ids"):
        adapter.forward(strided, None)
    tables = {
        "slot_mapping": np.zeros(3, np.int32), "batch_seq_ids": np.zeros(1, np.int64),
        "context_lens": np.full(1, 3, np.int32), "block_tables": np.zeros((1, 1), np.int32),
    }  # fmt: skip
    for name, value in (
        ("slot_mapping", np.zeros(2, np.int32)),
        ("batch_seq_ids", np.zeros(2, np.int64)),
        ("block_tables", np.zeros((2, 1), np.int32)),
        ("block_tables", np.zeros(1, np.int32)),
        ("block_tables", np.zeros((1, 1), np.int64)),
    ):
        with pytest.raises(InvalidInputError, match=name):
            adapter.forward(good, AttentionMetadata(**(tables | {name: value})))


@pytest.mark.parametrize(
    "short",
    [
        {"numbers": {"temperature": np.ones(1)}},
        {"numbers": {"hotness": np.ones(2)}},
        {"seeds": np.zeros(1, np.uint64)},
        {"chain_offsets": np.zeros(2, np.int32), "chain": np.zeros(0, np.uint8)},
        {"masks": np.zeros((1, 1), np.uint32), "mask_rows": np.zeros(2, np.int32)},
        {"bias_offsets": np.array([0, 1, 2], np.int32), "bias_ids": np.zeros(1, np.int32),
         "bias_values": np.zeros(2, np.float32)},
        {"chain_offsets": np.array([0, 1, 2], np.int32), "chain": np.zeros(1, np.uint8)},
    ],
)  # fmt: skip
def test_short_sampling_arrays_are_rejected(adapter: ModelAdapter, short: dict) -> None:
    adapter.forward(step_of(1, 2), None)
    rows = np.arange(2, dtype=np.int32)
    with pytest.raises(InvalidInputError):
        adapter.sample(SamplingMetadata(rows, **short))


def test_adapter_raises_after_close() -> None:
    made = get_adapter_class("mock").load(None, AdapterOptions(kv_cache_layout="slot", n_threads=1))
    made.close()
    made.close()
    with pytest.raises(ClosedError):
        made.forward(step_of(1), None)
    with pytest.raises(ClosedError):
        made.logits()
    with pytest.raises(ClosedError):
        made.sampler_forget(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_layout": "heap"}, "kv_cache_layout is 'heap'; it must be one of slot, block"),
        ({"device": "abacus"}, "device is 'abacus'; it must be one of cpu, nvidia"),
        ({"dtype": "q4"}, "dtype is 'q4'; it must be one of"),
        ({"device_ids": (1,)}, "device_id"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "tensor_parallel_size"),
        ({"max_model_len": 5000}, "max_model_len"),
    ],
)
def test_invalid_adapter_options_are_rejected(options: dict, words: str) -> None:
    with pytest.raises((InvalidInputError, RuntimeError), match=words):
        get_adapter_class("mock").load(None, AdapterOptions(**options))
