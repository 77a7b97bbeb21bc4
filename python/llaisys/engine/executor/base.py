"""Base class of the executors, which call the workers of all ranks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from llaisys.common.errors import ClosedError, LlaisysError
from llaisys.common.step import TokenMasks
from llaisys.common.types import (
    BlockCopy,
    DraftRequest,
    GpuUsage,
    ModelInfo,
    SchedulerOutputs,
    StepOutput,
)
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.engine.executor.local import (
    ExecutorTimeoutError,
    LocalRank,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.worker import Worker

logger = logging.getLogger("llaisys.engine")


@dataclass(slots=True)
class ExecutorStats:
    worker_errors: int = 0
    timeouts: int = 0  # not in worker_errors


class Executor(ABC):
    """A step is launched by `execute_model` and collected by `sample_tokens`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolve_device(config) if config.device == "auto" else config
        self.stats = ExecutorStats()
        self.model_info: ModelInfo
        self._driver: LocalRank
        self._closed = False
        self._init_executor()

    _kinds: ClassVar[dict[str, type[Executor]]] = {}  # by backend

    def __init_subclass__(cls, backend: str | None = None) -> None:
        if backend is not None:
            Executor._kinds[backend] = cls

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Return the executor class of `distributed_executor_backend`."""
        return Executor._kinds[config.parallel.distributed_executor_backend]

    @property
    def worker(self) -> Worker:
        """The worker of the driver rank, which is in this process."""
        return self._driver.worker

    @property
    def local_ranks(self) -> Sequence[LocalRank]:
        """The ranks in this process; the driver rank is the first."""
        return [self._driver]

    @abstractmethod
    def _init_executor(self) -> None:
        """Create the workers, load the model, set `_driver` and `model_info`."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; return the results in order of rank."""
        self._check_open()
        with self._counted():
            return self._call(method, timeout, tuple(args), dict(kwargs or {}))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the errors of workers."""
        try:
            yield
        except ExecutorTimeoutError:
            self.stats.timeouts += 1
            raise
        except (WorkerError, WorkerLostError):
            self.stats.worker_errors += 1
            raise

    def draft(self, requests: Sequence[DraftRequest], released: Sequence[int]) -> list[list[int]]:
        """Return draft tokens per request, from the driver rank; see `Drafter.draft`."""
        self._check_open()
        with self._counted():
            return self._call_driver("draft", self.config.step_timeout, (requests, released))

    def _call_driver(
        self,
        method: str,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of the driver rank only."""
        try:
            return self._driver.call(method, timeout, args, kwargs or {})
        except ExecutorTimeoutError:
            raise
        except Exception as error:
            raise WorkerError.of(method, self.worker, error) from error

    @abstractmethod
    def _call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Implement collective_rpc. An exception of a worker becomes a WorkerError, or a
        WorkerLostError when the ranks are out of step."""

    def _load_models(self) -> None:
        """Load the model on every rank with the smallest number of KV blocks of a rank."""
        try:
            self.collective_rpc("init_device")
            num_blocks = min(self.collective_rpc("open_model"))
            info: ModelInfo = self.collective_rpc("load_model", args=(num_blocks,))[0]
            if self.config.warmup:
                self.collective_rpc("warmup")
        except (WorkerError, WorkerLostError) as error:
            if isinstance(error.__cause__, LlaisysError):
                raise error.__cause__ from None  # an error of the model or its options
            raise
        self.model_info = info
        parallel = self.config.parallel
        logger.info(
            "executor backend=%s tp_size=%d world_size=%d pp_size=%d device=%s model=%s "
            "max_model_len=%d kv_blocks=%d x %d tokens (%s, %.1f MiB per rank) host_blocks=%d "
            "(%.1f MiB per rank)",
            parallel.distributed_executor_backend,
            parallel.tensor_parallel_size,
            parallel.world_size,
            parallel.pipeline_parallel_size,
            self.config.device,
            info.model_type,
            info.max_model_len,
            info.num_blocks,
            info.block_size,
            info.kv_cache_dtype,
            info.kv_cache_bytes / (1 << 20),
            info.num_host_blocks,
            info.kv_host_bytes / (1 << 20),
        )

    @abstractmethod
    def shutdown(self) -> None:
        """Close every worker; idempotent."""

    @property
    def can_launch(self) -> bool:
        """Whether `execute_model` supports `queued`."""
        return self.config.step_timeout is None and self.worker.can_launch

    @abstractmethod
    def execute_model(self, outputs: SchedulerOutputs, queued: bool = False) -> None:
        """Launch a step on every rank; `sample_tokens` must follow. `queued`: see Worker."""

    @abstractmethod
    def sample_tokens(
        self, step_id: int | None = None, masks: Callable[[], TokenMasks] | None = None
    ) -> StepOutput:
        """Collect a launched step, or the oldest one; return the driver rank's result. `masks`:
        returns the masks of structured output, the same for every rank; it may wait."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the executor is shut down")

    def host_files(self) -> list[int]:
        """Return the descriptor of each rank's host slots, which this process has."""
        return self.collective_rpc("host_file")

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks to host slots or back on every rank, outside of a step."""
        self.collective_rpc("copy_blocks", args=(copies,))

    def call_lora(self, method: str, lora_id: int, *args: Any) -> list[Any]:
        """Call a method of every rank's LoraStore."""
        return self.collective_rpc("call_lora", args=(method, lora_id, *args))

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """Return the times per stage of the driver rank."""
        return self.collective_rpc("profile", kwargs={"reset": reset})[0]

    def gpu_usage(self) -> list[GpuUsage]:
        """Return the usage of the driver rank's GPU; empty on a CPU."""
        use: GpuUsage | None = self.collective_rpc("gpu_usage")[0]
        return [] if use is None else [use]

    def check_health(self) -> None:
        """Raises when a worker cannot run a step."""
        self.collective_rpc("check_health")
