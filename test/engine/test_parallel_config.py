"""Configuration: normalize_parallel_config (002 section 5) and the checks of the others."""

from __future__ import annotations

import dataclasses

import pytest
from engine_fakes import make_config
from error_helpers import invalid_input

from llaisys.common.errors import InvalidInputError
from llaisys.engine.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    normalize_parallel_config,
)
from llaisys.engine.executor import Executor, UniProcExecutor
from llaisys.engine.executor.mp import MultiprocExecutor


def test_fields_are_those_of_the_seeds_and_three_more():
    names = {field.name for field in dataclasses.fields(ParallelConfig)}
    assert names - {"vocab_parallel_head", "replicate_kv_heads", "numa"} == set(
        "pipeline_parallel_size tensor_parallel_size distributed_executor_backend master_addr "
        "master_port node_rank nnodes world_size rank local_rank distributed_backend "
        "init_method tp_group_name use_single_process_tp tensor_parallel_device_ids".split()
    )


def test_derived_fields_are_filled():
    config = normalize_parallel_config(
        ParallelConfig(tensor_parallel_size=4, world_size=9, rank=3, local_rank=2)
    )
    assert (config.world_size, config.rank, config.local_rank) == (4, 0, 0)
    assert config.tensor_parallel_device_ids == (0, 1, 2, 3)
    assert config.use_single_process_tp and config.init_method == "tcp://127.0.0.1:29501"
    assert normalize_parallel_config(config) == config


def test_rank_0_is_in_the_last_stage():
    config = normalize_parallel_config(
        ParallelConfig(pipeline_parallel_size=3, tensor_parallel_size=2)
    )
    assert config.distributed_executor_backend == "mp" and not config.use_single_process_tp
    assert config.world_size == 6 and config.tensor_parallel_device_ids == tuple(range(6))
    ranks = [dataclasses.replace(config, rank=rank) for rank in range(6)]
    assert [rank.stage for rank in ranks] == [2, 2, 1, 1, 0, 0]
    assert [rank.is_last_stage for rank in ranks] == [True, True, False, False, False, False]
    assert [rank.tensor_parallel_rank for rank in ranks] == [0, 1, 0, 1, 0, 1]


def test_ranks_that_share_a_gpu_need_processes():
    config = EngineConfig.of(
        model="mock", device="cuda", tensor_parallel_size=2, tensor_parallel_device_ids=(1, 1)
    )
    assert config.parallel.ranks_per_device == 2
    with invalid_input("tensor_parallel_device_ids") as error:
        UniProcExecutor(config)
    assert (error.value.field, error.value.value) == ("tensor_parallel_device_ids", [1, 1])


def test_numa_is_rejected_with_ray():
    with invalid_input("numa"):
        normalize_parallel_config(ParallelConfig(distributed_executor_backend="ray", numa=True))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"distributed_executor_backend": "tpu"}, "'tpu'; it must be one of uni, mp, ray"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'"),
        ({"tensor_parallel_device_ids": [0, 1]}, "has 2 ids; it must have one for each rank, 1"),
        ({"tensor_parallel_device_ids": [-1]}, "tensor_parallel_device_ids[0] is -1"),
        ({"master_port": 0}, "master_port is 0"),
        ({"master_addr": ""}, "master_addr is ''"),
        ({"node_rank": 1}, "node_rank is 1"),
    ],
)
def test_invalid_values_are_rejected_with_field_and_value(changes, text):
    with pytest.raises(ValueError) as caught:
        normalize_parallel_config(ParallelConfig(**changes))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"nnodes": 2}, {"distributed_backend": "gloo"}],
    ids=str,
)
def test_unimplemented_options_raise(changes):
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        normalize_parallel_config(ParallelConfig(**changes))


def test_engine_config_normalises_and_picks_the_executor():
    config = make_config()
    assert config.parallel.world_size == 1 and Executor.get_class(config) is UniProcExecutor
    processes = make_config(parallel=ParallelConfig(distributed_executor_backend="mp"))
    assert not processes.parallel.use_single_process_tp
    assert Executor.get_class(processes) is MultiprocExecutor
    with invalid_input("adapter_class"):
        MultiprocExecutor(processes)  # a class of this process


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs is 0"),
        (lambda: SchedulerConfig(max_num_batched_tokens=1.5), "max_num_batched_tokens is 1.5"),
        (lambda: SchedulerConfig(64, 32), "max_num_batched_tokens is 32; it must be at least"),
        (lambda: CacheConfig(block_size=0), "block_size is 0"),
        (lambda: CacheConfig(kv_cache_memory_bytes=-1), "kv_cache_memory_bytes is -1"),
        (lambda: CacheConfig(enable_prefix_caching="yes"), "enable_prefix_caching is 'yes'"),
        (lambda: CacheConfig(prefix_cache_min_match=-1), "prefix_cache_min_match is -1"),
        (lambda: EngineConfig(model=""), "model is ''"),
        (lambda: EngineConfig(dtype="int3"), "dtype is 'int3'"),
        (lambda: EngineConfig(max_model_len=1), "max_model_len is 1"),
        (lambda: EngineConfig(step_timeout=float("nan")), "step_timeout is nan"),
        (lambda: EngineConfig(seed=-1), "seed is -1"),
    ],
)
def test_configuration_errors_name_field_and_value(make, text):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert text in str(caught.value)


def test_dtype_names_of_other_tools_are_accepted():
    assert EngineConfig(dtype="bfloat16").dtype == "bf16"
    assert EngineConfig(dtype="float32").dtype == "f32"


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().max_num_seqs = 3
