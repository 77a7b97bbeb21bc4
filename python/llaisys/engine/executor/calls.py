"""Executes a call on a rank other than the driver.

A failed worker closes its model and leaves the group, which ends the waits of the other ranks.
"""

import logging
from functools import partial
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.engine.executor.messages import Answer, Call
from llaisys.engine.wire import decode_masks, decode_plan
from llaisys.engine.worker import Worker

logger = logging.getLogger("llaisys.engine")

METHODS = {
    "init_device", "open_model", "load_model", "warmup", "execute_model", "sample_tokens",
    "profile", "gpu_usage", "check_health", "call_lora", "store_tokens",
}  # fmt: skip
UNANSWERED = ("execute_model", "store_tokens")


def answer_call(worker: Worker, call: Call) -> Answer | None:
    """Run a method; an exception becomes an error text. None: no answer is sent."""
    names: list[str] = []
    try:
        if call.method not in METHODS:
            raise ValueError(f"{call.method!r} is not a method of a worker")
        args: list[Any] = []
        if call.plan is not None:
            plan = decode_plan(call.plan)
            args, names = [plan], plan.request_ids
        args += call.args
        if call.masks is not None:
            args.append(partial(decode_masks, call.masks))
        if call.sampled is not None:
            args.append(call.sampled)
        result = getattr(worker, call.method)(*args, **call.kwargs)
    except InvalidInputError as error:
        return Answer(call.serial, f"{type(error).__name__}: {error}", is_input_error=True)
    except Exception as error:
        logger.exception(
            "worker rank %d: %s failed; its requests: %s", worker.rank, call.method, names
        )
        worker.close()
        return Answer(call.serial, f"{type(error).__name__}: {error}")
    if call.method in UNANSWERED:
        return None
    return Answer(
        call.serial,
        result=result if isinstance(result, int | str) else None,
        sampled=getattr(result, "sampled", None),
    )
