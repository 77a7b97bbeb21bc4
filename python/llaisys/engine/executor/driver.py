"""Executors whose driver rank is this process and whose other ranks are child processes (mp) or
actors (ray).

A plan is sent to every other rank and run here; ranks communicate inside the model. The ranks of
the last pipeline stage, of which this process is one, sample the same tokens; the ranks of other
stages are sent the tokens.
"""

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import TokenMasks
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.base import Executor
from llaisys.engine.executor.local import (
    ExecutorTimeoutError,
    LocalRank,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.executor.messages import Answer, Call
from llaisys.engine.wire import encode_masks, encode_plan
from llaisys.engine.worker import Worker

STEP_METHODS = ("execute_model", "sample_tokens")
REPLY_TIMEOUT = 10.0  # seconds after the driver in which the other ranks must reply
EXIT_SECONDS = 1.0  # within which a rank that ended a step by its exit is known to have exited


class RemoteRank(Protocol):
    """A worker in another process."""

    rank: int

    def send(self, call: Call) -> None:
        """Send a call without waiting."""

    def receive(self, serial: int, deadline: float | None) -> Answer:
        """Wait for the reply to a call. Replies to earlier calls are discarded, but a fatal one is
        returned. WorkerLostError: the rank has exited, or time.monotonic() has passed
        `deadline`."""

    def check_alive(self) -> None:
        """Raise WorkerLostError when the rank has exited."""

    def close(self) -> None:
        """Terminate the rank; idempotent."""


class DriverExecutor(Executor):
    """WorkerLostError when a rank is lost or ranks sample different tokens."""

    _children: Sequence[RemoteRank]

    def _init_executor(self) -> None:
        self._children = []
        self._serial = 0  # of the last call
        if self.config.adapter_class is not None:
            raise InvalidInputError(
                "adapter_class: a class cannot be sent to another process", field="adapter_class"
            )
        self._init_ranks()

    @property
    def children(self) -> Sequence[RemoteRank]:
        """The ranks in other processes."""
        return self._children

    @abstractmethod
    def _init_ranks(self) -> None:
        """Start the other ranks, then the driver (`_make_driver`), and load the model."""

    @property
    def _samplers(self) -> Sequence[RemoteRank]:
        """Ranks of the last pipeline stage, except the driver."""
        return self._children[: self.config.parallel.tensor_parallel_size - 1]

    @property
    def _upstream(self) -> Sequence[RemoteRank]:
        """Ranks of the other pipeline stages."""
        return self._children[self.config.parallel.tensor_parallel_size - 1 :]

    def _make_driver(self, config: EngineConfig, init_method: str) -> None:
        self._driver = LocalRank(
            Worker(config, 0, 0, distributed_init_method=init_method, is_driver_worker=True)
        )

    def execute_model(self, outputs: SchedulerOutputs, queued: bool = False) -> None:
        """Launch the step on every rank without waiting for the others."""
        self._check_open()
        timeout = self.config.step_timeout
        with self._counted():
            self._driver.wait_idle(timeout)
            plan = encode_plan(outputs)
            self._send(Call(self._next_serial(), "execute_model", (queued,), plan=plan))
            _, error = self._run_driver("execute_model", timeout, (outputs, queued), {})
            if error is not None:  # else the reply to `sample_tokens` reports other ranks' errors
                self._check("execute_model", error, self._receive("execute_model"))

    def sample_tokens(
        self, step_id: int | None = None, masks: Callable[[], TokenMasks] | None = None
    ) -> StepOutput:
        self._check_open()
        found = None if masks is None else masks()
        encoded = None if found is None else encode_masks(found)
        timeout = self.config.step_timeout
        with self._counted():
            self._driver.wait_idle(timeout)
            call = Call(self._next_serial(), "sample_tokens", (step_id,), masks=encoded)
            self._send(call, self._samplers)
            args = (step_id,) if found is None else (step_id, lambda: found)
            output, error = self._run_driver("sample_tokens", timeout, args, {})
            if self._upstream and error is not None and not isinstance(error, InvalidInputError):
                self._check_upstream()
            answers = self._receive("sample_tokens", self._samplers)
            self._check("sample_tokens", error, answers)
            self._check_tokens(output.sampled, answers)
            if self._upstream:
                serial, args = self._next_serial(), (output.step_id,)
                store = Call(serial, "store_tokens", args, sampled=output.sampled)
                self._send(store, self._upstream)
        return cast(StepOutput, output)

    def _call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Return the results of the driver and of the other ranks. While steps of a pipeline
        are in flight, other stages may wait for this one: then only the driver is called."""
        self._driver.wait_idle(timeout)
        if self.worker.num_planned:
            return [self._call_driver(method, timeout, args, kwargs)]
        self._send(Call(self._next_serial(), method, args, kwargs))
        result, error = self._run_driver(method, timeout, args, kwargs)
        answers = self._receive(method)
        self._check(method, error, answers)
        return [result, *(answer.result for answer in answers)]

    def _run_driver(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Exception | None]:
        """Return the result of the driver rank, or its error."""
        try:
            if self._children:  # in a thread: an interrupt must not separate the ranks
                return self._driver.result(self._driver.start(method, args, kwargs), timeout), None
            return self._driver.call(method, timeout, args, kwargs), None
        except ExecutorTimeoutError:
            raise
        except Exception as error:
            if not isinstance(error, InvalidInputError):
                self.worker.close()  # leaves the group: waiting ranks return
            return None, error

    def _receive(self, method: str, ranks: Sequence[RemoteRank] | None = None) -> list[Answer]:
        """Return the replies of these ranks to the last call; None: all but the driver."""
        deadline = time.monotonic() + REPLY_TIMEOUT if method in STEP_METHODS else None
        ranks = self._children if ranks is None else ranks
        return [child.receive(self._serial, deadline) for child in ranks]

    def _check_upstream(self) -> None:
        """Raise WorkerLostError when a rank of another stage has exited, or exits soon."""
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline:
            for child in self._upstream:
                child.check_alive()
            time.sleep(EXIT_SECONDS / 50)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _send(self, call: Call, ranks: Sequence[RemoteRank] | None = None) -> None:
        """Send a call to these ranks; None: all but the driver."""
        for child in self._children if ranks is None else ranks:
            child.send(call)

    def _check(self, method: str, error: Exception | None, answers: list[Answer]) -> None:
        failed = [rank for rank, answer in enumerate(answers, 1) if answer.error]
        if error is None and not failed:
            return
        if error is not None:
            text, rank = f"{type(error).__name__}: {error}", 0
        else:
            text, rank = answers[failed[0] - 1].error, failed[0]
        described = WorkerError(f"{method}: {text}", rank, rank)
        is_shared = len(failed) == len(answers) and all(a.is_input_error for a in answers)
        if not self._children or (isinstance(error, InvalidInputError) and is_shared):
            raise described from error
        raise WorkerLostError(str(described)) from error

    def _check_tokens(self, sampled: dict[int, list[int]], answers: list[Answer]) -> None:
        """Raise WorkerLostError unless all ranks sampled the same tokens."""
        for rank, answer in enumerate(answers, 1):
            if answer.sampled != sampled:
                raise WorkerLostError(
                    f"worker rank {rank} sampled {answer.sampled}, rank 0 {sampled}"
                )

    def check_health(self) -> None:
        for child in self._children:
            child.check_alive()
        super().check_health()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in self._children:  # first: the driver may wait for one of them
            child.close()
        if hasattr(self, "_driver"):  # else starting the ranks failed
            self._driver.close()
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Free shared resources after all ranks are closed."""


def close_if_same(descriptor: int, inode: int) -> None:
    """Close a descriptor unless it was closed and its number reused."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)
