"""Carries plans to workers and results back: one process (uni) or one per rank (mp)."""

from llaisys.engine.executor.base import (
    Executor,
    ExecutorStats,
    ExecutorTimeoutError,
    WorkerError,
    WorkerLostError,
)
from llaisys.engine.executor.estimate import MemoryEstimate, estimate_memory
from llaisys.engine.executor.mp import MultiprocExecutor
from llaisys.engine.executor.uni import UniProcExecutor

__all__ = [
    "Executor",
    "ExecutorStats",
    "ExecutorTimeoutError",
    "MemoryEstimate",
    "MultiprocExecutor",
    "UniProcExecutor",
    "WorkerError",
    "WorkerLostError",
    "estimate_memory",
]
