"""The adapter over a native model handle: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import dataclasses
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from llaisys.common.closing import closed_on_error
from llaisys.common.parallel import ParallelConfig
from llaisys.common.step import (
    ROW_NUMBERS,
    AttentionMetadata,
    ForwardOutput,
    ModelStepInput,
    SamplingMetadata,
)
from llaisys.common.types import TokenLogprobs
from llaisys.common.validation import check_choice, invalid_count, invalid_value
from llaisys.libllaisys import arrays, types
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import (
    LAYOUTS,
    MODEL_TYPES,
    STAGES,
    LlaisysDecoderMeta,
    LlaisysLogprobs,
    LlaisysModelCreateParams,
    LlaisysSamplingMetadata,
    LlaisysSamplingNumber,
    LlaisysStepInput,
)
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.interrupt_safe import InterruptSafeTask

if TYPE_CHECKING:
    from llaisys.models.lora.weights import LoraWeights

_INT, _FLOAT = struct.Struct("i"), struct.Struct("f")


def _address(array: NDArray[Any], dtype: type[np.generic], name: str) -> int:
    """The address of a dense array of this dtype."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise invalid_value(name, array.dtype, f"a contiguous array of {np.dtype(dtype)}")
    if array.size and array.flags.writeable:
        return arrays.address_of(array.data)
    return array.ctypes.data


# Arrays of ModelStepInput with one entry per token.
_TOKEN_ARRAYS = ("positions", "seq_ids", "logits_mask", "pooling", "lora_slots", "token_types")
_SAMPLING_DTYPES: dict[str, type[np.generic]] = {
    "rows": np.int32,
    "seq_ids": np.int64,
    "seeds": np.uint64,
    "positions": np.int64,
    "choices": np.int32,
    "chain_offsets": np.int32,
    "chain": np.uint8,
    "bias_offsets": np.int32,
    "bias_ids": np.int32,
    "bias_values": np.float32,
    "mask_rows": np.int32,
    "masks": np.uint32,
}
# Values array -> its offsets array. The offsets come first above and are checked first.
_OFFSETS = {"chain": "chain_offsets", "bias_ids": "bias_offsets", "bias_values": "bias_offsets"}


# Fields of ParallelConfig with the same name in LlaisysModelCreateParams.
PARALLEL_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(ParallelConfig)
    if field.name not in ("tensor_parallel_device_ids", "numa")  # not in C
)


