"""Opens the files of a model and computes how many KV blocks this rank has memory for.

Nothing large is allocated here.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llaisys.common.closing import closed_on_error
from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.machine_limits import available_memory, cores_within, cpu_quota, usable_cores
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.parallel import ParallelConfig
from llaisys.common.progress import report
from llaisys.common.sampling import NEUTRAL
from llaisys.common.types import ModelInfo
from llaisys.common.validation import check_int, invalid_value
from llaisys.engine.config import EngineConfig, SpeculativeConfig
from llaisys.engine.worker.lora_store import OpenedLoras, open_loras
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.device import MemoryNeeds, is_gpu, kv_budget

if TYPE_CHECKING:
    from llaisys.models.loading.checkpoint import Checkpoint

DEFAULT_KV_TOKENS = 32768  # capacity of the KV cache without an option, memory permitting
DEFAULT_KV_FRACTION = 0.4  # of the available memory
MAX_KV_FRACTION = 0.8  # of the available memory beside the model
MAX_GPU_BLOCKS = 1 << 16  # bounds the bookkeeping of the block manager
MAX_KV_SLOTS = 1 << 25  # limit of the native library
MAX_HOST_BLOCKS = 1 << 20
TRANSFER_FRACTION = 1 / 8  # of the available memory, for blocks that move between engines
logger = logging.getLogger("llaisys.engine")

MODELS_WITHOUT_FILES = ("mock",)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model with open files and without weights. The loaded adapter owns the checkpoint."""

    path: str
    model_type: str
    checkpoint: Any  # Checkpoint, DraftHeadFiles, or None for models without files
    adapter_class: type[ModelAdapter]
    options: AdapterOptions
    kv_bytes_per_token: int
    affordable_blocks: int
    num_host_blocks: int = 0  # host slots for evicted blocks
    draft: OpenedModel | None = None  # draft model or head, on the driver rank
    has_checked_vocabulary: bool = False  # of a draft model: equal to the model's
    loras: OpenedLoras | None = None  # None: adapters are off

    def memory_needs(self, max_num_seqs: int) -> MemoryNeeds:
        needs = self.adapter_class.memory_needs(self.checkpoint, self.options, max_num_seqs)
        return needs if self.loras is None else needs + self.loras.memory_needs

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()
        if self.draft is not None:
            self.draft.close()


