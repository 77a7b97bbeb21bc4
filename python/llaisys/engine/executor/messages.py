"""Messages between the driver rank and the other ranks."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from llaisys.processes.channel import decoder


class RankSetup(Struct, forbid_unknown_fields=True):
    """Setup of a rank process; one line of JSON on its standard input."""

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
    """A call of a worker method. Its arguments are a plan, `args`, masks and tokens, as far as they
    are given. A successful `execute_model` or `store_tokens` is not answered."""

    serial: int
    method: str
    args: Sequence[int | str | bool | None] = ()
    kwargs: dict[str, bool] = {}
    plan: bytes | None = None  # wire.encode_plan
    masks: bytes | None = None  # wire.encode_masks
    sampled: dict[int, list[int]] | None = None  # of `store_tokens`: sequence id -> tokens


class Answer(Struct, forbid_unknown_fields=True):
    """The reply to a call; `error` is empty on success."""

    serial: int  # of the call
    error: str = ""
    is_input_error: bool = False  # InvalidInputError, the same on every rank; nothing was done
    result: int | str | None = None
    sampled: dict[int, list[int]] | None = None  # of a step: sequence id -> tokens

    @property
    def is_fatal(self) -> bool:
        """Whether the rank cannot continue."""
        return bool(self.error) and not self.is_input_error


decode_call = decoder(Call)
decode_answer = decoder(Answer)
