"""The adapter of decoder models: creates the native model and loads its weights."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Self

from llaisys.common.closing import closed_on_error
from llaisys.common.parallel import ParallelConfig
from llaisys.common.progress import report
from llaisys.common.validation import check_choice, invalid_value
from llaisys.libllaisys.handles import Stream, Tensor, linear_weight_bytes
from llaisys.libllaisys.model_handle import lora_bytes, scratch_bytes
from llaisys.libllaisys.types import DTYPE_BYTES, MODEL_TYPES, QUANTISED_DTYPES, LlaisysDecoderMeta
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder_meta import decoder_meta
from llaisys.models.device import MemoryNeeds
from llaisys.models.families.decoder_tensors import (
    GLOBAL_NAMES,
    OUTPUT_FIELDS,
    STACKED_FIELDS,
    STACKED_SHARDS,
    TABLE_FIELDS,
    tensors,
    weight_field,
)
from llaisys.models.families.latent import HEAD_WEIGHTS
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.load_quantization import CHOICES, ON_CPU, quantise, quantised_dtype
from llaisys.models.loading.checkpoint import Checkpoint, TensorRecord, check_coverage
from llaisys.models.loading.convert import STORAGE
from llaisys.models.loading.grouped_weight import device_blocks, span_of
from llaisys.models.loading.random_dir import RandomCheckpoint
from llaisys.models.loading.shard import Shard
from llaisys.models.native import NativeAdapter, create_params, kv_head_bytes
from llaisys.models.score_head import ClassifierHead, JudgeHead, is_judge
from llaisys.models.sharding import check_divisibility, lm_head_shard, shard_of, stage_layers
from llaisys.models.synthetic_tensors import RandomTensors
from llaisys.models.tensors import tensor_from, tensor_from_blocks

logger = logging.getLogger("llaisys.models")

ROUTER = ".mlp.gate.weight"  # f32 on the CPU
_READERS = 2  # threads that read and dequantise; more compete with the packing threads
PANEL_BYTES = 1 << 30  # at most; src/ops/linear/cuda_quantised.cu
_READ_AHEAD = 4  # tensors read ahead at most; bounds the memory
_READ_AHEAD_PART = 0.04  # of all elements, likewise; at least one tensor is read ahead


class DecoderAdapter(NativeAdapter):
    """Adapter of every family in models/families."""

    @classmethod
    def kv_bytes_per_token(cls, checkpoint: Checkpoint, options: AdapterOptions) -> int:
        config = decoder_config(checkpoint)
        dtype = options.kv_cache_dtype
        dtype = dtype_of(config, options) if dtype == "auto" else dtype
        parallel = options.parallel
        layers = max(map(len, _stages(config, parallel)))  # the same on every rank
        if config.latent is not None:  # one entry for all heads, on every rank
            _check_latent(options)
            return layers * kv_head_bytes(dtype, config.latent.entry)
        copies = parallel.kv_copies(config.num_kv_heads)
        heads = config.num_kv_heads * copies // parallel.tensor_parallel_size  # of this rank
        return 2 * layers * heads * kv_head_bytes(dtype, config.head_dim)

    @classmethod
    def memory_needs(
        cls, checkpoint: Checkpoint, options: AdapterOptions, max_num_seqs: int
    ) -> MemoryNeeds:
        config = decoder_config(checkpoint)
        params = create_params(*_native_meta(checkpoint, options), options)
        return MemoryNeeds(
            weights=sum(weight_bytes(checkpoint, options).values()),
            activations=scratch_bytes(params, max_num_seqs)
            + _kv_copy_bytes(config, options)
            + _panel_bytes(checkpoint, options),
            # A copy for masks, biases and penalties.
            logits=4 * config.vocab_size * max_num_seqs
            if config.encoder is None and options.parallel.is_last_stage
            else 0,
        )

    @classmethod
    def lora_bytes(
        cls, checkpoint: Checkpoint, options: AdapterOptions, max_loras: int, max_rank: int
    ) -> int:
        config = decoder_config(checkpoint)
        if config.encoder is not None:
            raise invalid_value("enable_lora", config.model_type, "off for an encoder")
        if config.latent is not None:
            raise invalid_value("max_loras", max_loras, "0 for a model with latent attention")
        params = create_params(*_native_meta(checkpoint, options), options)
        scratch = scratch_bytes(params, 0, max_loras, max_rank) - scratch_bytes(params, 0)
        return lora_bytes(params, max_loras, max_rank) + scratch

    @classmethod
    def _create(cls, checkpoint: Checkpoint, options: AdapterOptions) -> Self:
        check_coverage(checkpoint)
        _check_quantization(checkpoint, options)
        _report_dequantised(checkpoint, options)
        config = decoder_config(checkpoint)
        adapter = cls(*_native_meta(checkpoint, options), options)
        adapter.eos_token_ids = config.eos_token_ids
        if config.encoder is not None:
            adapter.is_encoder, adapter.can_launch = True, False
            if config.encoder.has_score:
                adapter.score_head = ClassifierHead(checkpoint, config.encoder.is_score_raw)
        elif is_judge(checkpoint):
            adapter.score_head = JudgeHead(checkpoint)
        return adapter

    def _fill(
        self, checkpoint: Checkpoint, options: AdapterOptions, check: Callable[[], None]
    ) -> None:
        """Load every weight. Reader threads dequantise and convert the next tensors while the
        library packs the current one."""
        loads = _tensor_loads(checkpoint, options)
        sizes = [prod(checkpoint.shape(load.name)) for load in loads]  # elements
        loaded, num_ahead, total = 0, 0, sum(sizes)
        read_ahead = _READ_AHEAD if options.quantization is None else 2  # plain tensors are large
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_READERS))
            random = None
            if isinstance(checkpoint, RandomCheckpoint):
                # New tensors are on the first device of their kind.
                is_first = options.parallel.world_size == 1 and options.device_ids[:1] in ((), (0,))
                device = options.device if is_first else "cpu"
                random = stack.enter_context(RandomTensors(device))
            stream = None
            if options.quantization is not None:
                stream = stack.enter_context(Stream(n_threads=options.n_threads))
            pending: deque[Future[Tensor]] = deque()
            try:
                for index, load in enumerate(loads):
                    check()
                    while len(pending) < read_ahead and index + len(pending) < len(loads):
                        ahead = loads[index + len(pending)]
                        num_ahead += sizes[index + len(pending)]
                        if len(pending) > 1 and num_ahead > _READ_AHEAD_PART * total:
                            num_ahead -= sizes[index + len(pending)]
                            break
                        arguments = (checkpoint, ahead, options, random)
                        pending.append(pool.submit(_open_tensor, *arguments))
                    report("loading weights", loaded, total)
                    tensor = pending.popleft().result()
                    num_ahead -= sizes[index]
                    if stream is not None:
                        tensor = _quantised(tensor, load.name, options, stream)
                    with tensor:
                        (field, layer), *also = load.targets
                        self.native.replace_weight(field, layer, tensor, *also)
                    loaded += sizes[index]
            finally:
                for future in pending:  # after a failure: close tensors that were read ahead
                    if future.cancel() or future.exception() is not None:
                        continue
                    future.result().close()


@dataclass(frozen=True, slots=True)
class _TensorLoad:
    """A tensor of the checkpoint and the native weights it is loaded into."""

    name: str
    shard: Shard | None  # read by this rank; None: all of it
    targets: list[tuple[str, int]]  # (weight field, layer), at least one

    def shape_in(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Shape of the part that this rank reads."""
        shape = checkpoint.shape(self.name)
        return shape if self.shard is None else self.shard.shape_in(shape)


