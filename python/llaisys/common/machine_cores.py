"""The number of cores that this process may use."""

from __future__ import annotations

import os

from llaisys.common.cgroup import cpu_quota


def usable_cores() -> int:
    """Whole cores for threads that compute all the time, at least 1: the CPUs in the affinity mask
    of this thread, or fewer with a CPU quota of a control group."""
    cores = len(os.sched_getaffinity(0))
    return cores_within(cores, cpu_quota())


def cores_within(cores: int, quota: float | None) -> int:
    """`cores`, or fewer with a quota. A fraction of a core gets no thread."""
    return cores if quota is None else max(1, min(cores, int(quota)))


def describe_cores() -> str:
    """The cores for `llaisys env`, with the limits that lower their number."""
    online, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota()
    limits = []
    if allowed < online:
        limits.append(f"CPU affinity allows {allowed}")
    if quota is not None:
        limits.append(f"CPU quota of the control group: {quota:g}")
    usable = cores_within(allowed, quota)
    return f"{usable} of {online} ({', '.join(limits)})" if limits else str(usable)
