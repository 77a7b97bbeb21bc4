"""Encodes plans and masks as typed msgpack for workers in other processes.

The wire types are derived from the dataclasses. Frames are validated: `msgspec.MsgspecError` for
another type, InvalidInputError for invalid sampling parameters.
"""

from dataclasses import fields
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec
import numpy as np

from llaisys.common.sampling import SamplingParams
from llaisys.common.step import TokenMasks
from llaisys.common.types import NewSequence, SchedulerOutputs
from llaisys.processes.channel import encode


def _wire_type(record: type, **other_types: Any) -> Any:
    """Return a struct with the fields of a dataclass; `other_types` replace some types."""
    types = {**get_type_hints(record), **other_types}
    return msgspec.defstruct(
        record.__name__,
        [(field.name, types[field.name]) for field in fields(record)],
        array_like=True,
        forbid_unknown_fields=True,
    )


_WireSequence = _wire_type(NewSequence, sampling=dict[str, Any])
_WirePlan = _wire_type(SchedulerOutputs, new_seqs=GenericAlias(list, (_WireSequence,)))
_decode_plan = msgspec.msgpack.Decoder(_WirePlan).decode


def encode_plan(plan: SchedulerOutputs) -> bytes:
    sequences = [
        _convert(seq, _WireSequence, sampling=seq.sampling.to_wire()) for seq in plan.new_seqs
    ]
    return encode(_convert(plan, _WirePlan, new_seqs=sequences))


def decode_plan(frame: bytes) -> SchedulerOutputs:
    plan = _decode_plan(frame)
    sequences = [
        _convert(seq, NewSequence, sampling=SamplingParams.from_wire(seq.sampling))
        for seq in plan.new_seqs
    ]
    return _convert(plan, SchedulerOutputs, new_seqs=sequences)


class _WireMasks(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    first: dict[int, int]
    counts: dict[int, int]
    words: int
    masks: bytes
    late: frozenset[int]
    failed: dict[int, str]


_decode_masks = msgspec.msgpack.Decoder(_WireMasks).decode


def encode_masks(masks: TokenMasks) -> bytes:
    words = masks.masks.shape[1]
    data = masks.masks.tobytes()
    return encode(
        _WireMasks(masks.first, masks.counts, words, data, masks.late, dict(masks.failed))
    )


def decode_masks(frame: bytes) -> TokenMasks:
    read = _decode_masks(frame)
    rows = np.frombuffer(read.masks, np.uint32).reshape(-1, read.words)
    return TokenMasks(read.first, read.counts, rows, read.late, read.failed)


def _convert(value: Any, target: Any, **changed: Any) -> Any:
    """Convert `value` to a type with the same fields."""
    names = getattr(target, "__struct_fields__", None) or [f.name for f in fields(target)]
    return target(**{name: changed.get(name, getattr(value, name)) for name in names})