def open_model(
    config: EngineConfig, rank: int = 0, local_rank: int = 0, init_method: str = ""
) -> OpenedModel:
    path, model_type, checkpoint = _open_checkpoint(config)
    draft = None
    try:
        adapter_class = config.adapter_class or get_adapter_class(model_type)
        options = _adapter_options(config, rank, local_rank, init_method)
        per_token = int(adapter_class.kv_bytes_per_token(checkpoint, options))
        draft = _open_draft(config, options, checkpoint) if rank == 0 else None
        # A draft model has as many blocks from the same budget.
        both = per_token + (0 if draft is None else draft.kv_bytes_per_token)
        seqs = config.scheduler.max_num_seqs
        needs = adapter_class.memory_needs(checkpoint, options, seqs)
        loras = open_loras(config.lora, adapter_class, checkpoint, options)
        if loras is not None:
            needs += loras.memory_needs
        if draft is not None:
            needs += draft.memory_needs(seqs)
        blocks = _kv_blocks(config, options.device_ids[local_rank], checkpoint, both, needs)
        if getattr(checkpoint and checkpoint.config, "encoder", None) is not None:
            _check_encoder(config, model_type)
            # It keeps nothing between steps: the blocks of the largest step.
            full = -(-config.scheduler.token_budget // config.cache.block_size)
            blocks = min(blocks, full + seqs)
        host_blocks = _host_blocks(config, per_token, blocks)
    except BaseException:
        for opened in (checkpoint, draft):
            if opened is not None:
                opened.close()
        raise
    return OpenedModel(
        *(path, model_type, checkpoint, adapter_class, options, per_token, blocks),
        num_host_blocks=host_blocks,
        draft=draft,
        loras=loras,
    )


def _check_encoder(config: EngineConfig, model_type: str) -> None:
    """Raise for options that only models that generate text have."""
    for name, is_set in (
        ("context_shift", config.scheduler.context_shift),
        ("speculative_config", config.speculative is not None),
        ("pipeline_parallel_size", config.parallel.pipeline_parallel_size > 1),
    ):
        if is_set:
            raise invalid_value(name, model_type, "off for an encoder")


def _open_draft(
    config: EngineConfig, options: AdapterOptions, target: Checkpoint | None
) -> OpenedModel | None:
    """Open the draft model of speculative_config; its vocabulary must be that of `target`."""
    speculative = config.speculative
    if speculative is None or not speculative.has_weights:
        return None
    path, adapter_class, checkpoint, is_checked = _open_draft_files(config, speculative, target)
    with closed_on_error(checkpoint):
        length = options.max_model_len
        if checkpoint is not None:
            limit = checkpoint.config.max_position_embeddings
            length = min(length or limit, limit)
        options = replace(
            options,
            dtype="auto",
            quantization=None,
            device_ids=options.device_ids[:1],
            max_model_len=length,
            n_threads=config.n_threads,
            parallel=ParallelConfig(),
        )
        per_token = int(adapter_class.kv_bytes_per_token(checkpoint, options))
    return OpenedModel(
        *(path, speculative.method, checkpoint, adapter_class, options, per_token, 0),
        has_checked_vocabulary=is_checked,
    )


def _open_draft_files(
    config: EngineConfig, speculative: SpeculativeConfig, target: Checkpoint | None
) -> tuple[str, type[ModelAdapter], Any, bool]:
    """Return (path, adapter class, files, whether the vocabulary was compared)."""
    from llaisys.models.loading.resolve import resolve_model

    if speculative.is_head:
        from llaisys.models.draft_head import DraftHeadAdapter, open_draft_head

        if target is None:
            raise invalid_value(
                "speculative_config.method", speculative.method, "of a model with files"
            )
        path = None if speculative.model is None else resolve_model(speculative.model)
        head = open_draft_head(path, target)
        return head.where, DraftHeadAdapter, head, True
    own = replace(
        config, model=speculative.model, revision=None, model_type=None, adapter_class=None
    )
    name, model_type, checkpoint = _open_checkpoint(own)
    with closed_on_error(checkpoint):
        is_checked = False
        if checkpoint is not None and target is not None:
            from llaisys.models.loading.vocabulary import check_same_vocabulary

            is_checked = check_same_vocabulary(target, checkpoint)
        return name, get_adapter_class(model_type), checkpoint, is_checked


def _open_checkpoint(config: EngineConfig) -> tuple[str, str, Checkpoint | None]:
    """Return (path, model type, checkpoint); the checkpoint is None for models without files."""
    model = config.model
    kind = config.model_type or (model if model in MODELS_WITHOUT_FILES else None)
    if kind is not None and config.adapter_class is None:
        get_adapter_class(kind)  # reject before a download
    if kind in MODELS_WITHOUT_FILES or (model is None and config.adapter_class is not None):
        name = kind or config.adapter_class.__name__
        return name, name, None
    from llaisys.models.families import open_checkpoint
    from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model

    report("opening the model")
    path = resolve_model(model or DEFAULT_MODEL, revision=config.revision)
    checkpoint = open_checkpoint(path)
    found = checkpoint.config.model_type
    if kind is not None and kind != found:
        checkpoint.close()
        raise ModelLoadError(f"model_type is {kind!r}; {path} holds a {found!r} model")
    return str(path), found, checkpoint


def _generation_defaults(setting: str, checkpoint: Any) -> dict[str, Any]:
    """The sampling defaults that the option `generation_config` selects."""
    from llaisys.models.loading.json_config import read_generation

    if setting in ("none", "vllm"):
        return dict(NEUTRAL)
    if setting != "auto":
        return read_generation(Path(setting))
    return {} if checkpoint is None else dict(checkpoint.config.generation)


def describe(opened: OpenedModel, adapter: ModelAdapter, config: EngineConfig) -> ModelInfo:
    """Return the description of a loaded model. InvalidInputError: no KV block fits."""
    checkpoint, block_size = opened.checkpoint, config.cache.block_size
    info = ModelInfo(
        model_path=opened.path,
        model_type=opened.model_type,
        vocab_size=adapter.vocab_size,
        max_model_len=_usable_length(config, adapter),
        eos_token_ids=tuple(adapter.eos_token_ids),
        num_blocks=adapter.kv_capacity_tokens // block_size,
        block_size=block_size,
        kv_bytes_per_token=opened.kv_bytes_per_token,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        num_host_blocks=opened.num_host_blocks,
        hidden_size=adapter.hidden_size,
        pooling=_pooling(config, opened),
        is_encoder=adapter.is_encoder,
        scores_pairs=adapter.score_head is not None,
        judges_pairs=adapter.score_head is not None and adapter.score_head.is_judge,
        generation_defaults=_generation_defaults(config.generation_config, checkpoint),
        device=config.device,
        tokenizer_source=getattr(checkpoint, "tokenizer_source", None),
        max_loras=0 if opened.loras is None else opened.loras.num_slots,
        max_lora_rank=0 if opened.loras is None else opened.loras.max_rank,
        weight_type="" if checkpoint is None else checkpoint.weight_type(),
        metadata={} if checkpoint is None else checkpoint.metadata(),
    )
    if info.num_blocks < 1:
        raise InvalidInputError(
            f"the KV cache has room for {adapter.kv_capacity_tokens} tokens; one block needs "
            f"{block_size}: raise kv_cache_memory_bytes",
            field="kv_cache_memory_bytes",
            value=adapter.kv_capacity_tokens,
            limit=f"room for {block_size} tokens",
        )
    return info


def _pooling(config: EngineConfig, opened: OpenedModel) -> str:
    """Return the default pooling of embeddings: the option, or that of the model."""
    if config.pooling != "auto":
        return config.pooling
    source = getattr(opened.checkpoint, "tokenizer_source", None)
    found = None
    if source is not None and source.directory is not None:
        from llaisys.models.loading.sentence_transformers import declared_pooling

        found = declared_pooling(Path(source.directory))
    encoder = getattr(opened.checkpoint and opened.checkpoint.config, "encoder", None)
    return found or ("last" if encoder is None else str(encoder.pooling))


def _usable_length(config: EngineConfig, adapter: ModelAdapter) -> int:
    """Return the maximum context: at least two whole blocks with context shift, at most one step
    of an encoder."""
    max_model_len = adapter.max_model_len
    budget = config.scheduler.token_budget
    if adapter.is_encoder and max_model_len > budget:
        logger.warning(
            "texts of up to %d tokens: an encoder computes a text in one step of "
            "max_num_batched_tokens; the model supports %d",
            *(budget, max_model_len),
        )
        return budget
    if not config.scheduler.context_shift:
        return max_model_len
    size = config.cache.block_size
    if max_model_len < 2 * size:
        raise invalid_value(
            "max_model_len", max_model_len, f"at least 2 blocks of {size} to be shifted"
        )
    return max_model_len // size * size


def device_ids(config: EngineConfig) -> tuple[int, ...]:
    """Return a device per rank of this machine; CPU ranks budget device 0."""
    if not is_gpu(config.device):
        return (0,) * config.parallel.world_size
    return tuple(config.parallel.tensor_parallel_device_ids or (0,))


def threads_of(config: EngineConfig) -> int:
    """Return the CPU threads of a rank: the option, or its part of the usable cores."""
    size = config.parallel.world_size
    if config.n_threads:
        return config.n_threads
    share = max(1, usable_cores() // size)
    if config.parallel.numa and size > 1:  # this thread is bound to the cores of its rank
        quota = cpu_quota()
        return cores_within(len(os.sched_getaffinity(0)), None if quota is None else quota / size)
    return share


def _adapter_options(
    config: EngineConfig, rank: int, local_rank: int, init_method: str
) -> AdapterOptions:
    parallel = replace(config.parallel, rank=rank, local_rank=local_rank, init_method=init_method)
    return AdapterOptions(
        device=config.device,
        device_ids=device_ids(config),
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        kv_cache_layout="block",
        kv_cache_block_size=config.cache.block_size,
        max_model_len=config.max_model_len or 0,
        max_batch_tokens=config.scheduler.token_budget,
        n_threads=threads_of(config),
        exact=config.exact,
        parallel=parallel,
    )


def _kv_blocks(
    config: EngineConfig,
    device_id: int,
    checkpoint: Checkpoint | None,
    bytes_per_token: int,
    needs: MemoryNeeds,
) -> int:
    """Return the requested KV blocks, or those that fit into the memory of this rank beside the
    model."""
    cache, on_gpu = config.cache, is_gpu(config.device)
    most = MAX_KV_SLOTS // cache.block_size
    if cache.num_kv_blocks is not None:
        return check_int("num_kv_blocks", cache.num_kv_blocks, 1, most)
    block_bytes = max(1, bytes_per_token) * cache.block_size
    if on_gpu:
        share = cache.gpu_memory_utilization / config.parallel.ranks_per_device
        available = kv_budget(config.device, device_id, share, needs)
        owner = f"the GPU has beside {needs.total} for the model; device cpu uses CPU memory"
        most = MAX_GPU_BLOCKS
    else:
        available, owner = available_memory(), "this machine has available"
    requested = cache.kv_cache_memory_bytes
    if requested is None and not on_gpu:
        return _default_blocks(config, checkpoint, available, block_bytes, needs)
    requested = available if requested is None else requested
    if not block_bytes <= requested <= available:
        raise invalid_value(
            "kv_cache_memory_bytes",
            requested,
            f"from {block_bytes}, one block of {cache.block_size} tokens, to {available}, the "
            f"bytes that {owner}",
        )
    return int(min(requested // block_bytes, most))


def _default_blocks(
    config: EngineConfig,
    checkpoint: Checkpoint | None,
    available: int,
    block_bytes: int,
    needs: MemoryNeeds,
) -> int:
    """Return the KV blocks of a rank on the CPU without an option; ranks divide the memory."""
    length = config.max_model_len or 0
    if checkpoint is not None and not length:
        length = min(checkpoint.config.max_position_embeddings, DEFAULT_KV_TOKENS)
    wanted = -(-max(length, DEFAULT_KV_TOKENS) // config.cache.block_size)
    available //= config.parallel.world_size
    model = needs.weights + needs.activations + needs.logits
    if model > available:
        logger.warning(
            "the model needs about %.1f GiB of memory; %.1f GiB are available",
            *(model / (1 << 30), available / (1 << 30)),
        )
    budget = min(available * DEFAULT_KV_FRACTION, (available - model) * MAX_KV_FRACTION)
    return max(1, min(wanted, int(budget) // block_bytes))


def _host_blocks(config: EngineConfig, bytes_per_token: int, num_blocks: int) -> int:
    """Return the host slots of this rank: an equal part of kv_offload. `num_blocks`: of the KV
    cache."""
    cache = config.cache
    if not cache.kv_offload and cache.kv_transfer == "off":
        return 0
    for name, value, off in (
        ("kv_transfer", cache.kv_transfer, "off"),
        ("kv_offload", cache.kv_offload, 0),
    ):
        if value != off and not cache.enable_prefix_caching:
            raise invalid_value(name, value, f"{off} without the prefix cache")
    available = available_memory()
    block_bytes = config.parallel.world_size * max(1, bytes_per_token) * cache.block_size
    if not cache.kv_offload:
        affordable = int(available * TRANSFER_FRACTION) // block_bytes
        return max(1, min(num_blocks, affordable, MAX_HOST_BLOCKS))
    if not block_bytes <= cache.kv_offload <= available:
        raise invalid_value(
            "kv_offload",
            cache.kv_offload,
            f"0, or from {block_bytes}, one block of {cache.block_size} tokens, to {available}, "
            "the bytes this machine has available",
        )
    return min(cache.kv_offload // block_bytes, MAX_HOST_BLOCKS)