def _tensor_loads(checkpoint: Checkpoint, options: AdapterOptions) -> list[_TensorLoad]:
    """All tensors that this rank reads, in order."""
    config, ranks = decoder_config(checkpoint), options.parallel
    size, rank = ranks.tensor_parallel_size, ranks.tensor_parallel_rank
    layers, is_first, is_last = _own_layers(config, options), ranks.stage == 0, ranks.is_last_stage
    copies = ranks.kv_copies(config.num_kv_heads)
    head = None
    if ranks.vocab_parallel_head and size > 1:
        head = lm_head_shard(config.vocab_size, size, rank)
    found = []
    for name, _ in tensors(config):
        field, layer = weight_field(name)
        is_tied = field == "in_embed" and config.tie_word_embeddings and config.encoder is None
        if name not in GLOBAL_NAMES:
            if layer not in layers:
                continue
            layer -= layers.start
        elif not (is_last if field in OUTPUT_FIELDS else is_first or (is_tied and is_last)):
            continue
        stacked = config.experts.count if config.experts and field in STACKED_SHARDS else 1
        shard = shard_of(name, field, checkpoint.shape(name), size, rank, copies, stacked)
        targets = [(field, layer)]
        if field == "out_embed":
            shard = head
        elif is_tied and is_last:
            if head is None:
                targets.append(("out_embed", 0))
            else:  # the sharded output rows are stored apart from the embedding table
                found.append(_TensorLoad(name, head, [("out_embed", 0)]))
            if not is_first:
                targets = targets[1:]
        if not targets:
            continue
        found.append(_TensorLoad(name, shard, targets))
    return found


