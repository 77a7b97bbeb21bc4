"""A replica of a set, the adapters that all replicas share, and their added statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.messages import (
    EngineStats,
    FromEngine,
    LoadLora,
    LoraChanged,
    UnloadLora,
)
from llaisys.server.errors import EngineDeadError

FIRST_PAUSE = 0.5  # seconds before a dead replica is restarted; doubles with each death


class Replica:
    """One index of the set; its engine process is replaced after each death."""

    def __init__(self, index: int, link: EngineLink) -> None:
        self.index = index
        self.link = link
        self.is_up = False
        self.up_since = 0.0
        self.restarts = 0
        self.pause = FIRST_PAUSE
        self.kv_address = ""  # see Ready

    @property
    def stats(self) -> EngineStats:
        return self.link.stats


@dataclass(slots=True)
class _LoraWait:
    """Replicas whose reply to a change of an adapter is missing."""

    message: LoadLora | UnloadLora
    replicas: set[int]
    failure: LoraChanged | None = None


class LoraChanges:
    """Changes of adapters, made on every replica. `on_message` gets one reply to each."""

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self._on_message = on_message
        self._changes: dict[str, LoadLora | UnloadLora] = {}  # the last one of each name
        self._waits: dict[int, _LoraWait] = {}  # by serial

    def change(self, message: LoadLora | UnloadLora, replicas: Sequence[Replica]) -> None:
        """Send a change of an adapter to every replica that is up; others get it when they are."""
        self._changes.pop(message.name, None)
        self._changes[message.name] = message
        up = [replica for replica in replicas if replica.is_up]
        if not up:
            raise EngineDeadError("no replica is up")
        self._waits[message.serial] = _LoraWait(message, {replica.index for replica in up})
        for replica in up:
            replica.link.send(message)

    def changed(self, replica: Replica, message: LoraChanged, replicas: Sequence[Replica]) -> None:
        """Forward the reply of the last replica, or of the first that failed. After a failure,
        unload the adapter from the replicas that could load it."""
        wait = self._waits.get(message.serial)
        if wait is None:
            return  # repeated for a replica that was down
        wait.replicas.discard(replica.index)
        if message.error is not None and wait.failure is None:
            wait.failure = message
        if wait.replicas:
            return
        del self._waits[message.serial]
        if wait.failure is not None:
            self._changes.pop(wait.message.name, None)
            if isinstance(wait.message, LoadLora) and not wait.message.in_place:
                for other in replicas:
                    if other.is_up:
                        other.link.send(UnloadLora(0, wait.message.name))
        self._on_message(wait.failure or message)

    def repeat(self, replica: Replica) -> None:
        """Make all changes on a replica that has started from the configuration."""
        for change in self._changes.values():
            if isinstance(change, LoadLora):
                change = msgspec.structs.replace(change, in_place=True)
            replica.link.send(change)

    def replica_died(self, replica: Replica, replicas: Sequence[Replica]) -> None:
        for serial in tuple(self._waits):
            if replica.index in self._waits[serial].replicas:
                self.changed(replica, LoraChanged(serial), replicas)


GAUGES = (
    *("num_running", "num_waiting", "kv_blocks", "kv_blocks_used", "kv_blocks_cached"),
    *("kv_cache_bytes", "kv_host_blocks", "kv_host_blocks_used", "kv_host_bytes"),
    *("loras", "loras_in_host", "lora_slots_used", "gpus"),
)


def without_gauges(stats: EngineStats) -> EngineStats:
    empty = EngineStats()
    return msgspec.structs.replace(stats, **{name: getattr(empty, name) for name in GAUGES})


def total(parts: Sequence[EngineStats]) -> EngineStats:
    summed = EngineStats()
    drafts = sum(part.spec_decode_num_drafts for part in parts)
    for name in EngineStats.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if name in ("stage_seconds", "sample_counts"):
            keys = {key for value in values for key in value}
            setattr(summed, name, {k: sum(value.get(k, 0) for value in values) for k in keys})
        elif name == "spec_decode_accepted_per_position":
            longest = max(map(len, values), default=0)
            padded = [[*value, *[0] * (longest - len(value))] for value in values]
            summed.spec_decode_accepted_per_position = [
                sum(column) for column in zip(*padded, strict=True)
            ]
        elif name == "gpus":
            summed.gpus = [gpu for value in values for gpu in value]
        elif name == "kv_cache_dtype":
            summed.kv_cache_dtype = next(filter(None, values), "")
        elif name != "spec_decode_mean_accepted_length":
            setattr(summed, name, sum(values))
    if drafts:
        accepted = summed.spec_decode_num_accepted_tokens
        summed.spec_decode_mean_accepted_length = 1 + accepted / drafts
    return summed
