"""KV offload: host slots for blocks that are evicted from the KV cache.

A slot is free or has the copy of one node's block; slots are reused in LRU order. A node keeps its
slot while it has a block again: when it is evicted again, no copy is needed. Copies are planned in
order; see `SchedulerOutputs.block_copies`.

Bookkeeping only: the block manager decides what is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llaisys.common.types import BlockCopy
from llaisys.engine.prefix_nodes import Node


class HostBlocks:
    """Owner of `Node.host_slot`. Without slots nothing is saved."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_saved = 0  # planned copies to host memory, in all
        self.num_restored = 0  # planned copies from host memory, in all
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end
        self._used: OrderedDict[int, Node] = OrderedDict()  # slot -> node, in LRU order
        self._pinned: dict[int, Node] = {}  # slot -> node that must not be evicted
        self._copies: list[BlockCopy] = []

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_planned(self) -> int:
        """Copies of the next step so far."""
        return len(self._copies)

    def save(self, node: Node) -> Node | None:
        """Plan the copy of a node whose ready block is evicted, unless it has one.
        Returns the node whose slot was reused, if any. `node.host_slot` is -1 when no slot was
        available."""
        if node.host_slot >= 0:
            if node.host_slot in self._used:
                self._used.move_to_end(node.host_slot)
            return None
        evicted = None
        if self._free:
            slot = self._free.pop()
        elif self._used:
            slot, evicted = self._used.popitem(last=False)
            evicted.host_slot = -1
        else:
            return None
        node.host_slot = slot
        self._used[slot] = node
        self._copies.append(BlockCopy(node.block, slot, True))
        self.num_saved += 1
        return evicted

    def pin(self, nodes: Iterable[Node]) -> None:
        """Protect the slots of these nodes until `restore`."""
        for node in nodes:
            self._pinned[node.host_slot] = self._used.pop(node.host_slot)

    def restore(self, nodes: Sequence[Node]) -> None:
        """Plan the copies of pinned nodes into their new blocks. They become the most recently
        used, the start of the prefix after its end."""
        self._copies += [BlockCopy(node.block, node.host_slot, False) for node in nodes]
        self.num_restored += len(nodes)
        for node in reversed(nodes):
            self._used[node.host_slot] = self._pinned.pop(node.host_slot)

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that precede the next step, in order. No copy may be planned until they
        are done or undone."""
        copies, self._copies = self._copies, []
        return copies

    def undo(self, copies: Iterable[BlockCopy]) -> list[Node]:
        """Free the slots that these copies were to fill; return their nodes."""
        slots = {copy.host_slot for copy in copies if copy.to_host}
        return [self._free_slot(slot) for slot in slots if slot in self._used]

    def clear(self) -> list[Node]:
        """Free every slot; return their nodes. Planned copies are still executed."""
        return [self._free_slot(slot) for slot in list(self._used)]

    def _free_slot(self, slot: int) -> Node:
        node = self._used.pop(slot)
        node.host_slot = -1
        self._free.append(slot)
        return node

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Recount the slots; `nodes`: all nodes of the table. RuntimeError with the numbers when
        they do not match."""
        slots = {node.host_slot: node for node in nodes if node.host_slot >= 0}
        free, used = len(self._free), len(self._used)
        if (
            free + used != self.num_slots
            or self._pinned
            or slots != dict(self._used)
            or slots.keys() & set(self._free)
        ):
            raise RuntimeError(
                f"host block accounting is broken: free {free} + used {used} != total "
                f"{self.num_slots}, or a node differs ({len(slots)} nodes have a slot, "
                f"{len(self._pinned)} are pinned)"
            )
