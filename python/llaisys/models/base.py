"""The interface between the worker and a model: forward, sample, histories, close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.closing import Closing
from llaisys.common.parallel import ParallelConfig
from llaisys.common.step import (
    AttentionMetadata,
    ForwardOutput,
    ModelStepInput,
    RowLogprobs,
    SamplingMetadata,
)
from llaisys.common.validation import invalid_value
from llaisys.models.device import MemoryNeeds


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """How a model is opened; the model file itself says what it is."""

    device: str = "cpu"
    device_ids: tuple[int, ...] = (0,)
    dtype: str = "auto"  # "auto": the checkpoint's own; "f32", "f16", "bf16" convert at load
    quantization: str | None = None  # "int8" or "int4": plain weights become these at load
    kv_cache_dtype: str = "auto"  # "auto": the dtype above; "f32", "f16", "bf16", "q8" (CPU)
    kv_cache_layout: str = "block"  # "block" or "slot"
    kv_cache_block_size: int = 16
    kv_cache_capacity_tokens: int = 0  # 0: max_model_len
    max_model_len: int = 0  # 0: the model's own limit
    max_batch_tokens: int = 0  # 0: the library's default; larger steps run in pieces
    n_threads: int = 0  # 0: one per core
    exact: bool = False  # on a GPU: results do not depend on what else is in a step
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # with this rank's ranks


class ModelAdapter(Closing, ABC):
    """One opened model. Not thread-safe. `close()` frees it; use after that raises ClosedError."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int  # token slots that the KV cache really has
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # numbers of a hidden state; 0: it gives none
    can_launch: bool = False  # whether `launch`, `collect` and what belongs to them are there

    @classmethod
    @abstractmethod
    def kv_bytes_per_token(cls, checkpoint: Any, options: AdapterOptions) -> int:
        """Bytes of keys and values that one token needs, over all layers of this rank."""

    @classmethod
    def memory_needs(
        cls, checkpoint: Any, options: AdapterOptions, max_num_seqs: int
    ) -> MemoryNeeds:
        """What this rank of the model takes of its device besides its KV cache."""
        return MemoryNeeds(weights=0, activations=0, logits=0)

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> ModelAdapter:
        """Open the model of a `Checkpoint` (None for models without files)."""

    @abstractmethod
    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        """Run one step; the output rows stay in the model until the next one.

        Raises KvCacheFullError when the SLOT layout has no room, InvalidInputError for input that
        the model refuses, NativeError for anything else. After an exception nothing has changed.
        """

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """From the next step on: of every token the residual stream as these layers get it; -1:
        after the last norm."""
        raise invalid_value(
            "speculative_config", type(self).__name__, "a model that keeps hidden states"
        )

    def hidden_states(self, num_tokens: int) -> NDArray[np.float32]:
        """What was kept of the last step's tokens, [num_tokens, len(layers) * hidden size]."""
        raise RuntimeError("no hidden states are kept")

    @abstractmethod
    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        """Draw one token for each row of the last forward that `sampling` names."""

    @abstractmethod
    def logprobs(self, index: int) -> RowLogprobs | None:
        """Of entry `index` of the last sample; None when none were asked for."""

    # ---- steps ahead: queued here, run elsewhere; all other methods wait until none runs -------

    def launch(
        self, step: ModelStepInput, attention: AttentionMetadata, sampling: SamplingMetadata
    ) -> int:
        """Queue a step and its draw; its ticket. The arrays must stay as they are until it was
        collected. Token -1-j is the j-th that the step launched before draws; output rows are in
        the order of the tokens. What is drawn is appended to the histories that were reset."""
        raise NotImplementedError

    def collect(self, ticket: int) -> NDArray[np.int32] | None:
        """Wait for a launched step: what it drew, or what forward or sample would have raised.
        None: it was not run, because the one before it failed and that had not been collected when
        it was launched. Earlier tickets are good no longer."""
        raise NotImplementedError

    def collected_logprobs(self, index: int) -> RowLogprobs | None:
        """As `logprobs`, of the last collect."""
        raise NotImplementedError

    def last_output(self) -> ForwardOutput:
        """The output rows of the step that ran last; none when its forward failed."""
        raise NotImplementedError

    @abstractmethod
    def logits(self) -> NDArray[np.float32]:
        """A copy of the output rows of the last forward, [n_outputs, vocab_size]."""

    def logits_row(self, row: int) -> NDArray[np.float32]:
        """A copy of one output row of the last forward, [vocab_size]."""
        return self.logits()[row]

    @abstractmethod
    def sampler_reset(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Start the history that penalties look at from a prompt."""

    @abstractmethod
    def sampler_accept(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Append drawn tokens to a history."""

    @abstractmethod
    def sampler_forget(self, seq_id: int) -> None:
        """Free a history; unknown ids are ignored."""

    def pooled(self, seq_id: int) -> NDArray[np.float32]:
        """[hidden_size]: what the steps so far made of the hidden states of a sequence; see
        `ModelStepInput.pooling`."""
        raise NotImplementedError("this model gives no hidden states")

    def pool_forget(self, seq_id: int) -> None:
        """Free that vector; unknown ids are ignored."""

    @abstractmethod
    def copy_slots(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy keys and values from slot to slot (BLOCK layout), all read before one is written."""

    @abstractmethod
    def shift_slots(self, slots: NDArray[np.int32], deltas: NDArray[np.int64]) -> None:
        """Rotate the keys of each slot (BLOCK layout) by a number of positions."""

    def reserve_host_blocks(self, num_blocks: int) -> None:
        """Make places in host memory for so many blocks (BLOCK layout)."""
        raise invalid_value(
            "kv_offload", type(self).__name__, "0 for a model that keeps no blocks there"
        )

    def swap_blocks(
        self, blocks: NDArray[np.int32], places: NDArray[np.int32], to_host: bool
    ) -> None:
        """Copy keys and values of blocks to places in host memory, or back; what is written is
        named once. Steps that follow see it."""
        raise RuntimeError("no host blocks are reserved")

    def profile(self, reset: bool = False) -> dict[str, tuple[float, int]]:
        """Seconds in each stage of the model's own and how often it was entered, since the start or
        the last reset; empty when it keeps none."""
        return {}

    def sample_counts(self) -> dict[str, int]:
        """Rows that were drawn since the start, by where: "device", or "host" from whole rows of
        logits, which a GPU must send there; empty when nobody counts."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free the model; more than once does nothing."""
