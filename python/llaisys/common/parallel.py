"""Distribution of the ranks of a model over devices and processes (002 section 5)."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from llaisys.common.options import Choice, Integer, Integers, Switch, Text, check_options, option
from llaisys.common.validation import check_int, invalid_count, invalid_value

MAX_RANKS = 64  # limit of the native library
EXECUTOR_BACKENDS = ("uni", "mp", "ray")
_option = partial(option, group="parallel")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The fields of the seeds, then further ones; `normalize_parallel_config` fills the derived
    ones."""

    pipeline_parallel_size: int = _option(
        1, Integer(1, MAX_RANKS), "Pipeline stages, each with a part of the layers",
        aliases=("-pp",), more="Stages are processes: the backend `uni` becomes `mp`.",
    )  # fmt: skip
    tensor_parallel_size: int = _option(
        1, Integer(1, MAX_RANKS), "Tensor-parallel ranks", common=True, aliases=("-tp",)
    )
    distributed_executor_backend: str = _option(
        "uni", Choice(EXECUTOR_BACKENDS), "Where ranks run",
        more="`uni`: threads; `mp`: processes; `ray`: actors of a Ray cluster.",
    )  # fmt: skip
    master_addr: str = _option("127.0.0.1", Text(), "Rendezvous address", flag=None)
    master_port: int = _option(29501, Integer(1, 65535), "Rendezvous port", flag=None)
    node_rank: int = _option(0, Integer(0), "Index of this node", flag=None)
    nnodes: int = _option(1, Integer(1), "Nodes; only 1", flag=None)
    world_size: int = 1  # derived
    rank: int = 0  # derived
    local_rank: int = 0  # derived
    distributed_backend: str = _option("nccl", Text(), "Backend of the collectives", flag=None)
    init_method: str = _option(
        "", Text(may_be_empty=True), "Rendezvous URL", flag=None,
        default_text="tcp://MASTER_ADDR:MASTER_PORT",
    )  # fmt: skip
    tp_group_name: str = _option("TP0", Text(), "Name of the process group", flag=None)
    use_single_process_tp: bool = True  # derived
    tensor_parallel_device_ids: tuple[int, ...] | list[int] | None = _option(
        None, Integers(), "Device of each rank", default_text="0,1,2,...",
        more="Ranks with the same GPU need the backend `mp`.",
    )  # fmt: skip
    vocab_parallel_head: bool = _option(True, Switch(), "Shard the LM head over the ranks")
    replicate_kv_heads: bool = _option(
        False, Switch(), "Allow more ranks than KV heads; ranks share copies"
    )
    numa: bool = _option(False, Switch(), "Bind CPU ranks to NUMA nodes and their cores")

    @property
    def stage(self) -> int:
        """The pipeline stage of `rank`. Rank 0 is in the last stage, which samples."""
        return self.pipeline_parallel_size - 1 - self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def tensor_parallel_rank(self) -> int:
        """`rank` within its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def ranks_per_device(self) -> int:
        """The most ranks that share a device; more than 1 for tests."""
        ids = self.tensor_parallel_device_ids or (0,)
        return max(Counter(ids).values())

    def kv_copies(self, num_kv_heads: int) -> int:
        """Ranks with a copy of each KV head; 1 unless the ranks are a multiple of the heads."""
        size = self.tensor_parallel_size
        if self.replicate_kv_heads and num_kv_heads < size and size % num_kv_heads == 0:
            return size // num_kv_heads
        return 1


def normalize_parallel_config(config: ParallelConfig) -> ParallelConfig:
    """Return a validated copy with world size, ranks and device ids (002 section 5.2).

    ValueError names the field and its value; NotImplementedError means "not in this release".
    """
    config = replace(config)
    check_options(config)
    config = _with_stages(config)
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.numa and config.distributed_executor_backend == "ray":
        raise invalid_value("numa", True, "off with ray, which chooses where ranks run")
    if config.distributed_backend != "nccl":
        raise NotImplementedError(
            f"distributed_backend is {config.distributed_backend!r}; only 'nccl' is supported"
        )
    if config.nnodes != 1:
        raise NotImplementedError(f"nnodes is {config.nnodes}; only 1 is implemented")
    check_int("node_rank", config.node_rank, 0, config.nnodes - 1)
    ids = config.tensor_parallel_device_ids
    devices = tuple(range(size)) if ids is None else tuple(ids)
    if len(devices) != size:
        raise invalid_count(
            "tensor_parallel_device_ids", len(devices), "ids", f"one for each rank, {size}"
        )
    return replace(
        config,
        world_size=size,
        rank=0,
        local_rank=0,
        init_method=config.init_method or f"tcp://{config.master_addr}:{config.master_port}",
        use_single_process_tp=config.distributed_executor_backend == "uni",
        tensor_parallel_device_ids=devices,
    )


def _with_stages(config: ParallelConfig) -> ParallelConfig:
    """Check the number of pipeline stages, which are processes."""
    stages, size = config.pipeline_parallel_size, config.tensor_parallel_size
    backend = config.distributed_executor_backend
    if stages > 1 and backend == "uni":
        backend = "mp"
    most = 1 if backend == "ray" and size > 1 else MAX_RANKS // size
    if stages > most:
        limit = f"at most {most} with backend {backend} and tensor_parallel_size {size}"
        raise invalid_value("pipeline_parallel_size", stages, limit)
    return replace(config, distributed_executor_backend=backend)
