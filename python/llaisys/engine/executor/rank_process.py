"""The process of one rank: executes the calls of the driver.

python -m llaisys.engine.executor.rank_process      (started by `mp`)
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import zmq

from llaisys.common.errors import InvalidInputError
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.messages import Answer, Call, RankSetup, decode_call
from llaisys.engine.wire import decode_masks, decode_plan
from llaisys.engine.worker import Worker
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.startup import init_child

logger = logging.getLogger("llaisys.engine")

METHODS = {
    "init_device", "open_model", "load_model", "warmup", "execute_model", "sample_tokens",
    "profile", "gpu_usage", "check_health", "call_lora", "store_tokens",
}  # fmt: skip
UNANSWERED = ("execute_model", "store_tokens")


def answer_call(worker: Worker, call: Call) -> Answer | None:
    """Run a method; an exception becomes an error text. None: no answer is sent. A failed worker
    closes its model and leaves the group, which ends the waits of the other ranks."""
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


def serve(setup: RankSetup) -> None:
    """Serve calls until the parent ends this process."""
    context: Context = zmq.Context()
    answers = connect_sender(context, setup.output_address, linger_ms=0)
    calls = bind_receiver(context, setup.input_address)
    worker = Worker(
        EngineConfig.from_wire(setup.engine),
        local_rank=setup.local_rank,
        rank=setup.rank,
        distributed_init_method=setup.init_method,
        is_driver_worker=False,
    )
    while True:
        answer = answer_call(worker, decode_call(calls.recv()))
        if answer is not None:
            answers.send(encode(answer))


def main() -> None:
    setup = init_child(RankSetup)
    try:
        serve(setup)
    finally:
        logger.exception("worker rank %d cannot continue", setup.rank)
        os._exit(1)  # a thread reads standard input: a normal exit would wait for its lock


if __name__ == "__main__":
    main()
