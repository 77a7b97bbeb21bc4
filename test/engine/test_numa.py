"""The cores of a rank on simulated machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llaisys.common.numa import NumaNode, cores_of_rank, format_cpus, numa_nodes, parse_cpus


@pytest.mark.parametrize(
    ("sizes", "count", "shares"),
    [
        ([4], 1, ["0-3"]),
        ([4], 2, ["0-1", "2-3"]),
        ([5], 3, ["0", "1-2", "3-4"]),
        ([1], 3, ["0", "0", "0"]),
        ([2, 2], 2, ["0-1", "2-3"]),
        ([2, 2], 1, ["0-3"]),
        ([2, 2, 2], 2, ["0-1", "2-5"]),
        ([4, 4], 4, ["0-1", "2-3", "4-5", "6-7"]),
        ([2, 2], 3, ["0", "1", "2-3"]),
    ],
)
def test_a_rank_gets_whole_nodes_or_a_part_of_one(
    sizes: list[int], count: int, shares: list[str]
) -> None:
    nodes, first = [], 0
    for number, size in enumerate(sizes):
        nodes.append(NumaNode(number, tuple(range(first, first + size))))
        first += size
    found = [cores_of_rank(nodes, index, count) for index in range(count)]
    assert [format_cpus(cpus) for cpus in found] == shares


def test_numa_nodes_respect_the_affinity_of_the_thread(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for number, text in ((0, format_cpus(usable)), (1, "100000-100003"), (2, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text + "\n")
    assert numa_nodes(tmp_path) == [NumaNode(0, tuple(usable))]
    assert numa_nodes(tmp_path / "none") == [NumaNode(0, tuple(usable))]
    assert sorted(cpu for node in numa_nodes() for cpu in node.cpus) == usable


def test_lists_of_cores_are_written_as_the_system_writes_them() -> None:
    assert parse_cpus("0-2,8\n") == {0, 1, 2, 8} and parse_cpus("\n") == set()
    assert format_cpus({8, 0, 2, 1}) == "0-2,8" and format_cpus(set()) == ""
