"""The process of one rank: executes the calls of the driver.

python -m llaisys.engine.executor.rank_process      (started by `mp`)
"""

import logging
import os

import zmq

from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.calls import answer_call
from llaisys.engine.executor.messages import RankSetup, decode_call
from llaisys.engine.worker import Worker
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.startup import init_child

logger = logging.getLogger("llaisys.engine")


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
