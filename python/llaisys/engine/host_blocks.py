"""KV offload: host slots for blocks that are evicted from the KV cache.

A slot is free, has the copy of one node's block, or is reserved for a block of another engine
(`engine/kv_transfer`). Slots are reused in LRU order, except those that another engine reads. A
node keeps its slot while it has a block again: when it is evicted again, no copy is needed. Copies
are planned in order; see `SchedulerOutputs.block_copies`.

Bookkeeping only: the block manager decides what is evicted.
"""

from collections import Counter, OrderedDict
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
        self._reserved: set[int] = set()  # are filled by another engine
        self._readers: Counter[int] = Counter()  # slot -> transfers that read it
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
        slot, evicted = self._take()
        if slot < 0:
            return None
        node.host_slot = slot
        self._used[slot] = node
        self._copies.append(BlockCopy(node.block, slot, True))
        self.num_saved += 1
        return evicted

    def _take(self) -> tuple[int, Node | None]:
        """Return a free slot, or the least recently used one and its node; -1: none."""
        if self._free:
            return self._free.pop(), None
        for slot, node in self._used.items():
            if slot not in self._readers:
                del self._used[slot]
                node.host_slot = -1
                return slot, node
        return -1, None

    def pin(self, nodes: Iterable[Node]) -> None:
        """Protect the slots of these nodes until `restore`."""
        for node in nodes:
            self._pinned[node.host_slot] = self._used.pop(node.host_slot)

    def restore(self, nodes: Sequence[Node], blocks: Iterable[int]) -> None:
        """Plan the copies of pinned nodes into these blocks. They become the most recently used,
        the start of the prefix after its end."""
        pairs = zip(nodes, blocks, strict=False)
        self._copies += [BlockCopy(block, node.host_slot, False) for node, block in pairs]
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

    def lock(self, slot: int) -> None:
        """Keep a node's slot until `unlock`: another engine reads it."""
        self._readers[slot] += 1

    def unlock(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]

    def reserve(self, count: int) -> tuple[list[int], list[Node]]:
        """Reserve up to `count` slots; return them and the nodes whose slots were reused. No copy
        may be planned."""
        slots: list[int] = []
        evicted: list[Node] = []
        while len(slots) < count:
            slot, node = self._take()
            if slot < 0:
                break
            slots.append(slot)
            if node is not None:
                evicted.append(node)
        self._reserved.update(slots)
        return slots, evicted

    def fill(self, slot: int, node: Node) -> None:
        """Assign a reserved slot, now written, to a node without one."""
        self._reserved.remove(slot)
        node.host_slot = slot
        self._used[slot] = node

    def touch(self, nodes: Sequence[Node]) -> None:
        """Make the slots of a prefix the most recently used, its start after its end."""
        for node in reversed(nodes):
            self._used.move_to_end(node.host_slot)

    def cancel(self, slots: Iterable[int]) -> None:
        """Free reserved slots."""
        for slot in slots:
            self._reserved.remove(slot)
            self._free.append(slot)

    @property
    def num_in_transfer(self) -> int:
        """Slots that are read or filled by other engines."""
        return len(self._reserved) + len(self._readers)

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
            free + used + len(self._reserved) != self.num_slots
            or self._pinned
            or slots != dict(self._used)
            or not self._readers.keys() <= slots.keys()
            or (slots.keys() | self._reserved) & set(self._free)
        ):
            raise RuntimeError(
                f"host block accounting is broken: free {free} + used {used} + reserved "
                f"{len(self._reserved)} != total {self.num_slots}, or a node differs "
                f"({len(slots)} nodes have a slot, {len(self._pinned)} are pinned)"
            )
