"""One process per rank: the driver rank is this process, the others are its children. Ranks
communicate in shared memory."""

import os
import time
from typing import Any

import zmq

from llaisys.common.logs import format_name, level_name
from llaisys.common.parallel import ParallelConfig
from llaisys.engine.executor.driver import DriverExecutor, close_if_same
from llaisys.engine.executor.local import WorkerLostError
from llaisys.engine.executor.messages import Answer, Call, decode_answer
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.child import ChildProcess

POLL_MS = 50  # interval of checks whether a child has exited
CHILD_MODULE = "llaisys.engine.executor.rank_process"


class RankProcess:
    """A child process with one worker, and its sockets."""

    def __init__(
        self, context: Context, rank: int, setup: dict[str, Any], group_files: tuple[int, ...]
    ) -> None:
        self.rank = rank
        self.child = ChildProcess(CHILD_MODULE, setup, pass_fds=group_files)
        self.popen = self.child.popen
        self._calls = connect_sender(context, self.child.input_address, linger_ms=0)
        self._answers = bind_receiver(context, self.child.output_address)

    def send(self, call: Call) -> None:
        self._calls.send(encode(call))

    def receive(self, serial: int, deadline: float | None) -> Answer:
        while True:
            if self._answers.poll(POLL_MS):
                answer: Answer = decode_answer(self._answers.recv())
                if answer.serial == serial or answer.is_fatal:
                    return answer
            elif self.popen.poll() is not None and not self._answers.poll(0):
                raise WorkerLostError(self.exit_text())
            elif deadline is not None and time.monotonic() > deadline:
                raise WorkerLostError(f"worker rank {self.rank} does not reply")

    def check_alive(self) -> None:
        if self.popen.poll() is not None:
            raise WorkerLostError(self.exit_text())

    def exit_text(self) -> str:
        """Return the error text of a child that has exited."""
        status = self.popen.wait()
        return f"worker rank {self.rank} (process {self.popen.pid}) ended with status {status}"

    def close(self) -> None:
        self._calls.close(linger=0)
        self._answers.close(linger=0)
        self.child.remove()


class MultiprocExecutor(DriverExecutor, backend="mp"):
    _children: list[RankProcess]

    def _init_ranks(self) -> None:
        config = self.config
        files = _group_files(config.parallel)
        inodes = {file: os.fstat(file).st_ino for of_rank in files for file in of_rank}
        self._context: Context = zmq.Context()
        self._make_driver(config, _init_method(files[0]))
        try:
            for rank in range(1, config.parallel.world_size):
                setup = {
                    "engine": config.to_wire(),
                    "rank": rank,
                    "local_rank": rank,
                    "init_method": _init_method(files[rank]),
                    "log_level": level_name(),
                    "log_format": format_name(),
                }
                self._children.append(RankProcess(self._context, rank, setup, files[rank]))
            self._load_models()
        except BaseException:
            self.shutdown()
            raise
        finally:
            is_joined = self.worker.adapter is not None and self._children
            for file, inode in inodes.items():
                if not is_joined or file not in files[0]:
                    close_if_same(file, inode)

    def _release(self) -> None:
        self._context.term()


def _group_files(parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Create the files of the process groups of each rank: of its stage, of all ranks, or both. A
    model owns those of its rank once it is loaded."""
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    everyone = os.memfd_create("llaisys-tp")
    if 1 in (size, stages):
        return [(everyone,)] * parallel.world_size
    own = [os.memfd_create("llaisys-tp") for _ in range(stages)]
    return [(own[rank // size], everyone) for rank in range(parallel.world_size)]


def _init_method(files: tuple[int, ...]) -> str:
    return " ".join(f"fd://{file}" for file in files)
