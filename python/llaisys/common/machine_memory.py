"""The memory that this process may still allocate."""

from __future__ import annotations

import os

from llaisys.common.cgroup import memory_left


def available_memory() -> int:
    """Bytes that can be allocated without swapping: of the machine, or less in a control group with
    a memory limit."""
    free, left = _free_memory(), memory_left()
    return free if left is None else min(free, left)


def describe_memory() -> str:
    """The available memory for `llaisys env`, with the limit that lowers it."""
    free, left = _free_memory(), memory_left()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{min(free, free if left is None else left) / 2**30:.1f} GiB available"
    text += f" of {total / 2**30:.1f} GiB"
    if left is not None and left < free:
        text += " (memory limit of the control group)"
    return text


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