def _stages(config: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The layers of each pipeline stage."""
    if parallel.pipeline_parallel_size == 1:
        return [range(config.num_layers)]
    last = f"model.layers.{config.num_layers - 1}."
    layer = sum(prod(shape) for name, shape in tensors(config) if name.startswith(last))
    head = config.vocab_size * config.hidden_size
    return stage_layers(config.num_layers, parallel.pipeline_parallel_size, head / layer)


def _own_layers(config: ModelConfig, options: AdapterOptions) -> range:
    """The layers of this rank."""
    return _stages(config, options.parallel)[options.parallel.stage]


def _native_meta(checkpoint: Checkpoint, options: AdapterOptions) -> tuple[str, LlaisysDecoderMeta]:
    """The native model type and the sizes of this rank's layers. Raises for options that do not fit
    them."""
    config = decoder_config(checkpoint)
    layers = _own_layers(config, options)
    meta = decoder_meta(config, dtype_of(config, options), options.max_model_len, layers)
    if options.max_model_len > meta.maxseq:
        limit = f"at most {meta.maxseq}, the positions that the model supports"
        raise invalid_value("max_model_len", options.max_model_len, limit)
    widths = (config.experts.inner, config.experts.shared_inner) if config.experts else (0, 0)
    kv_heads = config.num_kv_heads
    if config.latent is not None:
        _check_latent(options)
        kv_heads = config.num_heads  # its one key/value head is replicated
    check_divisibility(*(config.num_heads, kv_heads, config.intermediate_size, options, widths))
    has_own_type = config.model_type in MODEL_TYPES  # others have the generic type "decoder"
    return config.model_type if has_own_type else "decoder", meta


def _check_latent(options: AdapterOptions) -> None:
    """Raise for a KV dtype that latent attention does not support."""
    if options.kv_cache_dtype in ("q8", "fp8"):
        limit = "auto, f32, f16 or bf16 for a model with latent attention"
        raise invalid_value("kv_cache_dtype", options.kv_cache_dtype, limit)


def keeps_blocks(options: AdapterOptions) -> bool:
    """Whether quantised tensors of the checkpoint stay quantised."""
    return options.dtype == "auto"


def kept_dtype(checkpoint: Checkpoint, name: str, options: AdapterOptions) -> str | None:
    """Quantised dtype of a tensor in memory if its blocks are kept; None: it is dequantised."""
    dtype = (checkpoint.block_type(name) or "").lower()
    if dtype not in QUANTISED_DTYPES or not keeps_blocks(options):
        return None
    if dtype == "i8_channel" and options.device != "cpu":
        columns = checkpoint.shape(name)[-1]
        dtype = f"i8_g{span_of(columns, columns, name)}"
    return dtype if _has_kernels(name, dtype, options) else None


def _report_dequantised(checkpoint: Checkpoint, options: AdapterOptions) -> None:
    """Log how many quantised matrices the device cannot keep as they are."""
    names = [name for name, shape in tensors(decoder_config(checkpoint)) if len(shape) == 2]
    stored = [name for name in names if checkpoint.block_type(name) is not None]
    lost = [name for name in stored if kept_dtype(checkpoint, name, options) is None]
    if lost and keeps_blocks(options):
        dtype = dtype_of(decoder_config(checkpoint), options)
        logger.warning(
            "%d quantized matrices are dequantized to %s, such as %s", len(lost), dtype, lost[0]
        )


def _open_tensor(
    checkpoint: Checkpoint,
    load: _TensorLoad,
    options: AdapterOptions,
    random: RandomTensors | None,
) -> Tensor:
    """Read a tensor or its shard. A matrix is converted only if its dtype differs; vectors become
    f32. `random`: values of a checkpoint without weights."""
    name, shard = load.name, load.shard
    if random is not None:
        dtype = weight_dtype(checkpoint, name, options)
        return random.tensor(name, load.shape_in(checkpoint), dtype)
    is_matrix = len(checkpoint.shape(name)) > 1
    if is_matrix and kept_dtype(checkpoint, name, options) is not None:
        blocks = checkpoint.read_blocks(name, shard)
        if blocks is not None:
            blocks = device_blocks(blocks, options.device, name)
            return tensor_from_blocks(blocks.rows, blocks.shape, blocks.type_name.lower())
    dtype, records = _plain_dtype(checkpoint, name, options), None
    if is_matrix and stored_dtype_of(checkpoint, name) == dtype:
        records = checkpoint.records(name, shard)
    if records is not None:
        tensor = Tensor.create(load.shape_in(checkpoint), dtype)
        with closed_on_error(tensor):
            _read_records(records, tensor)
        return tensor
    if shard is not None:
        return tensor_from(checkpoint.read_shard(name, dtype, shard), dtype)
    return tensor_from(checkpoint.read(name, dtype), dtype)


def _plain_dtype(checkpoint: Checkpoint, name: str, options: AdapterOptions) -> str:
    """Dtype of a tensor that is not quantised, or before it is."""
    if len(checkpoint.shape(name)) == 1 or (name.endswith(ROUTER) and options.device == "cpu"):
        return "f32"
    stored = stored_dtype_of(checkpoint, name) if options.quantization is not None else None
    return stored or dtype_of(decoder_config(checkpoint), options)


def stored_dtype_of(checkpoint: Checkpoint, name: str) -> str | None:
    """Dtype of the elements in the files; None: they cannot be read unchanged."""
    records = checkpoint.records(name)
    dtypes = {record.dtype for record in records or ()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _read_records(records: list[TensorRecord], tensor: Tensor) -> None:
    at = 0
    for record in records:
        record.read_into(tensor.memory[at : at + record.nbytes])
        at += record.nbytes


def _quantised(tensor: Tensor, name: str, options: AdapterOptions, stream: Stream) -> Tensor:
    """Apply `--quantization` to a tensor. Returns the tensor itself, or closes it."""
    dtype = quantised_dtype(options.quantization, name, tensor.shape, options.device)
    if dtype is None or tensor.dtype in QUANTISED_DTYPES:
        return tensor
    return quantise(tensor, dtype, stream) if _has_kernels(name, dtype, options) else tensor


def _has_kernels(name: str, dtype: str, options: AdapterOptions) -> bool:
    """Whether the device multiplies this tensor in this quantised dtype: not tables of positions
    and token types, nor heads of latent attention on a GPU."""
    field = weight_field(name)[0]
    if options.device == "cpu":
        return dtype != "f8_g128" and field not in TABLE_FIELDS
    return field not in (*TABLE_FIELDS, *HEAD_WEIGHTS)


def weight_dtype(checkpoint: Checkpoint, name: str, options: AdapterOptions) -> str:
    """Dtype of a tensor in memory, without tensor parallelism."""
    shape = checkpoint.shape(name)
    stored = kept_dtype(checkpoint, name, options) if len(shape) > 1 else None
    if stored is not None:
        return stored
    dtype = quantised_dtype(options.quantization, name, shape, options.device)
    if dtype is not None and _has_kernels(name, dtype, options):
        return dtype
    return _plain_dtype(checkpoint, name, options)


def weight_bytes(checkpoint: Checkpoint, options: AdapterOptions) -> dict[str, int]:
    """Bytes of this rank's shard of each tensor in memory, in the packed layout of the kernels.
    Reads no tensor data."""
    sizes: dict[str, int] = {}
    config = decoder_config(checkpoint)
    for load in _tensor_loads(checkpoint, options):
        name, shape = load.name, load.shape_in(checkpoint)
        dtype = weight_dtype(checkpoint, name, options)
        targets = [field for field, _ in load.targets]
        is_lookup_table = targets == ["in_embed"] or targets[0] in TABLE_FIELDS
        if len(shape) == 1 or (is_lookup_table and dtype not in QUANTISED_DTYPES):
            size = prod(shape) * DTYPE_BYTES[dtype]
        else:
            field, count = load.targets[0][0], 1
            if config.experts and field in STACKED_FIELDS:
                count = config.experts.count
            elif field in HEAD_WEIGHTS:
                count = config.num_heads // options.parallel.tensor_parallel_size
            size = count * linear_weight_bytes(dtype, shape[0] // count, shape[1], options.device)
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def _kv_copy_bytes(config: ModelConfig, options: AdapterOptions) -> int:
    """Memory in which a GPU dequantises the sequences of prompt chunks for prefill attention.

    At most 1 GiB (kMaxCopyBytes in src/ops/attention/cuda_bytes.cuh), twice because it grows by
    doubling.
    """
    if options.device == "cpu" or options.kv_cache_dtype not in ("q8", "fp8"):
        return 0
    entries = (options.max_model_len or config.longest_context) + options.max_batch_tokens
    heads = -(-config.num_kv_heads // options.parallel.tensor_parallel_size)
    return 2 * min(1 << 30, 4 * heads * config.head_dim * entries)


def _panel_bytes(checkpoint: Checkpoint, options: AdapterOptions) -> int:
    """Memory for quantised weights that a GPU converts to 16 bits for many rows."""
    if options.device == "cpu":
        return 0
    loads = _tensor_loads(checkpoint, options)
    is_quantised = any(
        weight_dtype(checkpoint, load.name, options) in QUANTISED_DTYPES for load in loads
    )
    largest = max(prod(load.shape_in(checkpoint)) for load in loads)
    return min(PANEL_BYTES, 4 * largest) if is_quantised else 0


def _check_quantization(checkpoint: Checkpoint, options: AdapterOptions) -> None:
    """Raise when `quantization` has no effect or is not supported."""
    if options.quantization is None:
        return
    check_choice("quantization", options.quantization, CHOICES)
    if options.device == "cpu" and options.quantization not in ON_CPU:
        limit = f"{' or '.join(ON_CPU)} on the CPU; fp8 needs device cuda"
        raise invalid_value("quantization", options.quantization, limit)
    matrices = [n for n, shape in tensors(decoder_config(checkpoint)) if len(shape) == 2]
    if keeps_blocks(options) and all(checkpoint.block_type(n) is not None for n in matrices):
        raise invalid_value(
            "quantization",
            options.quantization,
            "left out: the weights are quantised already (dtype would widen them first)",
        )


def dtype_of(config: ModelConfig, options: AdapterOptions) -> str:
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    return check_choice("dtype", dtype, tuple(STORAGE))
