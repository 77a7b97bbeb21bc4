"""The cores and the memory that this process may use.

Limits of control groups (cgroup v1 and v2) count: a limit holds for a group and everything below
it, so the groups of this process up to the root of the mount are read.
`src/device/cpu/usable_cores.cpp` reads the CPU quota in the same way.
"""

import functools
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 reports a huge number of bytes in place of "no limit"


def cpu_quota(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float | None:
    """CPUs' worth of time per second, the smallest of all groups; None: no quota."""
    found = []
    for group in _groups("cpu", membership, root):
        limit, _, period = _text(group / "cpu.max").partition(" ")
        if not limit:
            limit = _text(group / "cpu.cfs_quota_us")  # -1: no quota
            period = _text(group / "cpu.cfs_period_us")
        if limit.isdecimal() and period.isdecimal() and int(limit) and int(period):
            found.append(int(limit) / int(period))
    return min(found, default=None)


def memory_left(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """Bytes that may still be allocated, the smallest of all groups; None: no limit.

    The page cache of files counts as free, as in MemAvailable: the kernel drops it first.
    """
    found = []
    for group in _groups("memory", membership, root):
        limits = [_text(group / name) for name in ("memory.max", "memory.high")]
        used = _text(group / "memory.current")
        names = ("active_file", "inactive_file")
        if not used:
            limits = [_text(group / "memory.limit_in_bytes")]
            used = _text(group / "memory.usage_in_bytes")
            names = ("total_active_file", "total_inactive_file")
        limit = min((int(text) for text in limits if text.isdecimal()), default=NO_LIMIT)
        if limit < NO_LIMIT and used.isdecimal():
            stat = _stat(group / "memory.stat")
            files = sum(stat.get(name, 0) for name in names)
            found.append(max(0, limit - max(0, int(used) - files)))
    return min(found, default=None)


def _groups(controller: str, membership: Path, root: Path) -> Iterator[Path]:
    """The directories of this process's groups. Some may not exist: a container may see the path of
    the host while its own group is the root of the mount."""
    for line in _text(membership).splitlines():  # "hierarchy:controllers:path"
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        controllers, path = parts[1], PurePosixPath("/", parts[2])
        if not controllers:
            mounts = [root]
        elif controller in controllers.split(","):
            mounts = [root / name for name in {controllers, controller}]
        else:
            continue
        for mount in mounts:
            yield from (mount / str(part)[1:] for part in (path, *path.parents))


def _text(path: Path) -> str:
    """The stripped text of a file; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _stat(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


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


def available_memory() -> int:
    """Bytes that can be allocated without swapping: of the machine, or less in a control group with
    a memory limit."""
    free, left = free_memory(), memory_left()
    return free if left is None else min(free, left)


def describe_memory() -> str:
    """The available memory for `llaisys env`, with the limit that lowers it."""
    free, left = free_memory(), memory_left()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{min(free, free if left is None else left) / 2**30:.1f} GiB available"
    text += f" of {total / 2**30:.1f} GiB"
    if left is not None and left < free:
        text += " (memory limit of the control group)"
    return text


def free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@functools.cache
def _memory_file() -> int:
    """Return a descriptor of this process' memory counts; -1 without /proc."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def resident_bytes() -> int:
    """Return the resident bytes, or their peak without /proc. Makes one system call: after each
    the thread may have to wait for the GIL, and a late heartbeat looks like a stuck process."""
    if _memory_file() < 0:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = os.pread(_memory_file(), 128, 0).split()
    return int(counts[1]) * os.sysconf("SC_PAGE_SIZE")
