"""A set of engines with the interface of one EngineLink.

    Replica: STARTING -> UP -> DOWN (its process ended) -> STARTING, after a pause

A request runs on one replica. If that dies before the request's first token, another replica gets
the request; later, the request ends with an error. A dead replica is restarted after a pause, which
doubles with each death. If a replica dies before any was up, the whole set is dead: the model is
the likely cause.

With `prefill_replicas`, a long prompt first runs on a prefill replica; its request is held here and
sent to its decode replica when the prefill ends, also when it fails. See `disaggregation`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from llaisys.common.logs import log_event
from llaisys.common.request import RequestStatus
from llaisys.common.types import ModelInfo, TokenUpdate
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.messages import (
    EngineStats,
    Finish,
    FromEngine,
    Heartbeat,
    LoadLora,
    LoraChanged,
    Outputs,
    Ready,
    Rejected,
    Submit,
    ToEngine,
    UnloadLora,
)
from llaisys.server.engine_client.replicas.disaggregation import (
    SUFFIX,
    Disaggregation,
    decode_of,
    prefill_of,
)
from llaisys.server.engine_client.replicas.replica import (
    FIRST_PAUSE,
    LoraChanges,
    Replica,
    total,
    without_gauges,
)
from llaisys.server.engine_client.replicas.router import PrefixRouter, Route
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.errors import EngineDeadError
from llaisys.server.thread_pool import TaskSet

logger = logging.getLogger("llaisys.server")

MAX_PAUSE = 60.0  # seconds before a dead replica is restarted
ROUTED_BLOCKS = 4  # KV blocks per block of the router
STEADY_SECONDS = 60.0  # uptime that resets a replica's restart pause


@dataclass(slots=True)
class _RoutedRequest:
    """A request on a replica. `submit` is None once it cannot be moved to another replica."""

    route: Route
    open: set[str]  # request ids of unfinished choices
    submit: Submit | None
    prefill: Route | None = None  # of its prompt, until that is computed


class ReplicaSet:
    """As EngineLink: `on_message` gets the messages of all engines, `on_death` is called once when
    the whole set is dead."""

    def __init__(
        self,
        config: ServerConfig,
        process: EngineProcess,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[str], None],
    ) -> None:
        self.dead: str | None = None
        self._config = config
        self._on_message = on_message
        self._on_death = on_death
        self._info: ModelInfo | None = None  # of the first replica that was up
        self._router: PrefixRouter  # made when the first replica is up
        self._routed: dict[str, _RoutedRequest] = {}  # by group
        self._group_of: dict[str, str] = {}  # request id of a choice -> group
        self._tasks = TaskSet()
        self._loras = LoraChanges(on_message)
        self._roles = Disaggregation(config.prefill_replicas, config.prefill_threshold)
        self._closing = False
        self._past_stats = EngineStats()  # counters of ended engines
        first = self._link(0, process)
        others = [
            self._link(index, EngineProcess(config, replica=index))
            for index in range(1, config.data_parallel_size)
        ]
        self.replicas = [Replica(index, link) for index, link in enumerate([first, *others])]

    def _link(self, index: int, process: EngineProcess) -> EngineLink:
        return EngineLink(
            self._config,
            process,
            lambda message: self._on_engine_message(self.replicas[index], message),
            lambda reason: self._on_replica_death(self.replicas[index], reason),
        )

    def start(self) -> None:
        for replica in self.replicas:
            replica.link.start()

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.link.close() for replica in self.replicas))

    # ---- state ---------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """Why no replica can serve requests; None if one can."""
        if self.dead is not None:
            return self.dead
        problems = [replica.link.problem for replica in self.replicas]
        if self._info is not None and not any(replica.is_up for replica in self.replicas):
            return problems[0] or "all replicas are restarting"
        return None if None in problems else problems[0]

    @property
    def degraded(self) -> list[int]:
        """Indices of the replicas that are down, once one has been up."""
        return [
            replica.index
            for replica in self.replicas
            if self._info is not None and (not replica.is_up or replica.link.problem is not None)
        ]

    @property
    def heartbeat(self) -> Heartbeat | None:
        beats = [replica.link.heartbeat for replica in self.replicas]
        known = [beat for beat in beats if beat is not None]
        if not known:
            return None
        return msgspec.structs.replace(
            known[0],
            cpu_seconds=sum(beat.cpu_seconds for beat in known),
            rss_bytes=sum(beat.rss_bytes for beat in known),
        )

    @property
    def stats(self) -> EngineStats:
        return total([self._past_stats, *(replica.link.stats for replica in self.replicas)])

    # ---- to the engines ------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if isinstance(message, Submit):
            self._route(message)
        elif isinstance(message, Finish):
            self._finish(message)
        elif isinstance(message, LoadLora | UnloadLora):
            self._loras.change(message, self.replicas)
        else:  # not about a request
            for replica in self.replicas:
                replica.link.send(message)

    def _alive(self) -> set[int]:
        alive = {r.index for r in self.replicas if r.is_up and r.link.problem is None}
        if self._info is None or not alive:
            raise EngineDeadError("no replica is up")
        return alive

    def _route(self, submit: Submit) -> None:
        """Send a request to a replica, or its prompt to a prefill replica first."""
        alive = self._alive()
        route = self._assign(submit, self._roles.decoders(alive))
        prefill = None
        prefillers = self._roles.prefillers(alive, route.replica)
        if prefillers and self._roles.wants_prefill(submit, route.cached):
            prefill = self._send_prefill(submit, prefillers)
        if prefill is None:
            self._send(submit, route)
        else:
            route = self._router.prefilled(route)  # another replica computes the prompt
        request = _RoutedRequest(route, set(submit.request_ids), submit, prefill)
        self._routed[submit.group] = request
        self._group_of.update(dict.fromkeys(submit.request_ids, submit.group))

    def _send_prefill(self, submit: Submit, replicas: Collection[int]) -> Route | None:
        prefill = prefill_of(submit)
        try:
            return self._send(prefill, self._assign(prefill, replicas))
        except EngineDeadError:
            return None

    def _assign(self, submit: Submit, replicas: Collection[int]) -> Route:
        return self._router.assign(
            submit.prompt_token_ids,
            f"{submit.lora}\0{submit.cache_salt}" if submit.lora else submit.cache_salt,
            submit.sampling.get("max_tokens"),
            len(submit.request_ids),
            replicas,
        )

    def _send(self, submit: Submit, route: Route) -> Route:
        try:
            self.replicas[route.replica].link.send(submit)
        except BaseException:
            self._router.done(route)
            raise
        return route

    def _end_prefill(self, group: str, has_blocks: bool) -> None:
        """Send a request whose prefill has ended to its decode replica. `has_blocks`: the prefill
        replica has published its KV blocks."""
        request = self._routed[group]
        assert request.prefill is not None
        assert request.submit is not None
        self._router.done(request.prefill)
        source = self.replicas[request.prefill.replica].kv_address if has_blocks else ""
        request.prefill = None
        submit = request.submit = decode_of(request.submit, source)
        try:
            if not self.replicas[request.route.replica].is_up:
                self._router.done(request.route)
                request.route = self._assign(submit, self._roles.decoders(self._alive()))
            self.replicas[request.route.replica].link.send(submit)
        except EngineDeadError as error:
            self._fail(sorted(request.open), str(error))

    def _fail(self, names: list[str], error: str) -> None:
        self._end(names)
        fault = RequestStatus.FINISHED_ERROR
        failed = [TokenUpdate(name, [], fault, error=error) for name in names]
        self._on_message(Outputs(failed, self.stats))

    def _finish(self, message: Finish) -> None:
        names: dict[int, list[str]] = {}
        for name in message.request_ids:
            group = self._group_of.get(name)
            if group is not None:
                if self._routed[group].prefill is not None:
                    self._stop_prefill(group)
                names.setdefault(self._routed[group].route.replica, []).append(name)
        for index, own in names.items():
            if self.replicas[index].is_up:
                self.replicas[index].link.send(Finish(own, message.stopped))
            if message.stopped:  # has no reply
                self._end(own)

    def _stop_prefill(self, group: str) -> None:
        """Send a request to its decode replica, which ends it."""
        prefill = self._routed[group].prefill
        assert prefill is not None
        if self.replicas[prefill.replica].is_up:
            self.replicas[prefill.replica].link.send(Finish([group + SUFFIX]))
        self._end_prefill(group, has_blocks=False)

    def _end(self, names: Iterable[str]) -> None:
        """Remove ended choices; the last one of a prompt also ends its route."""
        for name in names:
            group = self._group_of.pop(name, None)
            if group is None:
                continue
            request = self._routed[group]
            request.open.discard(name)
            if not request.open:
                del self._routed[group]
                self._router.done(request.route)

    # ---- from the engines ----------------------------------------------------------------------

    def _on_engine_message(self, replica: Replica, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._ready(replica, message)
            return
        if isinstance(message, LoraChanged):
            self._loras.changed(replica, message, self.replicas)
            return
        if self._roles.num_prefill:
            rest = self._without_prefills(message)
            if rest is None:
                return
            message = rest
        if isinstance(message, Outputs):
            for update in message.updates:
                group = self._group_of.get(update.request_id)
                if group is not None and update.token_ids:
                    self._first_token(self._routed[group])
        self._on_message(message)
        if isinstance(message, Outputs):
            ended = [u.request_id for u in message.updates if u.status.finished]
            self._end(ended)
        elif isinstance(message, Rejected):
            self._end(message.request_ids)

    def _without_prefills(self, message: FromEngine) -> FromEngine | None:
        """Handle the part of a message that is about prefills; return the rest."""
        if isinstance(message, Rejected) and message.group.endswith(SUFFIX):
            group = message.group.removesuffix(SUFFIX)
            request = self._prefilling(group)
            if request is None:
                return None
            if message.timed_out:
                assert request.prefill is not None
                self._router.done(request.prefill)
                return msgspec.structs.replace(
                    message, group=group, request_ids=sorted(request.open)
                )
            self._end_prefill(group, has_blocks=False)  # the decode replica says why
            return None
        if not isinstance(message, Outputs):
            return message
        rest = []
        for update in message.updates:
            if not update.request_id.endswith(SUFFIX):
                rest.append(update)
                continue
            group = update.request_id.removesuffix(SUFFIX)
            if update.status.finished and self._prefilling(group) is not None:
                self._end_prefill(group, update.status is RequestStatus.FINISHED_LENGTH_CAPPED)
        return msgspec.structs.replace(message, updates=rest)

    def _prefilling(self, group: str) -> _RoutedRequest | None:
        """Return a request whose prompt is being computed."""
        request = self._routed.get(group)
        return None if request is None or request.prefill is None else request

    def _first_token(self, request: _RoutedRequest) -> None:
        """From then on a request cannot be moved, and its prompt is no work."""
        if request.submit is not None:
            request.submit = None
            request.route = self._router.prefilled(request.route)

    def _ready(self, replica: Replica, message: Ready) -> None:
        if self._info is None:
            info = self._info = message.info
            count = len(self.replicas)
            size, blocks = info.block_size * ROUTED_BLOCKS, info.num_blocks // ROUTED_BLOCKS
            self._router = PrefixRouter(size, max(1, blocks), count)
            self._on_message(message)
        elif message.info.vocab_size != self._info.vocab_size:
            replica.link.declare_dead("its model differs from that of the other replicas")
            return
        self._loras.repeat(replica)
        replica.kv_address = message.kv_address
        replica.is_up = True
        replica.up_since = asyncio.get_running_loop().time()
        pid = replica.link.process.popen.pid
        log_event(logger, logging.INFO, "replica up", replica=replica.index, pid=pid)

    def _on_replica_death(self, replica: Replica, reason: str) -> None:
        was_up, replica.is_up = replica.is_up, False
        log_event(logger, logging.ERROR, "replica down", replica=replica.index, reason=reason)
        if self._info is None:
            self.declare_dead(reason)
            return
        stats = replica.link.stats
        replica.link.stats = EngineStats()
        self._past_stats = total([self._past_stats, without_gauges(stats)])
        self._loras.replica_died(replica, self.replicas)
        if was_up:
            self._router.clear(replica.index)
            self._move_requests(replica, reason)
        self._tasks.spawn(self._restart(replica))

    def _move_requests(self, replica: Replica, reason: str) -> None:
        """Move requests without tokens to other replicas; end the others with an error."""
        for group, request in list(self._routed.items()):
            if request.prefill is not None and request.prefill.replica == replica.index:
                self._end_prefill(group, has_blocks=False)
        # A request whose prompt is being computed gets another decode replica after that.
        lost = [
            group
            for group, request in self._routed.items()
            if request.route.replica == replica.index and request.prefill is None
        ]
        error = f"replica {replica.index} has died: {reason}"
        for group in lost:
            request = self._routed[group]
            names, submit = sorted(request.open), request.submit
            self._end(names)
            try:
                if submit is None or len(names) != len(submit.request_ids):
                    raise EngineDeadError(error)
                self._route(msgspec.structs.replace(submit, kv_source=""))
            except EngineDeadError:
                self._fail(names, error)

    async def _restart(self, replica: Replica) -> None:
        now = asyncio.get_running_loop().time()
        if now - replica.up_since > STEADY_SECONDS and replica.up_since:
            replica.pause = FIRST_PAUSE
        await asyncio.sleep(replica.pause)
        replica.pause = min(2 * replica.pause, MAX_PAUSE)
        await replica.link.close()
        replica.restarts += 1
        log_event(logger, logging.INFO, "replica restarts", replica=replica.index)
        process = EngineProcess(self._config, replica=replica.index)
        replica.link = self._link(replica.index, process)
        replica.link.start()

    def declare_dead(self, reason: str) -> None:
        if self.dead is not None or self._closing:
            return
        self.dead = reason
        for replica in self.replicas:
            replica.link.declare_dead(reason, logged=True)
        self._on_death(reason)
