"""Device slots of LoRA adapters: at most `num_slots` different adapters run in a step.

A slot keeps its adapter while running requests use it, and until another adapter needs the slot
(LRU order). A waiting request whose adapter gets no slot is passed by later ones with other
adapters MAX_PASSES times; then no request with an adapter starts before it.

Bookkeeping only: the plan carries the loads to the workers.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from llaisys.common.lora import LoraLoad
from llaisys.common.request import Request

MAX_PASSES = 64  # later requests that may start before a request that waits for a slot


class LoraSlots:
    """Owner of `Request.lora_slot`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_loads = 0  # planned fills of slots, in all
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by adapter, in LRU order
        self._running: Counter[int] = Counter()  # running requests by adapter
        self._loads: dict[int, int] = {}  # slot -> adapter, to be filled by the next plan
        self._passes: dict[int, int] = {}  # by sequence id of waiting requests

    @property
    def num_used(self) -> int:
        """Slots with an adapter."""
        return len(self._slot_of)

    # ---- waiting requests ----------------------------------------------------------------------

    def can_start(self, request: Request, blocked: Iterable[Request]) -> bool:
        """Whether the adapter of a request has or gets a slot. `blocked`: requests ahead of it that
        wait for one."""
        lora_id = request.lora_id
        if not lora_id:
            return True
        if any(self._passes.get(other.seq_id, 0) >= MAX_PASSES for other in blocked):
            return False
        return lora_id in self._slot_of or bool(self._free) or self._idle() is not None

    def count_pass(self, request: Request, blocked: Iterable[Request]) -> None:
        """A request with an adapter starts before the `blocked` ones."""
        if request.lora_id:
            for other in blocked:
                self._passes[other.seq_id] = self._passes.get(other.seq_id, 0) + 1

    # ---- changes of state; called by RequestQueues ---------------------------------------------

    def acquire(self, request: Request) -> None:
        """A request starts; `can_start` must have returned True since the last change."""
        self._passes.pop(request.seq_id, None)
        lora_id = request.lora_id
        if not lora_id:
            return
        if lora_id not in self._slot_of:
            if not self._free:
                idle = self._idle()
                if idle is None:
                    raise RuntimeError(f"all {self.num_slots} LoRA slots are in use")
                self._free.append(self._slot_of.pop(idle))
            slot = self._free.pop()
            self._slot_of[lora_id] = slot
            self._loads[slot] = lora_id
            self.num_loads += 1
        self._slot_of.move_to_end(lora_id)
        self._running[lora_id] += 1
        request.lora_slot = self._slot_of[lora_id]

    def release(self, request: Request) -> None:
        """A running request was preempted or has ended."""
        if request.lora_id:
            self._running[request.lora_id] -= 1
            request.lora_slot = -1

    def forget_waiting(self, request: Request) -> None:
        self._passes.pop(request.seq_id, None)

    def drop(self, lora_id: int) -> None:
        """Empty the slot of an unloaded adapter; nothing runs with it."""
        if self._running.pop(lora_id, 0):
            raise RuntimeError(f"adapter {lora_id} is dropped while requests run with it")
        slot = self._slot_of.pop(lora_id, None)
        if slot is not None:
            self._loads.pop(slot, None)
            self._free.append(slot)

    # ---- plans ---------------------------------------------------------------------------------

    def take_loads(self) -> list[LoraLoad]:
        """Return the loads of the next plan. An adapter that nothing runs with any more may leave
        the host memory: its slot is freed instead."""
        loads, self._loads = self._loads, {}
        return [LoraLoad(s, i) for s, i in loads.items() if self._keeps(s, i)]

    def undo(self, loads: Iterable[LoraLoad]) -> None:
        """Plan the loads of a failed step again, after its requests have ended."""
        for slot, lora_id in loads:
            if self._slot_of.get(lora_id) == slot and self._keeps(slot, lora_id):
                self._loads.setdefault(slot, lora_id)

    def _keeps(self, slot: int, lora_id: int) -> bool:
        """Whether requests run with the adapter of a slot; frees the slot otherwise."""
        if self._running[lora_id]:
            return True
        del self._slot_of[lora_id]
        self._free.append(slot)
        return False

    def _idle(self) -> int | None:
        """The least recently used adapter that nothing runs with."""
        return next((lora_id for lora_id in self._slot_of if not self._running[lora_id]), None)
