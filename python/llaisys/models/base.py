"""The interface between the worker and a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.closing import Closing
from llaisys.common.parallel import ParallelConfig
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput, SamplingMetadata
from llaisys.common.types import TokenLogprobs
from llaisys.common.validation import invalid_value
from llaisys.models.device import MemoryNeeds

if TYPE_CHECKING:
    from llaisys.models.lora.weights import LoraWeights
    from llaisys.models.score_head import ScoreHead


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Options to open a model with; the rest comes from the checkpoint."""

    device: str = "cpu"
    device_ids: tuple[int, ...] = (0,)
    dtype: str = "auto"  # "auto": the checkpoint's; "f32", "f16", "bf16": convert at load
    quantization: str | None = None  # "int8", "int4" or (CUDA) "fp8": quantize at load
    kv_cache_dtype: str = "auto"  # "auto": the dtype above; "f32", "f16", "bf16", "q8", "fp8"
    kv_cache_layout: str = "block"  # "block" or "slot"
    kv_cache_block_size: int = 16
    kv_cache_capacity_tokens: int = 0  # 0: max_model_len
    max_model_len: int = 0  # 0: the model's limit
    max_batch_tokens: int = 0  # tokens per micro-batch; 0: the library's default
    n_threads: int = 0  # 0: one per core
    exact: bool = False  # batch-invariant results on a GPU
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # with this rank


class ModelAdapter(Closing, ABC):
    """An open model. Not thread-safe. `close()` frees it; later calls raise ClosedError."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int  # token slots that the KV cache has
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # 0: no hidden states
    can_launch: bool = False  # supports `launch` and `collect`
    is_encoder: bool = False  # no logits; a step has whole sequences, each at most one step long
    score_head: ScoreHead | None = None  # of a reranker: scores of pooled states

    @classmethod
    @abstractmethod
    def kv_bytes_per_token(cls, checkpoint: Any, options: AdapterOptions) -> int:
        """Bytes of keys and values per token, over all layers of this rank."""

    @classmethod
    def memory_needs(
        cls, checkpoint: Any, options: AdapterOptions, max_num_seqs: int
    ) -> MemoryNeeds:
        """Device memory of this rank besides its KV cache."""
        return MemoryNeeds(weights=0, activations=0, logits=0)

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> ModelAdapter:
        """Open the model of a `Checkpoint` (None for models without files)."""

    @abstractmethod
    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        """Run one step; the output rows are valid until the next one.

        Raises KvCacheFullError when the SLOT layout is full, InvalidInputError for rejected input,
        NativeError otherwise. After an exception the state is unchanged.
        """

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """From the next step on, capture the input of these layers for every token; -1: the output
        of the last norm."""
        raise invalid_value(
            "speculative_config", type(self).__name__, "a model that captures hidden states"
        )

    def hidden_states(self, num_tokens: int) -> NDArray[np.float32]:
        """Captured states of the last step, [num_tokens, len(layers) * hidden_size]."""
        raise RuntimeError("no hidden states are captured")

    @abstractmethod
    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        """Sample one token for each row of the last forward that `sampling` names."""

    @abstractmethod
    def logprobs(self, index: int) -> TokenLogprobs | None:
        """Logprobs of entry `index` of the last `sample`; None when not requested."""

    # ---- asynchronous steps; all other methods wait until none is in flight --------------------

    def launch(
        self, step: ModelStepInput, attention: AttentionMetadata, sampling: SamplingMetadata
    ) -> int:
        """Launch a step with sampling and return its ticket. The arrays must stay unchanged until
        `collect`. Token id -1-j stands for the j-th token sampled by the previously launched step.
        Output rows are in token order. Sampled tokens are appended to the sampler histories."""
        raise NotImplementedError

    def collect(self, ticket: int) -> NDArray[np.int32] | None:
        """Wait for a launched step and return its sampled tokens; raises like `forward` and
        `sample`. None: the step was skipped because the step before it failed. Invalidates earlier
        tickets."""
        raise NotImplementedError

    def collected_logprobs(self, index: int) -> TokenLogprobs | None:
        """Like `logprobs`, for the last `collect`."""
        raise NotImplementedError

    def last_output(self) -> ForwardOutput:
        """The output rows of the last step; none when its forward failed."""
        raise NotImplementedError

    @abstractmethod
    def logits(self) -> NDArray[np.float32]:
        """A copy of the output rows of the last forward, [n_outputs, vocab_size]."""

    def logits_row(self, row: int) -> NDArray[np.float32]:
        """A copy of one output row of the last forward, [vocab_size]."""
        return self.logits()[row]

    @abstractmethod
    def sampler_reset(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Start the token history for penalties with a prompt."""

    @abstractmethod
    def sampler_accept(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Append sampled tokens to a history."""

    @abstractmethod
    def sampler_forget(self, seq_id: int) -> None:
        """Free a history; unknown ids are ignored."""

    def pooled(self, seq_id: int) -> NDArray[np.float32]:
        """Pooled hidden states of a sequence so far, [hidden_size]; see
        `ModelStepInput.pooling`."""
        raise NotImplementedError("this model has no hidden states")

    def pool_forget(self, seq_id: int) -> None:
        """Free the pooled state of a sequence; unknown ids are ignored."""

    @abstractmethod
    def copy_slots(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy keys and values between slots (BLOCK layout); all are read before any is written."""

    @abstractmethod
    def shift_slots(self, slots: NDArray[np.int32], deltas: NDArray[np.int64]) -> None:
        """Rotate the keys of each slot (BLOCK layout) by its delta of positions."""

    def reserve_host_blocks(self, num_blocks: int, fd: int = -1) -> None:
        """Allocate this many host blocks (BLOCK layout). `fd`: a file (memfd) for them, which is
        resized; `swap_blocks` has copied when it returns. -1: none."""
        raise invalid_value("kv_offload", type(self).__name__, "0 for a model without host blocks")

    def swap_blocks(
        self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32], to_host: bool
    ) -> None:
        """Copy blocks to host blocks, or back. Each destination occurs once. Later steps see the
        result."""
        raise RuntimeError("no host blocks are reserved")

    @classmethod
    def lora_bytes(
        cls, checkpoint: Any, options: AdapterOptions, max_loras: int, max_rank: int
    ) -> int:
        """Device memory of `reserve_loras` on this rank: slots, and scratch memory of a step."""
        raise invalid_value("enable_lora", cls.__name__, "off for a model without LoRA adapters")

    def reserve_loras(self, max_loras: int, max_rank: int) -> None:
        """Allocate empty slots for LoRA adapters of up to `max_rank`."""
        raise invalid_value(
            "enable_lora", type(self).__name__, "off for a model without LoRA adapters"
        )

    def load_lora(self, slot: int, weights: LoraWeights) -> None:
        """Fill a slot with an adapter. After an exception the content of the slot is unknown."""
        raise RuntimeError("no LoRA slots are reserved")

    def profile(self, reset: bool = False) -> dict[str, tuple[float, int]]:
        """Seconds and number of entries per stage since the start or the last reset; empty when not
        profiled."""
        return {}

    def sample_counts(self) -> dict[str, int]:
        """Rows sampled since the start, by sampler: "device", or "host", which needs the logits
        rows in host memory; empty when not counted."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free the model. Idempotent."""
