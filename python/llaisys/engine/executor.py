"""Carries plans to workers and results back; knows nothing of scheduling or of models."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, TypeVar

from llaisys.common.errors import ClosedError, LlaisysError
from llaisys.common.types import ModelInfo, SchedulerOutputs, StepOutput
from llaisys.engine.config import EngineConfig
from llaisys.engine.worker import Worker

logger = logging.getLogger("llaisys.engine")

T = TypeVar("T")


class WorkerError(LlaisysError, RuntimeError):
    """A worker raised; the cause is chained. The step had no effect on the requests."""

    def __init__(self, message: str, rank: int, local_rank: int) -> None:
        super().__init__(f"worker rank {rank} (local rank {local_rank}): {message}")
        self.rank = rank
        self.local_rank = local_rank


class WorkerLostError(LlaisysError, RuntimeError):
    """A worker is gone and does not come back: the engine cannot go on."""


class ExecutorTimeoutError(LlaisysError, TimeoutError):
    """A worker did not answer in time; it may still be busy."""


@dataclass(slots=True)
class ExecutorStats:
    steps: int = 0
    worker_errors: int = 0
    timeouts: int = 0  # apart from worker_errors


class Executor(ABC):
    """One step = one call of `execute_step`; `execute_model` and `sample_tokens` are its two halves
    under the seeds' names."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = ExecutorStats()
        self.model_info: ModelInfo
        self._init_executor()

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """The executor for `distributed_executor_backend`; mp and ray are not there yet."""
        backend = config.parallel.distributed_executor_backend
        if backend == "uni":
            return UniProcExecutor
        raise NotImplementedError(
            f"distributed_executor_backend is {backend!r}; only 'uni' is implemented"
        )

    @abstractmethod
    def _init_executor(self) -> None:
        """Make the workers, load the model, set `model_info`."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; the results in order of rank."""

    def _load_models(self) -> ModelInfo:
        """Load on every rank, with the smallest number of KV blocks that a rank can afford; the
        driver rank's word on it."""
        try:
            num_blocks = min(self.collective_rpc("open_model"))
            info: ModelInfo = self.collective_rpc("load_model", args=(num_blocks,))[0]
            if self.config.warmup:
                self.collective_rpc("warmup")
        except WorkerError as error:
            if isinstance(error.__cause__, LlaisysError):
                raise error.__cause__ from None  # what is wrong with the model or its options
            raise
        return info

    @abstractmethod
    def shutdown(self) -> None:
        """Close every worker; more than once does nothing."""

    def execute_step(self, plan: SchedulerOutputs) -> StepOutput:
        """Run a plan on every rank and draw; the driver rank's result."""
        output: StepOutput = self.collective_rpc("execute_step", self.config.step_timeout, (plan,))[
            0
        ]
        self.stats.steps += 1
        return output

    def execute_model(self, outputs: SchedulerOutputs) -> None:
        """Run the forward pass of a plan on every rank."""
        self.collective_rpc("execute_model", self.config.step_timeout, (outputs,))
        self.stats.steps += 1

    def sample_tokens(self) -> StepOutput:
        """The driver rank's draws for the step that `execute_model` ran."""
        output: StepOutput = self.collective_rpc("sample_tokens", self.config.step_timeout)[0]
        return output

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """The driver rank's times per stage."""
        result: dict[str, Any] = self.collective_rpc("profile", kwargs={"reset": reset})[0]
        return result

    def check_health(self) -> None:
        """Raises when a worker cannot run a step."""
        self.collective_rpc("check_health")


class UniProcExecutor(Executor):
    """One worker in this process, called directly; with a step timeout, in a thread of its own."""

    def _init_executor(self) -> None:
        self._closed = False
        self._thread: ThreadPoolExecutor | None = None
        self._late: Future[Any] | None = None  # a call that timed out
        parallel = self.config.parallel
        if parallel.tensor_parallel_size > 1:
            raise NotImplementedError(
                f"tensor_parallel_size is {parallel.tensor_parallel_size}; the uni executor "
                "runs 1 rank for now"
            )
        method, rank, local_rank = self._distributed_args()
        self.worker = Worker(
            self.config,
            local_rank=local_rank,
            rank=rank,
            distributed_init_method=method,
            is_driver_worker=True,
        )
        try:
            self.worker.init_device()
            self.model_info = self._load_models()
        except BaseException:
            self.worker.close()
            raise
        info = self.model_info
        logger.info(
            "executor backend=%s tp_size=%d world_size=%d rank=%d local_rank=%d device=%s:%d "
            "model=%s max_model_len=%d kv_blocks=%d x %d tokens (%.1f MiB)",
            parallel.distributed_executor_backend,
            parallel.tensor_parallel_size,
            parallel.world_size,
            rank,
            local_rank,
            self.config.device,
            self.worker.device_id,
            info.model_type,
            info.max_model_len,
            info.num_blocks,
            info.block_size,
            info.num_blocks * info.block_size * info.kv_bytes_per_token / (1 << 20),
        )

    def _distributed_args(self) -> tuple[str, int, int]:
        """(distributed_init_method, rank, local_rank)."""
        parallel = self.config.parallel
        return parallel.init_method, parallel.rank, parallel.local_rank

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        if self._closed:
            raise ClosedError("the executor is shut down")
        function = getattr(self.worker, method)
        try:
            return [self._call(function, timeout, args, dict(kwargs or {}))]
        except ExecutorTimeoutError:
            self.stats.timeouts += 1
            raise
        except Exception as error:
            self.stats.worker_errors += 1
            raise WorkerError(
                f"{method}: {type(error).__name__}: {error}",
                self.worker.rank,
                self.worker.local_rank,
            ) from error

    def _call(
        self,
        function: Callable[..., T],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> T:
        if self._late is not None:
            if timeout is not None:
                wait_for([self._late], timeout)
            if not self._late.done():
                raise ExecutorTimeoutError("the worker is still busy with a call that timed out")
            self._late = None
        if timeout is None and self._thread is None:
            return function(*args, **kwargs)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llaisys-worker")
        future = self._thread.submit(function, *args, **kwargs)
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            if future.done():
                raise  # the worker's own TimeoutError
            self._late = future
            raise ExecutorTimeoutError(f"the worker did not answer in {timeout} s") from None

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)  # the model must not be freed under a running step
        self.worker.close()
