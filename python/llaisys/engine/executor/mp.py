"""One process per rank: the driver rank is this one, the others are its children.

A plan is sent to every child and run here; ranks meet inside the model, through shared memory, and
all of them draw the same tokens. The driver's are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

import zmq

from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import format_name, level_name
from llaisys.common.step import TokenMasks
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.executor.base import (
    Executor,
    ExecutorTimeoutError,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.executor.local import LocalRank
from llaisys.engine.executor.messages import Answer, Call, decode_answer
from llaisys.engine.wire import encode_masks, encode_plan
from llaisys.engine.worker import Worker
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.child import ChildProcess

logger = logging.getLogger("llaisys.engine")

ANSWER_GRACE = 10.0  # seconds behind the driver within which the others must answer a step
LOOK_MS = 50  # between looks whether a silent child still lives
CHILD_MODULE = "llaisys.engine.executor.rank_process"


class RankProcess:
    """A child with one worker, and the sockets to it."""

    def __init__(self, context: Context, rank: int, setup: dict[str, Any], group_file: int) -> None:
        self.rank = rank
        self.child = ChildProcess(CHILD_MODULE, setup, pass_fds=(group_file,))
        self.popen = self.child.popen
        self._calls = connect_sender(context, self.child.input_address, linger_ms=0)
        self._answers = bind_receiver(context, self.child.output_address)

    def send(self, call: Call) -> None:
        self.send_frame(encode(call))

    def send_frame(self, frame: bytes) -> None:
        self._calls.send(frame)

    def receive(self, serial: int, deadline: float | None) -> Answer:
        """The answer to a call; earlier ones, for which nobody waited, are dropped. Waits until
        time.monotonic() is `deadline`, or as long as the child lives."""
        while True:
            if self._answers.poll(LOOK_MS):
                answer: Answer = decode_answer(self._answers.recv())
                if answer.serial == serial:
                    return answer
            elif self.popen.poll() is not None and not self._answers.poll(0):
                raise WorkerLostError(self.epitaph())
            elif deadline is not None and time.monotonic() > deadline:
                raise WorkerLostError(f"worker rank {self.rank} does not answer")

    def epitaph(self) -> str:
        """Of a child that has ended."""
        status = self.popen.wait()
        return f"worker rank {self.rank} (process {self.popen.pid}) ended with status {status}"

    def close(self) -> None:
        self._calls.close(linger=0)
        self._answers.close(linger=0)
        self.child.remove()


class MultiprocExecutor(Executor, backend="mp"):
    """Nothing can follow once a rank is lost or ranks disagree: WorkerLostError."""

    def _init_executor(self) -> None:
        self._children: list[RankProcess] = []
        self._serial = 0  # of the last call
        config = self.config
        if config.adapter_class is not None:
            raise InvalidInputError(
                "adapter_class: a class cannot be sent to another process", field="adapter_class"
            )
        group_file = os.memfd_create("llaisys-tp")  # the model takes it over
        inode = os.fstat(group_file).st_ino
        method = f"fd://{group_file}"
        self._context: Context = zmq.Context()
        self._driver = LocalRank(
            Worker(config, 0, 0, distributed_init_method=method, is_driver_worker=True)
        )
        self.worker = self._driver.worker
        try:
            for rank in range(1, config.parallel.tensor_parallel_size):
                setup = {
                    "engine": config.to_wire(),
                    "rank": rank,
                    "local_rank": rank,
                    "init_method": method,
                    "log_level": level_name(),
                    "log_format": format_name(),
                }
                self._children.append(RankProcess(self._context, rank, setup, group_file))
            self._load_models()
        except BaseException:
            self.shutdown()
            raise
        finally:
            if self.worker.adapter is None or not self._children:
                _close_if_ours(group_file, inode)

    def _call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The driver's result, then what the other ranks say of theirs."""
        self._driver.settle(timeout)
        self._send(method, args, kwargs)
        error: Exception | None = None
        result: Any = None
        try:
            if self._children:  # an interrupt of this thread must not part the ranks
                running = self._driver.start(method, args, kwargs)
                if len(args) > 1:  # the driver waits for the same in its thread
                    self._send_masks(args[1]())
                result = self._driver.result(running, timeout)
            else:
                result = self._driver.call(method, timeout, args, kwargs)
        except ExecutorTimeoutError:
            raise
        except Exception as failure:
            error = failure
            if not isinstance(failure, InvalidInputError):
                self.worker.close()  # it leaves the group: the others are told, if they wait
        is_step = method in ("execute_step", "execute_model", "sample_tokens")
        deadline = time.monotonic() + ANSWER_GRACE if is_step else None
        answers = [child.receive(self._serial, deadline) for child in self._children]
        self._check(method, error, answers)
        if method == "open_model":
            return [result, *(answer.number for answer in answers)]
        self._check_agreement(getattr(result, "sampled", None), answers)
        return [result, *answers]

    def _call_driver(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> Any:
        try:
            return self._driver.call(method, timeout, args, {})
        except ExecutorTimeoutError:
            raise
        except Exception as error:
            raise WorkerError(f"{method}: {type(error).__name__}: {error}", 0, 0) from error

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._serial += 1
        first = args[0] if args else None
        if isinstance(first, SchedulerOutputs):
            call = Call(
                self._serial,
                method,
                plan=encode_plan(first),
                kwargs=kwargs,
                has_masks=len(args) > 1,
            )
        else:
            call = Call(self._serial, method, number=first, kwargs=kwargs)
        for child in self._children:
            child.send(call)

    def _send_masks(self, masks: TokenMasks) -> None:
        frame = encode_masks(masks)
        for child in self._children:
            child.send_frame(frame)

    def _check(self, method: str, error: Exception | None, answers: list[Answer]) -> None:
        failed = [rank for rank, answer in enumerate(answers, 1) if answer.error]
        if error is None and not failed:
            return
        if error is not None:
            text, rank = f"{type(error).__name__}: {error}", 0
        else:
            text, rank = answers[failed[0] - 1].error, failed[0]
        described = WorkerError(f"{method}: {text}", rank, rank)
        alike = len(failed) == len(answers) and all(a.is_input_error for a in answers)
        if not answers or (isinstance(error, InvalidInputError) and alike):
            raise described from error
        raise WorkerLostError(str(described)) from error

    def _check_agreement(self, drawn: dict[int, list[int]] | None, answers: list[Answer]) -> None:
        """Ranks add up the same numbers in the same order: they cannot draw different tokens."""
        for rank, answer in enumerate(answers, 1):
            if answer.sampled != drawn:
                raise WorkerLostError(f"worker rank {rank} drew {answer.sampled}, rank 0 {drawn}")

    def check_health(self) -> None:
        for child in self._children:
            if child.popen.poll() is not None:
                raise WorkerLostError(child.epitaph())
        super().check_health()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in self._children:  # first: the driver may wait for one of them
            child.close()
        self._driver.close()
        self._context.term()


def _close_if_ours(descriptor: int, inode: int) -> None:
    """Unless the model that failed has closed it, and somebody else has got its number."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)
