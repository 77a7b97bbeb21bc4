"""The engine's configuration: frozen, every field documented, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from llaisys.common.validation import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_text,
    check_token_ids,
    refuse,
    refuse_count,
)

EXECUTOR_BACKENDS = ("uni", "mp", "ray")
DTYPES = ("auto", "f32", "f16", "bf16")
DTYPE_NAMES = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int = 2048  # tokens of a step, prompts and decoding together
    min_prefill_chunk: int = 64  # smallest piece that sharing cuts a long prompt into

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1, 65536)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("min_prefill_chunk", self.min_prefill_chunk, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise refuse(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs, {self.max_num_seqs}, so that every running request can "
                "go on",
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: one pool of blocks."""

    block_size: int = 16  # token slots per block
    kv_cache_memory: int | None = None  # bytes; None: the worker picks a modest size
    num_blocks: int | None = None  # overrides kv_cache_memory
    enable_prefix_caching: bool = True
    prefix_cache_min_match: int = 0  # tokens; a shorter match is not used

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1, 1024)
        if self.kv_cache_memory is not None:
            check_int("kv_cache_memory", self.kv_cache_memory, 1, 1 << 62)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, 1)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_int("prefix_cache_min_match", self.prefix_cache_min_match, 0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The seeds' fields (002 section 5); `normalize_parallel_config` fills the derived ones."""

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    distributed_executor_backend: str = "uni"  # uni | mp | ray; mp and ray are not there yet
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_rank: int = 0
    nnodes: int = 1
    world_size: int = 1  # derived
    rank: int = 0  # derived
    local_rank: int = 0  # derived
    distributed_backend: str = "nccl"
    init_method: str = ""  # empty: tcp://master_addr:master_port
    tp_group_name: str = "TP0"
    use_single_process_tp: bool = True  # derived
    tensor_parallel_device_ids: tuple[int, ...] | list[int] | None = None  # None: 0, 1, 2, ..


def normalize_parallel_config(config: ParallelConfig) -> ParallelConfig:
    """A checked copy with world size, ranks and device ids filled in (002 section 5.2).

    ValueError names the field and its value; NotImplementedError means "not in this release".
    """
    size = check_int("tensor_parallel_size", config.tensor_parallel_size, 1, 1024)
    backend = config.distributed_executor_backend
    check_choice("distributed_executor_backend", backend, EXECUTOR_BACKENDS)
    if backend != "uni":
        raise NotImplementedError(
            f"distributed_executor_backend is {backend!r}; only 'uni' is implemented"
        )
    if config.distributed_backend != "nccl":
        raise NotImplementedError(
            f"distributed_backend is {config.distributed_backend!r}; only 'nccl' is supported"
        )
    for name in ("pipeline_parallel_size", "nnodes"):
        if check_int(name, getattr(config, name), 1) != 1:
            raise NotImplementedError(f"{name} is {getattr(config, name)}; only 1 is implemented")
    check_int("node_rank", config.node_rank, 0, config.nnodes - 1)
    check_int("master_port", config.master_port, 1, 65535)
    check_text("master_addr", config.master_addr)
    check_text("tp_group_name", config.tp_group_name)
    ids = config.tensor_parallel_device_ids
    devices = tuple(range(size)) if ids is None else tuple(ids)
    if len(devices) != size:
        raise refuse_count(
            "tensor_parallel_device_ids", len(devices), "ids", f"tensor_parallel_size, {size}"
        )
    check_token_ids("tensor_parallel_device_ids", devices, size)
    if len(set(devices)) != len(devices):
        raise refuse("tensor_parallel_device_ids", list(devices), "a list without duplicates")
    return replace(
        config,
        world_size=size,
        rank=0,
        local_rank=0,
        init_method=config.init_method or f"tcp://{config.master_addr}:{config.master_port}",
        use_single_process_tp=True,
        tensor_parallel_device_ids=devices,
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from."""

    model: str | None = None  # directory, GGUF file or hub name; None: the default model
    model_type: str | None = None  # None: what the model's config says
    tokenizer: Any = None  # a Tokenizer to use instead of the model's own
    adapter_class: Any = None  # a ModelAdapter class to use instead of the registry's
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None  # None: the model's own limit
    n_threads: int = 0  # 0: one per core
    seed: int | None = None  # of the generator that gives seeds to requests without one
    step_timeout: float | None = None  # seconds; None: a step may take as long as it takes
    warmup: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for name in ("model", "model_type"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        check_text("device", self.device)
        dtype = DTYPE_NAMES.get(self.dtype, self.dtype)
        object.__setattr__(self, "dtype", check_choice("dtype", dtype, DTYPES))
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        check_int("n_threads", self.n_threads, 0, 4096)
        if self.seed is not None:
            check_int("seed", self.seed, 0, (1 << 64) - 1)
        if self.step_timeout is not None:
            check_float("step_timeout", self.step_timeout, 0, above_low=True)
        check_bool("warmup", self.warmup)
        object.__setattr__(self, "parallel", normalize_parallel_config(self.parallel))
