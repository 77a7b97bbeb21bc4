"""What the mp executor and its rank processes say to each other."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llaisys.processes.channel import decoder


class RankSetup(Struct, forbid_unknown_fields=True):
    """Who a process is; one line of JSON on its standard input."""

    engine: dict[str, Any]  # EngineConfig.to_wire()
    rank: int
    local_rank: int
    init_method: str
    log_level: str  # as setup_logging takes it
    log_format: str
    input_address: str
    output_address: str
    socket_directory: str


class Call(Struct, forbid_unknown_fields=True):
    """A method of the worker; its first argument is a plan or a number, or it has none."""

    serial: int
    method: str
    plan: bytes | None = None  # wire.encode_plan
    number: int | None = None
    kwargs: dict[str, bool] = {}
    has_masks: bool = False  # of a step: wire.encode_masks follows in a frame of its own


class Answer(Struct, forbid_unknown_fields=True):
    """To each call; `error` is empty when it went well."""

    serial: int  # of the call
    error: str = ""
    is_input_error: bool = False  # which every rank has alike, before anything was done
    number: int = 0  # of open_model: the KV blocks that the rank can afford
    sampled: dict[int, list[int]] | None = None  # of a step: what the rank drew


decode_call = decoder(Call)
decode_answer = decoder(Answer)
