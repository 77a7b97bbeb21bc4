"""Executors call the workers of all ranks: in this process (uni), in a process per rank (mp), or on
a Ray cluster (ray)."""

from llaisys.engine.executor.base import Executor, ExecutorStats
from llaisys.engine.executor.estimate import MemoryEstimate, estimate_memory
from llaisys.engine.executor.local import ExecutorTimeoutError, WorkerError, WorkerLostError
from llaisys.engine.executor.mp import MultiprocExecutor
from llaisys.engine.executor.ray import RayExecutor
from llaisys.engine.executor.uni import UniProcExecutor

__all__ = [
    "Executor",
    "ExecutorStats",
    "ExecutorTimeoutError",
    "MemoryEstimate",
    "MultiprocExecutor",
    "RayExecutor",
    "UniProcExecutor",
    "WorkerError",
    "WorkerLostError",
    "estimate_memory",
]
