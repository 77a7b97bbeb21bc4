"""Inputs and outputs of a model for one step: flat numpy arrays.

The arrays may be views of buffers that the next step overwrites; a model copies what it retains.
Every array is C-contiguous. `n`: tokens of the step, `s`: sequences, `r`: rows to sample.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.common.sampling import FIELDS


@dataclass(slots=True)
class ModelStepInput:
    """The tokens of a step. The tokens of a sequence are adjacent, in order of position."""

    token_ids: NDArray[np.int64]  # [n]
    positions: NDArray[np.int64]  # [n]
    seq_ids: NDArray[np.int64]  # [n]
    logits_mask: NDArray[np.int8]  # [n], non-zero: compute the logits of this token
    # [n]: LlaisysPooling of the C API
    pooling: NDArray[np.uint8] | None = field(default=None, kw_only=True)
    # [n]: device slot of the token's LoRA adapter, -1: none; None: none for any token
    lora_slots: NDArray[np.int32] | None = field(default=None, kw_only=True)
    # [n]: 1 for tokens of the second text of a pair; None: 0 for every token
    token_types: NDArray[np.uint8] | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AttentionMetadata:
    """Slots and block tables of a step (BLOCK layout)."""

    slot_mapping: NDArray[np.int32]  # [n]
    batch_seq_ids: NDArray[np.int64]  # [s]
    context_lens: NDArray[np.int32]  # [s], including the tokens of this step
    block_tables: NDArray[np.int32]  # [s, width], -1 past the end of a row


@dataclass(slots=True)
class ForwardOutput:
    """The output rows, valid until the next step."""

    n_outputs: int
    output_ids: NDArray[np.int32]  # [n_outputs], index of the token in the step


# Numeric sampling parameters by row: name -> neutral value.
ROW_NUMBERS: dict[str, float] = {
    about.array: about.neutral for about in FIELDS.values() if about.array is not None
}
ROW_NUMBERS["mirostat_mu"] = 10.0  # state of Mirostat, which the worker updates


@dataclass(slots=True)
class SamplingMetadata:
    """Sampling parameters of a step. None, or no entry in `numbers`: neutral for every row.

    Applied in the order mask, bias, chain; temperature 0 is greedy.
    """

    rows: NDArray[np.int32]  # [r]: output row
    seq_ids: NDArray[np.int64] | None = None  # [r]: sequence whose history penalties use
    seeds: NDArray[np.uint64] | None = None  # [r]
    positions: NDArray[np.int64] | None = None  # [r]: position of the sampled token
    choices: NDArray[np.int32] | None = None  # [r]: index of the choice (n > 1)
    chain_offsets: NDArray[np.int32] | None = None  # [r + 1] into chain
    chain: NDArray[np.uint8] | None = None  # SamplerKind
    bias_offsets: NDArray[np.int32] | None = None  # [r + 1] into bias_ids, bias_values
    bias_ids: NDArray[np.int32] | None = None
    bias_values: NDArray[np.float32] | None = None  # -inf bans a token
    mask_rows: NDArray[np.int32] | None = None  # [r]: row of masks, -1 = everything allowed
    masks: NDArray[np.uint32] | None = None  # [m, (vocabulary + 31) // 32], bit set = allowed
    numbers: dict[str, NDArray[np.float64]] = field(
        default_factory=dict
    )  # key of ROW_NUMBERS -> [r]


@dataclass(slots=True)
class TokenMasks:
    """Masks of structured output for one step, the same on every rank."""

    first: dict[int, int]  # seq id -> row of `masks` for its next token; those of drafts follow
    counts: dict[int, int]  # seq id -> number of rows; drafts without a row are rejected
    masks: NDArray[np.uint32]  # [m, (vocabulary + 31) // 32], bit set = allowed
    late: frozenset[int] = frozenset()  # seq ids without masks yet: they sample no token
    failed: dict[int, str] = field(default_factory=dict)  # seq id -> error
