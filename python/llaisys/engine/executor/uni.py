"""All ranks in this process: one is called directly, several run in a thread each."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import TokenMasks
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.common.validation import invalid_value
from llaisys.engine.executor.base import Executor
from llaisys.engine.executor.local import (
    ExecutorTimeoutError,
    LocalRank,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.worker import Worker

GRACE = 5.0  # seconds in which ranks that wait for a failed one return

_groups = itertools.count()  # separates the engines of a process


class UniProcExecutor(Executor, backend="uni"):
    """One worker and one model handle per rank. After a failure of some ranks only, the ranks are
    out of step and the engine cannot continue."""

    def _init_executor(self) -> None:
        parallel = self.config.parallel
        if self.config.device == "cuda" and parallel.ranks_per_device > 1:
            raise invalid_value(
                "tensor_parallel_device_ids",
                list(parallel.tensor_parallel_device_ids or ()),
                "a list without duplicates with the backend uni (mp supports ranks that share "
                "a GPU)",
            )
        method, first, _ = self._distributed_args()
        size = parallel.tensor_parallel_size
        self._ranks = [
            LocalRank(
                Worker(
                    self.config,
                    local_rank=rank,
                    rank=rank,
                    distributed_init_method=method,
                    is_driver_worker=rank == 0,
                )
            )
            for rank in range(first, first + size)
        ]
        self._driver = self._ranks[0]
        try:
            self._load_models()
        except BaseException:
            self.shutdown()
            raise

    @property
    def local_ranks(self) -> Sequence[LocalRank]:
        return self._ranks

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return (distributed_init_method, rank, local_rank) of the driver rank."""
        parallel = self.config.parallel
        method = parallel.init_method
        if parallel.tensor_parallel_size > 1:
            method = f"{method}#{next(_groups)}"
        return method, parallel.rank, parallel.local_rank

    def execute_model(self, outputs: SchedulerOutputs, queued: bool = False) -> None:
        self._run_step("execute_model", outputs, queued)

    def sample_tokens(
        self, step_id: int | None = None, masks: Callable[[], TokenMasks] | None = None
    ) -> StepOutput:
        return self._run_step("sample_tokens", step_id, masks)

    def _run_step(self, method: str, *args: Any) -> Any:
        """Call a method of every worker and return the driver's result. One rank is called in the
        caller's thread: as `collective_rpc`, in less time."""
        timeout = self.config.step_timeout
        if len(self._ranks) > 1 or timeout is not None:
            return self.collective_rpc(method, timeout, args)[0]
        self._check_open()
        try:
            return getattr(self.worker, method)(*args)
        except Exception as error:
            self.stats.worker_errors += 1
            raise WorkerError.of(method, self.worker, error) from error

    def _call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if len(self._ranks) > 1:
            return self._call_all(method, timeout, args, kwargs)
        return [self._call_driver(method, timeout, args, kwargs)]

    def _call_all(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        for rank in self._ranks:
            rank.wait_idle(timeout)
        futures = [rank.start(method, args, kwargs) for rank in self._ranks]
        done, pending = wait_for(futures, timeout, FIRST_EXCEPTION)
        failed = [i for i, f in enumerate(futures) if f in done and f.exception() is not None]
        if not failed and pending:
            for rank in self._ranks:
                rank.abandon()
            raise ExecutorTimeoutError(f"the workers did not answer in {timeout} s")
        if not failed:
            return [future.result() for future in futures]
        first = failed[0]
        self._release_waiting(futures, first)
        errors = [future.exception() for future in futures if future.done()]
        cause = futures[first].exception()
        if not isinstance(cause, Exception):
            raise WorkerLostError(f"{method}: {cause!r}")
        is_shared = len(errors) == len(futures) and all(
            isinstance(error, InvalidInputError) for error in errors
        )
        error = WorkerError.of(method, self._ranks[first].worker, cause)
        raise (error if is_shared else WorkerLostError(str(error))) from cause

    def _release_waiting(self, futures: list[Future[Any]], failed: int) -> None:
        """Close the failed rank, so that ranks which wait for it return."""
        if wait_for(futures, GRACE / 10).not_done:
            self._ranks[failed].worker.close()
            wait_for(futures, GRACE)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A busy rank may wait for others: close it last.
        for rank in sorted(self._ranks, key=lambda rank: rank.is_busy):
            rank.close()
