"""What the worker hands to a model for one step: flat numpy arrays, no Python object per token.

The arrays may be views of larger buffers that the next step overwrites; a model copies what it
keeps. Every array is C-contiguous. `n`: tokens of the step, `s`: sequences, `r`: rows to sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.common.sampling import FIELDS


@dataclass(slots=True)
class ModelStepInput:
    """The tokens of a step. The tokens of one sequence stand together, positions rising."""

    token_ids: NDArray[np.int64]  # [n]
    positions: NDArray[np.int64]  # [n]
    seq_ids: NDArray[np.int64]  # [n]
    logits_mask: NDArray[np.int8]  # [n], non-zero: this token's logits are wanted
    # [n]: what the token's hidden state does to its sequence's vector; the C API's LlaisysPooling
    pooling: NDArray[np.uint8] | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AttentionMetadata:
    """Where keys and values lie (BLOCK layout)."""

    slot_mapping: NDArray[np.int32]  # [n]
    batch_seq_ids: NDArray[np.int64]  # [s]
    context_lens: NDArray[np.int32]  # [s], this step's tokens included
    block_tables: NDArray[np.int32]  # [s, width], -1 past the end of a row


@dataclass(slots=True)
class ForwardOutput:
    """The output rows that the model keeps until its next step."""

    n_outputs: int
    output_ids: NDArray[np.int32]  # [n_outputs], index of the token in the step


# The numbers that steer the sampler, one a row: name -> the neutral value.
ROW_NUMBERS: dict[str, float] = {
    about.array: about.neutral for about in FIELDS.values() if about.array is not None
}


@dataclass(slots=True)
class SamplingMetadata:
    """How each row is turned into a token; None, and no entry in `numbers`, stand for the neutral
    value everywhere.

    The mask, then the bias, then the chain in its order; temperature 0 is greedy.
    """

    rows: NDArray[np.int32]  # [r]: output row
    seq_ids: NDArray[np.int64] | None = None  # [r]: whose history the penalties look at
    seeds: NDArray[np.uint64] | None = None  # [r]
    positions: NDArray[np.int64] | None = None  # [r]: position of the token being drawn
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
    """Which tokens the sequences of a step may draw, where their answers must have a form. The same
    for every rank."""

    first: dict[int, int]  # seq id -> row of `masks` for its next token; its drafts' follow
    counts: dict[int, int]  # seq id -> how many rows it has; drafts without one cannot be accepted
    masks: NDArray[np.uint32]  # [m, (vocabulary + 31) // 32], bit set = allowed
    late: frozenset[int] = frozenset()  # their masks are not there: they draw nothing in this step
    failed: dict[int, str] = field(default_factory=dict)  # seq id -> why it cannot go on


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities of one sampled row, before bias, mask and chain."""

    sampled: float
    sampled_rank: int  # 1 = the most likely token
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
