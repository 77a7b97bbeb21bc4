"""Executors whose driver rank is this process and whose other ranks are child processes (mp) or
actors (ray).

A plan is sent to every other rank and run here; ranks communicate inside the model, and all of them
sample the same tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import TokenMasks
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.base import (
    Executor,
    ExecutorTimeoutError,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.executor.local import LocalRank
from llaisys.engine.executor.messages import Answer, Call
from llaisys.engine.wire import encode_masks, encode_plan
from llaisys.engine.worker import Worker

REPLY_TIMEOUT = 10.0  # seconds after the driver in which the other ranks must reply


class RemoteRank(Protocol):
    """A worker in another process."""

    rank: int

    def send(self, call: Call) -> None:
        """Send a call without waiting."""

    def send_frame(self, frame: bytes) -> None:
        """Send the masks of the last call."""

    def receive(self, serial: int, deadline: float | None) -> Answer:
        """Wait for the reply to a call; replies to earlier calls are discarded. WorkerLostError:
        the rank has exited, or time.monotonic() has passed `deadline`."""

    def check_alive(self) -> None:
        """Raise WorkerLostError when the rank has exited."""

    def close(self) -> None:
        """Terminate the rank; idempotent."""


class DriverExecutor(Executor):
    """WorkerLostError when a rank is lost or ranks sample different tokens."""

    _children: Sequence[RemoteRank]
    _driver: LocalRank

    def _init_executor(self) -> None:
        self._children = []
        self._serial = 0  # of the last call
        if self.config.adapter_class is not None:
            raise InvalidInputError(
                "adapter_class: a class cannot be sent to another process", field="adapter_class"
            )
        self._init_ranks()

    @abstractmethod
    def _init_ranks(self) -> None:
        """Start the other ranks, then the driver (`_make_driver`), and load the model."""

    def _make_driver(self, config: EngineConfig, init_method: str) -> None:
        self._driver = LocalRank(
            Worker(config, 0, 0, distributed_init_method=init_method, is_driver_worker=True)
        )
        self.worker = self._driver.worker

    def _call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Return the driver's result and the replies of the other ranks."""
        self._driver.wait_idle(timeout)
        self._send(method, args, kwargs)
        error: Exception | None = None
        result: Any = None
        try:
            if self._children:  # in a thread: an interrupt must not separate the ranks
                running = self._driver.start(method, args, kwargs)
                if method == "execute_step" and len(args) > 1:
                    self._send_masks(args[1]())
                result = self._driver.result(running, timeout)
            else:
                result = self._driver.call(method, timeout, args, kwargs)
        except ExecutorTimeoutError:
            raise
        except Exception as failure:
            error = failure
            if not isinstance(failure, InvalidInputError):
                self.worker.close()  # leaves the group: waiting ranks return
        deadline = time.monotonic() + REPLY_TIMEOUT if method == "execute_step" else None
        answers = [child.receive(self._serial, deadline) for child in self._children]
        self._check(method, error, answers)
        if method in ("open_model", "lora_state"):
            return [result, *(answer.number for answer in answers)]
        self._check_tokens(getattr(result, "sampled", None), answers)
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
            text = args[1] if len(args) > 1 else None
            call = Call(self._serial, method, number=first, text=text, kwargs=kwargs)
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
        is_shared = len(failed) == len(answers) and all(a.is_input_error for a in answers)
        if not answers or (isinstance(error, InvalidInputError) and is_shared):
            raise described from error
        raise WorkerLostError(str(described)) from error

    def _check_tokens(self, sampled: dict[int, list[int]] | None, answers: list[Answer]) -> None:
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
