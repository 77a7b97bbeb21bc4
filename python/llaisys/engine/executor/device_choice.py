"""The device of an engine, before its native library is loaded."""

import logging
from dataclasses import replace

from llaisys.common.logs import DEVICE_LOGGER
from llaisys.engine.config import EngineConfig
from llaisys.models.device import choose_device, requested_device, require_cuda

logger = logging.getLogger(DEVICE_LOGGER)

MODELS_ON_CPU = ("mock",)
GPU_TOKEN_BUDGET = 4096  # larger chunks of a prompt are not faster on an H200


def resolve_device(
    config: EngineConfig, replica: int = 0, replicas: int = 1, cpu_reason: str = ""
) -> EngineConfig:
    """Return the configuration with device `cpu` or `cuda`; on CUDA, with the devices of this
    replica and the token budget of a GPU. One log line, of the first replica, reports the choice
    of `auto`; other choices are debug lines.

    `cpu_reason`: why `auto` must be the CPU, apart from the engine options. Raises
    InvalidInputError when CUDA is requested and does not work.
    """
    requested = requested_device(config.device)
    if requested == "cpu":
        chosen, reason, num_gpus = "cpu", "as requested", 0
    else:
        ranks = config.parallel.world_size
        ids = config.parallel.tensor_parallel_device_ids or (0,)
        is_ray = config.parallel.distributed_executor_backend == "ray"
        if is_ray:
            ids = (0,)  # Ray chooses the GPUs of the others
        if requested == "cuda":
            choice = require_cuda(ids, ranks)
        else:
            every_id = range(ranks * replicas) if _has_default_ids(config) and not is_ray else ids
            choice = choose_device(every_id, ranks, cpu_reason or cpu_option(config))
        chosen, reason, num_gpus = choice.device, choice.reason, choice.num_gpus
    if config.device == "auto" and requested != "auto":
        reason = "set by LLAISYS_DEVICE"
    level = logging.INFO if config.device == "auto" and replica == 0 else logging.DEBUG
    model = config.model or "the default one"
    logger.log(level, "device %s: %s", chosen, reason, extra={"model": model})
    config = replace(config, device=chosen)
    scheduler = config.scheduler
    if chosen == "cuda" and scheduler.max_num_batched_tokens is None:
        budget = max(GPU_TOKEN_BUDGET, scheduler.max_num_seqs)
        config = replace(config, scheduler=replace(scheduler, max_num_batched_tokens=budget))
    return _placed(config, replica, replicas, num_gpus)


def cpu_option(config: EngineConfig) -> str:
    """The option that only the CPU supports; empty: none."""
    if config.adapter_class is not None:
        return "adapter_class is set"
    if (config.model_type or config.model) in MODELS_ON_CPU:
        return "the model has no weights"
    return ""


def _has_default_ids(config: EngineConfig) -> bool:
    ids = config.parallel.tensor_parallel_device_ids
    return ids is None or tuple(ids) == tuple(range(config.parallel.world_size))


def _placed(config: EngineConfig, replica: int, replicas: int, num_gpus: int) -> EngineConfig:
    """Give each replica GPUs of its own when there are enough; otherwise replicas share them."""
    ranks = config.parallel.world_size
    is_ray = config.parallel.distributed_executor_backend == "ray"
    if replicas == 1 or num_gpus < ranks * replicas or not _has_default_ids(config) or is_ray:
        return config
    ids = tuple(range(replica * ranks, (replica + 1) * ranks))
    return replace(config, parallel=replace(config.parallel, tensor_parallel_device_ids=ids))
