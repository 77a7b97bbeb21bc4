"""NUMA nodes of the machine, and the cores of a rank or replica.

Only the affinity is set: threads inherit it, and Linux allocates memory on the node of the first
write.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    cpus: tuple[int, ...]  # allowed for this thread, ascending; not empty


def numa_nodes(root: Path = NODES) -> list[NumaNode]:
    """Return the nodes with cores for this thread; one node if the system reports none."""
    usable = os.sched_getaffinity(0)
    found = []
    for path in root.glob("node[0-9]*"):
        try:
            cpus = usable & parse_cpus((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found.append(NumaNode(int(path.name[4:]), tuple(sorted(cpus))))
    return sorted(found, key=lambda node: node.number) or [NumaNode(0, tuple(sorted(usable)))]


def cores_of_rank(nodes: Sequence[NumaNode], index: int, count: int) -> set[int]:
    """Return the cores of one of `count` ranks: whole nodes, or a slice of one node. Ranks share
    cores when a node has more ranks than cores."""
    first, last = index * len(nodes) // count, (index + 1) * len(nodes) // count
    if count <= len(nodes):
        return {cpu for node in nodes[first:last] for cpu in node.cpus}
    on_node = [i for i in range(count) if i * len(nodes) // count == first]
    cpus, offset = nodes[first].cpus, on_node.index(index)
    if len(cpus) < len(on_node):
        return {cpus[offset % len(cpus)]}
    begin, end = (n * len(cpus) // len(on_node) for n in (offset, offset + 1))
    return set(cpus[begin:end])


def bind_to_cores(index: int, count: int) -> set[int]:
    """Bind this thread and its future threads to the cores of a rank."""
    cpus = cores_of_rank(numa_nodes(), index, count)
    os.sched_setaffinity(0, cpus)
    return cpus


def parse_cpus(text: str) -> set[int]:
    """ "0-2,8" -> {0, 1, 2, 8}."""
    cpus: set[int] = set()
    for run in text.strip().split(",") if text.strip() else ():
        first, _, last = run.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: Collection[int]) -> str:
    """{0, 1, 2, 8} -> "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
