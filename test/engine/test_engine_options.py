"""Engine options are declared once: keywords, flags, wire format and native parameters derive."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from engine_fakes import FakeAdapter, FakeTokenizer
from error_helpers import invalid_input

from llaisys.common.flags import OptionParser
from llaisys.common.lora import LoraModule, LoraModules
from llaisys.engine.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    engine_options,
)
from llaisys.engine.engine_flags import add_engine_flags, given_engine_options
from llaisys.entrypoints.cli import build_parser
from llaisys.entrypoints.llm import LLM
from llaisys.libllaisys.arrays import int32_copy
from llaisys.libllaisys.handles import dtype_code
from llaisys.libllaisys.types import LlaisysModelCreateParams
from llaisys.models.base import AdapterOptions
from llaisys.models.mock import MockAdapter
from llaisys.models.native import PARALLEL_FIELDS

# A value for every option that is not its default.
OTHER: dict[str, Any] = {
    "model": "somewhere", "model_type": "qwen2", "device": "cuda", "dtype": "bf16",
    "quantization": "int8", "generation_config": "none",
    "max_model_len": 77, "n_threads": 3, "seed": 5, "step_timeout": 2.5, "warmup": False,
    "speculative_config": {"prompt_lookup_min": 3}, "pooling": "mean", "async_scheduling": "on",
    "exact": True,
    "chat_template": "{{ messages }}",
    "revision": "v2",
    "max_num_seqs": 9, "max_num_batched_tokens": 99, "min_prefill_chunk": 7, "max_step_time": 0.5,
    "block_size": 8,
    "max_prompt_logprob_tokens": 33,
    "kv_cache_memory_bytes": 1 << 33, "num_kv_blocks": 11, "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.5, "context_shift": True, "kv_offload": 1 << 30,
    "kv_transfer": "shm",
    "prefix_cache_min_match": 32, "kv_cache_dtype": "f16", "tensor_parallel_size": 2,
    "master_addr": "10.0.0.7",
    "master_port": 1234, "tp_group_name": "G", "init_method": "tcp://there:1",
    "tensor_parallel_device_ids": (3, 4),
    "vocab_parallel_head": False, "replicate_kv_heads": True, "numa": True,
    "enable_lora": True, "lora_modules": (LoraModule("a", "b"),), "max_loras": 3,
    "max_lora_rank": 32, "max_cpu_loras": 9,
}  # fmt: skip
# Only these values are implemented.
FIXED = {
    "pipeline_parallel_size": 1, "distributed_executor_backend": "uni", "node_rank": 0,
    "nnodes": 1, "distributed_backend": "nccl",
}  # fmt: skip


def value_of(config: EngineConfig, section: str | None, name: str) -> Any:
    return getattr(config if section is None else getattr(config, section), name)


def test_every_option_is_covered():
    assert {name for _, name, _, _ in engine_options()} == set(OTHER) | set(FIXED)
    assert all(about.help for _, _, about, _ in engine_options())


def test_options_of_all_sections_by_their_names():
    config = EngineConfig.of(**OTHER, **FIXED)
    for section, name, _, default in engine_options():
        assert value_of(config, section, name) == {**OTHER, **FIXED}[name]
        assert name in FIXED or value_of(config, section, name) != default
    with pytest.raises(TypeError, match="max_modle_len"):
        EngineConfig.of(max_modle_len=5)


def test_every_option_survives_the_wire_except_objects():
    config = EngineConfig.of(**OTHER, **FIXED)
    wire = json.loads(json.dumps(config.to_wire()))
    assert EngineConfig.from_wire(wire) == config
    with_objects = EngineConfig(adapter_class=FakeAdapter, tokenizer=FakeTokenizer())
    assert EngineConfig.from_wire(json.loads(json.dumps(with_objects.to_wire()))) == EngineConfig()
    with invalid_input("evil"):
        EngineConfig.from_wire({"cache": {"evil": 1}})
    with invalid_input("block_size"):
        EngineConfig.from_wire({"cache": {"block_size": 0}})


def test_every_option_that_has_a_flag_can_be_given_with_it():
    parser = OptionParser()
    add_engine_flags(parser)
    assert given_engine_options(parser.parse_args([])) == {}
    arguments = []
    wanted = {}
    for _, name, about, _ in engine_options():
        if about.flag is None:
            continue
        wanted[name] = {**OTHER, **FIXED}[name]
        flag = {"n_threads": "--threads", "warmup": "--no-warmup",
                "vocab_parallel_head": "--no-vocab-parallel-head",
                "enable_prefix_caching": "--no-prefix-caching"}.get(name)  # fmt: skip
        arguments.append(flag or "--" + name.replace("_", "-"))
        if name == "lora_modules":
            arguments += ["=".join(module) for module in wanted[name]]
        elif isinstance(wanted[name], tuple):
            arguments.append(",".join(map(str, wanted[name])))
        elif isinstance(wanted[name], dict):
            arguments.append(json.dumps(wanted[name]))
        elif not isinstance(wanted[name], bool):
            arguments.append(str(wanted[name]))
    given = given_engine_options(parser.parse_args(arguments))
    given["tensor_parallel_device_ids"] = tuple(given["tensor_parallel_device_ids"])
    given["lora_modules"] = LoraModules().check("lora_modules", given["lora_modules"])
    assert given == wanted and len(wanted) >= 18
    assert EngineConfig.of(**given).scheduler == SchedulerConfig(9, 99, 7, 33, True, 0.5)


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["generate"],
        ["chat"],
        ["bench", "throughput"],
        ["bench", "speculative"],
        ["bench", "structured"],
        ["bench", "latency"],
        ["bench", "perplexity", "--file", "text.txt"],
    ],
)
def test_commands_take_the_same_engine_options(command):
    flags = ["--device", "cpu", "--dtype", "f32", "--threads", "2", "--tensor-parallel-size", "1",
             "--distributed-executor-backend", "uni", "--prefix-cache-min-match", "4",
             "--no-prefix-caching", "--num-kv-blocks", "5", "--step-timeout", "3"]  # fmt: skip
    config = EngineConfig.of(**given_engine_options(build_parser().parse_args(command + flags)))
    assert (config.n_threads, config.dtype, config.step_timeout) == (2, "f32", 3.0)
    assert config.cache == CacheConfig(
        num_kv_blocks=5, enable_prefix_caching=False, prefix_cache_min_match=4
    )


def test_the_signature_of_llm_shows_every_option():
    shown = inspect.signature(LLM).parameters
    assert next(iter(shown)) == "model" and {"tokenizer", "adapter_class"} <= set(shown)
    for _, name, _, default in engine_options():
        assert shown[name].default == default


def test_every_create_parameter_reaches_the_library():
    """The 23 parameters of 002 section 6, set in Python and read back from the model."""
    parallel = ParallelConfig(
        master_addr="10.0.0.7", master_port=1234, init_method="tcp://there:1", tp_group_name="G",
        vocab_parallel_head=False, replicate_kv_heads=True,
    )  # fmt: skip
    options = AdapterOptions(
        kv_cache_layout="block", kv_cache_block_size=8, kv_cache_capacity_tokens=64,
        max_model_len=32, max_batch_tokens=24, n_threads=1, parallel=parallel,
        kv_cache_dtype="f16",
    )  # fmt: skip
    adapter = MockAdapter.load(None, options)
    try:
        params = adapter.native.params
        for name in PARALLEL_FIELDS:
            found = getattr(params, name)
            wanted = getattr(parallel, name)
            assert (found.decode() if isinstance(found, bytes) else found) == wanted, name
        assert (params.model_type, params.device, params.ndevice) == (2, 0, 1)
        assert bytes(int32_copy(params.device_ids, 1)) == bytes(4)  # device 0
        assert (params.kv_cache_layout, params.kv_cache_block_size) == (1, 8)
        assert (params.max_model_len, params.kv_cache_capacity_tokens) == (32, 64)
        assert (params.n_threads, params.max_batch_tokens) == (1, 24)
        assert params.kv_cache_dtype == dtype_code("f16")
    finally:
        adapter.close()
    ours = {"model_type", "meta", "device", "device_ids", "ndevice", "kv_cache_layout",
            "kv_cache_block_size", "max_model_len", "kv_cache_capacity_tokens"}  # fmt: skip
    names = [name for name, *_ in LlaisysModelCreateParams._fields_]
    later = {"vocab_parallel_head", "replicate_kv_heads"}
    assert later <= set(names[23:]) and set(names[:23]) == ours | set(PARALLEL_FIELDS) - later
