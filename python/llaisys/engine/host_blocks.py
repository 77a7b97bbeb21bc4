"""The second level of the prefix cache: places in host memory for blocks that the KV cache evicts.

A place is free, or holds the copy of one node's block; the node that was used least recently gives
its place to the next one. A node keeps its place while it has a block again: evicted anew, it needs
no copy. Copies are planned in order; see `SchedulerOutputs.block_copies`.

Pure bookkeeping: which node is worth keeping is for the block manager to say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llaisys.common.types import BlockCopy
from llaisys.engine.prefix_nodes import Node


class HostBlocks:
    """Owner of `Node.place`. With no places nothing is ever kept."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_saved = 0  # copies to host memory that were planned, in all
        self.num_brought_back = 0
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end
        self._kept: OrderedDict[int, Node] = OrderedDict()  # place -> node, least recent first
        self._held: dict[int, Node] = {}  # the same, of those that must not be displaced now
        self._copies: list[BlockCopy] = []

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_planned(self) -> int:
        """Copies that no step has taken yet."""
        return len(self._copies)

    def save(self, node: Node) -> Node | None:
        """A node is about to lose its block, which is ready: plan its copy, unless it has one.
        Returns the node whose slot was reused, if any. `node.host_slot` is -1 when no slot was
        available."""
        if node.host_slot >= 0:
            if node.host_slot in self._kept:
                self._kept.move_to_end(node.host_slot)
            return None
        displaced = None
        if self._free:
            place = self._free.pop()
        elif self._kept:
            place, displaced = self._kept.popitem(last=False)
            displaced.host_slot = -1
        else:
            return None
        node.host_slot = place
        self._kept[place] = node
        self._copies.append(BlockCopy(node.block, place, True))
        self.num_saved += 1
        return displaced

    def hold(self, nodes: Iterable[Node]) -> None:
        """These keep their places until `bring_back`."""
        for node in nodes:
            self._held[node.host_slot] = self._kept.pop(node.host_slot)

    def bring_back(self, nodes: Sequence[Node]) -> None:
        """Plan the copies of nodes that were held into their new blocks. They are the most recent
        ones now, the beginning of the prefix before its end."""
        self._copies += [BlockCopy(node.block, node.host_slot, False) for node in nodes]
        self.num_brought_back += len(nodes)
        for node in reversed(nodes):
            self._kept[node.host_slot] = self._held.pop(node.host_slot)

    def take_copies(self) -> list[BlockCopy]:
        """What the next step must copy before it begins, in this order; each is named once. Nothing
        may be planned until they are done, or undone."""
        copies, self._copies = self._copies, []
        return copies

    def undo(self, copies: Iterable[BlockCopy]) -> list[Node]:
        """Free the places that these copies were to fill; the nodes that had them."""
        places = {copy.host_slot for copy in copies if copy.to_host}
        return [self._vacate(place) for place in places if place in self._kept]

    def clear(self) -> list[Node]:
        """Free every place; the nodes that had them. Copies that are planned go on."""
        return [self._vacate(place) for place in list(self._kept)]

    def _vacate(self, place: int) -> Node:
        node = self._kept.pop(place)
        node.host_slot = -1
        self._free.append(place)
        return node

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """`nodes`: all that are in the table. Raises RuntimeError with the numbers when they do not
        add up."""
        places = {node.host_slot: node for node in nodes if node.host_slot >= 0}
        free, kept = len(self._free), len(self._kept)
        if (
            free + kept != self.num_slots
            or self._held
            or places != dict(self._kept)
            or places.keys() & set(self._free)
        ):
            raise RuntimeError(
                f"host block accounting is broken: free {free} + kept {kept} != total "
                f"{self.num_slots}, or a node differs ({len(places)} have a place, "
                f"{len(self._held)} are held)"
            )
