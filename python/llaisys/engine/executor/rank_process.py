"""A rank in a process of its own: one worker that does what it is told.

    python -m llaisys.engine.executor.rank_process      (started by `mp`, never by hand)

A worker that failed closes its model and so leaves the group: ranks that wait for it are told.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import setup_logging
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.messages import Answer, Call, RankSetup, decode_call
from llaisys.engine.wire import decode_masks, decode_plan
from llaisys.engine.worker import Worker
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.child import end_with_parent

logger = logging.getLogger("llaisys.engine")

METHODS = {
    "init_device", "open_model", "load_model", "warmup", "execute_step", "execute_model",
    "sample_tokens", "profile", "gpu_use", "check_health",
}  # fmt: skip


def answer_call(worker: Worker, call: Call, receive: Callable[[], bytes]) -> Answer:
    """Run a method; an exception becomes its text. `receive`: the frame that follows the call."""
    try:
        if call.method not in METHODS:
            raise ValueError(f"{call.method!r} is not a call of a worker")
        args: list[Any] = [] if call.plan is None else [decode_plan(call.plan)]
        if call.number is not None:
            args.append(call.number)
        if call.has_masks:
            args.append(lambda: decode_masks(receive()))
        result = getattr(worker, call.method)(*args, **call.kwargs)
    except InvalidInputError as error:
        return Answer(call.serial, f"{type(error).__name__}: {error}", is_input_error=True)
    except Exception as error:
        logger.exception("worker rank %d: %s failed", worker.rank, call.method)
        worker.close()
        return Answer(call.serial, f"{type(error).__name__}: {error}")
    return Answer(
        call.serial,
        number=result if isinstance(result, int) else 0,
        sampled=getattr(result, "sampled", None),
    )


def serve(setup: RankSetup) -> None:
    """For ever: the parent ends this process."""
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
        answers.send(encode(answer_call(worker, decode_call(calls.recv()), calls.recv)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stream = sys.stdin.buffer
    setup = msgspec.json.decode(stream.readline(), type=RankSetup)
    setup_logging(setup.log_level, setup.log_format)
    end_with_parent(stream, setup.socket_directory)
    try:
        serve(setup)
    finally:
        logger.exception("worker rank %d cannot go on", setup.rank)
        os._exit(1)  # the watcher holds standard input: a normal exit would wait for its lock


if __name__ == "__main__":
    main()