class NativeAdapter(ModelAdapter):
    """A native model; subclasses create it and load its weights."""

    native: Model

    @classmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> Self:
        """Load on a separate thread, so that Ctrl-C cannot leak a weight."""
        return InterruptSafeTask(lambda check: cls._load(checkpoint, options, check)).run()

    @classmethod
    def _load(cls, checkpoint: Any, options: AdapterOptions, check: Callable[[], None]) -> Self:
        adapter = cls._create(checkpoint, options)
        with closed_on_error(adapter):
            adapter._fill(checkpoint, options, check)
        return adapter

    @classmethod
    @abstractmethod
    def _create(cls, checkpoint: Any, options: AdapterOptions) -> Self:
        """Create the model without weights."""

    @abstractmethod
    def _fill(self, checkpoint: Any, options: AdapterOptions, check: Callable[[], None]) -> None:
        """Load the weights; calls `check()` between them, which raises after cancellation."""

    def __init__(
        self,
        model_type: str,
        meta: LlaisysDecoderMeta,
        options: AdapterOptions,
        whole_meta: Any = None,
    ) -> None:
        """`whole_meta`: meta of a model type that extends the decoder's meta."""
        self.native = Model(create_params(model_type, whole_meta or meta, options))
        self._captured = 0  # hidden states per token
        params = self.native.params
        self.vocab_size = int(meta.voc)
        self.hidden_size = int(meta.hs)
        self.num_token_types = int(meta.n_token_types)
        self.max_model_len = int(params.max_model_len)
        self.kv_capacity_tokens = int(params.kv_cache_capacity_tokens)
        self.eos_token_ids = ()
        self.can_launch = True
        self._step = LlaisysStepInput()
        self._sampling = _new_sampling()
        self._spare_sampling: list[LlaisysSamplingMetadata] = []  # free for the next launch
        # Ticket -> number of sampled tokens, and objects to keep alive until `collect`.
        self._launched: dict[int, tuple[int, tuple[Any, ...]]] = {}

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        self.native.step(self._filled_step(step, attention))
        return self.last_output()

    def last_output(self) -> ForwardOutput:
        count = self.native.n_outputs
        ids = arrays.int32_copy(self.native.output_ids_address, count)
        return ForwardOutput(count, np.frombuffer(ids, np.int32, count))

    def _filled_step(
        self,
        step: ModelStepInput,
        attention: AttentionMetadata | None,
        features: NDArray[np.float32] | None = None,  # [n, size]
    ) -> LlaisysStepInput:
        native = self._step
        n = len(step.token_ids)
        _check_lengths(n, step, attention)
        native.n_tokens = n
        native.token_ids = _address(step.token_ids, np.int64, "token_ids")
        native.embd = None if features is None else _address(features, np.float32, "features")
        native.embd_size = 0 if features is None else features.shape[1]
        native.positions = _address(step.positions, np.int64, "positions")
        native.seq_ids = _address(step.seq_ids, np.int64, "seq_ids")
        native.n_seq_ids = n
        native.logits = _address(step.logits_mask, np.int8, "logits_mask")
        native.pooling = None
        if step.pooling is not None:
            native.pooling = _address(step.pooling, np.uint8, "pooling")
        native.lora_slots = None
        if step.lora_slots is not None:
            native.lora_slots = _address(step.lora_slots, np.int32, "lora_slots")
        native.token_types = None
        if step.token_types is not None and self.num_token_types > 1:
            native.token_types = _address(step.token_types, np.uint8, "token_types")
        native.n_seq = 0
        native.slot_mapping = native.context_lens = native.batch_seq_ids = None
        native.block_tables = None
        native.block_table_width = 0
        if attention is not None:
            native.n_seq = len(attention.context_lens)
            native.slot_mapping = _address(attention.slot_mapping, np.int32, "slot_mapping")
            native.context_lens = _address(attention.context_lens, np.int32, "context_lens")
            native.batch_seq_ids = _address(attention.batch_seq_ids, np.int64, "batch_seq_ids")
            native.block_tables = _address(attention.block_tables, np.int32, "block_tables")
            native.block_table_width = attention.block_tables.shape[1]
        return native

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        self.native.capture_hidden_states(layers)
        self._captured = len(layers)

    def hidden_states(self, num_tokens: int) -> NDArray[np.float32]:
        return self._hidden(num_tokens, self._captured * self.hidden_size)

    def _hidden(self, num_tokens: int, size: int) -> NDArray[np.float32]:
        values = arrays.float_copy(self.native.hidden_address, num_tokens * size)
        return np.frombuffer(values, np.float32).reshape(num_tokens, size)

    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        native = self._filled_sampling(self._sampling, sampling)
        ids = np.empty(len(sampling.rows), np.int32)
        self.native.sample(native, ids.ctypes.data)
        return ids

    def launch(
        self, step: ModelStepInput, attention: AttentionMetadata, sampling: SamplingMetadata
    ) -> int:
        spare = self._spare_sampling
        native = self._filled_sampling(spare.pop() if spare else _new_sampling(), sampling)
        ticket = self.native.launch(self._filled_step(step, attention), native)
        self._launched[ticket] = (len(sampling.rows), (native, step, attention, sampling))
        return ticket

    def collect(self, ticket: int) -> NDArray[np.int32] | None:
        ids = np.empty(self._launched[ticket][0], np.int32)
        try:
            is_run = self.native.collect(ticket, ids.ctypes.data)
        finally:
            for earlier in [t for t in self._launched if t <= ticket]:
                self._spare_sampling.append(self._launched.pop(earlier)[1][0])
        return ids if is_run else None

    def collected_logprobs(self, index: int) -> TokenLogprobs | None:
        return _row_logprobs(self.native.collected_logprobs(index))

    def _filled_sampling(
        self, native: LlaisysSamplingMetadata, sampling: SamplingMetadata
    ) -> LlaisysSamplingMetadata:
        _check_sampling_lengths(sampling, (self.vocab_size + 31) // 32)
        native.n_rows = len(sampling.rows)
        for name, dtype in _SAMPLING_DTYPES.items():
            array = getattr(sampling, name)
            setattr(native, name, None if array is None else _address(array, dtype, name))
        native.n_numbers = len(sampling.numbers)
        entries = native._numbers_ref
        for entry, (name, values) in zip(entries, sampling.numbers.items(), strict=False):
            entry.name, entry.values = name.encode(), _address(values, np.float64, name)
        native.n_masks = 0 if sampling.masks is None else len(sampling.masks)
        return native

    def logprobs(self, index: int) -> TokenLogprobs | None:
        return _row_logprobs(self.native.logprobs(index))

    def logits(self) -> NDArray[np.float32]:
        count = self.native.n_outputs * self.vocab_size
        values = arrays.float_copy(self.native.logits_address, count)
        return np.frombuffer(values, np.float32, count).reshape(-1, self.vocab_size)

    def logits_row(self, row: int) -> NDArray[np.float32]:
        values = arrays.float_copy(self.native.logits_row_address(row), self.vocab_size)
        return np.frombuffer(values, np.float32, self.vocab_size)

    def sampler_reset(self, seq_id: int, prompt: Sequence[int]) -> None:
        tokens = np.asarray(prompt, np.int64)
        self.native.call("SamplerReset", seq_id, tokens.ctypes.data, len(tokens))

    def sampler_accept(self, seq_id: int, tokens: Sequence[int]) -> None:
        sampled = np.asarray(tokens, np.int64)
        self.native.call("SamplerAccept", seq_id, sampled.ctypes.data, len(sampled))

    def sampler_forget(self, seq_id: int) -> None:
        self.native.call("SamplerForget", seq_id)

    def pooled(self, seq_id: int) -> NDArray[np.float32]:
        state = np.empty(self.hidden_size, np.float32)
        self.native.call("Pooled", seq_id, state.ctypes.data, len(state))
        return state

    def pool_forget(self, seq_id: int) -> None:
        self.native.call("PoolForget", seq_id)

    def copy_slots(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        _check_length("dst", len(dst), len(src))
        addresses = (_address(src, np.int32, "src"), _address(dst, np.int32, "dst"))
        self.native.call("KvCopySlots", *addresses, len(src))

    def shift_slots(self, slots: NDArray[np.int32], deltas: NDArray[np.int64]) -> None:
        _check_length("deltas", len(deltas), len(slots))
        addresses = (_address(slots, np.int32, "slots"), _address(deltas, np.int64, "deltas"))
        self.native.call("KvShiftSlots", *addresses, len(slots))

    def reserve_host_blocks(self, num_blocks: int, fd: int = -1) -> None:
        self.native.call("KvReserveHost", num_blocks, fd)

    def swap_blocks(
        self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32], to_host: bool
    ) -> None:
        _check_length("host_blocks", len(host_blocks), len(blocks))
        addresses = (
            _address(blocks, np.int32, "blocks"),
            _address(host_blocks, np.int32, "host_blocks"),
        )
        self.native.call("KvToHost" if to_host else "KvFromHost", *addresses, len(blocks))

    def reserve_loras(self, max_loras: int, max_rank: int) -> None:
        self.native.reserve_lora(max_loras, max_rank)

    def load_lora(self, slot: int, weights: LoraWeights) -> None:
        self.native.call("ClearLora", slot)
        for part in weights.tensors:
            pair = part.a.handle, part.b.handle
            self.native.call("SetLora", slot, part.field.encode(), part.layer, *pair, part.scale)

    def profile(self, reset: bool = False) -> dict[str, tuple[float, int]]:
        times = self.native.profile(reset)
        stages = {name: getattr(times, name) for name in STAGES}
        return {name: (stage.seconds, stage.count) for name, stage in stages.items()}

    def sample_counts(self) -> dict[str, int]:
        return dict(zip(("device", "host"), self.native.sample_counts(), strict=True))

    def close(self) -> None:
        self.native.close()


def _new_sampling() -> LlaisysSamplingMetadata:
    sampling = LlaisysSamplingMetadata()
    arrays.attach_structs(sampling, "numbers", LlaisysSamplingNumber, len(ROW_NUMBERS))
    return sampling


def _row_logprobs(native: LlaisysLogprobs) -> TokenLogprobs | None:
    n = native.n
    if n == 0:
        return None
    ids, values = arrays.copy(native.ids, 4 * n), arrays.copy(native.logprobs, 4 * n)
    (token,), (logprob,) = _INT.unpack_from(ids), _FLOAT.unpack_from(values)
    return TokenLogprobs(token, logprob, native.sampled_rank, ids[4:], values[4:])


def _check_lengths(n: int, step: ModelStepInput, attention: AttentionMetadata | None) -> None:
    """Check the length of every array; the C side does not."""
    for name in _TOKEN_ARRAYS:
        array = getattr(step, name)
        if array is not None:
            _check_length(name, len(array), n)
    if attention is not None:
        rows = len(attention.context_lens)
        tables = attention.block_tables
        _check_length("slot_mapping", len(attention.slot_mapping), n)
        _check_length("batch_seq_ids", len(attention.batch_seq_ids), rows)
        if tables.ndim != 2 or len(tables) != rows:
            raise invalid_value(
                "block_tables", list(tables.shape), f"[{rows}, n], a row per sequence"
            )


def _check_length(name: str, length: int, expected: int) -> None:
    if length != expected:
        raise invalid_count(name, length, "entries", str(expected))


def _check_sampling_lengths(sampling: SamplingMetadata, mask_words: int) -> None:
    """Check array lengths; the C side checks offsets except the last one."""
    n = len(sampling.rows)
    for name, values in sampling.numbers.items():
        if name not in ROW_NUMBERS:
            raise invalid_value("numbers", name, f"one of {', '.join(ROW_NUMBERS)}")
        _check_length(name, len(values), n)
    for name in _SAMPLING_DTYPES:
        values = getattr(sampling, name)
        if values is None or name == "masks":
            continue
        length = n
        if name in ("chain_offsets", "bias_offsets"):
            length = n + 1
        elif name in _OFFSETS:
            ends = getattr(sampling, _OFFSETS[name])
            if ends is None:
                continue  # unused
            length = int(ends[-1])
        _check_length(name, len(values), length)
    masks = sampling.masks
    if masks is not None and (masks.ndim != 2 or masks.shape[1] != mask_words):
        raise invalid_value("masks", list(masks.shape), f"[n, {mask_words}]")


def kv_head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of the keys or the values of one head of a token."""
    if dtype in ("q8", "fp8"):
        return head_dim + types.KV_SCALE_BYTES
    return head_dim * types.DTYPE_BYTES[dtype]


def create_params(model_type: str, meta: Any, options: AdapterOptions) -> LlaisysModelCreateParams:
    layout = check_choice("kv_cache_layout", options.kv_cache_layout, tuple(LAYOUTS))
    device = check_choice("device", options.device, tuple(types.DEVICE_NAMES))
    params = LlaisysModelCreateParams(
        model_type=MODEL_TYPES[model_type],
        device=types.DEVICE_NAMES[device],
        kv_cache_layout=LAYOUTS[layout],
        kv_cache_block_size=options.kv_cache_block_size,
        max_model_len=options.max_model_len,
        kv_cache_capacity_tokens=options.kv_cache_capacity_tokens,
        n_threads=options.n_threads,
        max_batch_tokens=options.max_batch_tokens,
        exact=int(options.exact),
    )
    if options.kv_cache_dtype != "auto":
        known = tuple(types.KV_DTYPES)
        kv_dtype = check_choice("kv_cache_dtype", options.kv_cache_dtype, known)
        params.kv_cache_dtype = types.KV_DTYPES[kv_dtype]
    for name in PARALLEL_FIELDS:  # the same names in C
        value = getattr(options.parallel, name)
        setattr(params, name, value.encode() if isinstance(value, str) else int(value))
    arrays.attach(params, "meta", meta)
    arrays.attach_array(params, "device_ids", "i32", options.device_ids)
    params.ndevice = len(options.device_ids)
    return params
