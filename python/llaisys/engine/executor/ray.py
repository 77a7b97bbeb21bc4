"""Ranks on a Ray cluster: the driver rank is this process, the others are actors in a placement
group. Ranks communicate over TCP, on GPUs with NCCL.

On GPUs, an actor of its own holds the GPU of the driver rank. Ranks are numbered by node, then by
GPU.

Every node needs the package, and the model under the same name. Ray pickles data between its
trusted nodes; the payloads are encoded bytes that are decoded as typed messages.
"""

import contextlib
import importlib
import logging
import os
import secrets
import time
from collections import deque
from dataclasses import replace
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import format_name, level_name
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.driver import DriverExecutor, close_if_same
from llaisys.engine.executor.local import WorkerLostError
from llaisys.engine.executor.messages import Answer, Call, decode_answer
from llaisys.engine.executor.ray_rank import Place, RayRank, init_method, listen, with_device_ids
from llaisys.processes.channel import encode

logger = logging.getLogger("llaisys.engine")

POLL_SECONDS = 0.05  # interval of checks of the deadline
MAX_PENDING = 64  # references to completed calls, of an actor
PLACEMENT_TIMEOUT = 60.0  # seconds to place all ranks


def import_ray() -> Any:
    """Import ray, an optional dependency."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InvalidInputError(
            "ray is not installed: pip install 'llaisys[ray]'", field="distributed_executor_backend"
        ) from error


class RayActor:
    """A rank in a Ray actor."""

    def __init__(self, ray: Any, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self._ray = ray
        self._pending: deque[tuple[int, Any]] = deque()  # (serial, reference), oldest first
        self._is_closed = False

    def send(self, call: Call) -> None:
        # Calls of a pipeline stage before the last one are not answered: `receive` is not called.
        while (
            len(self._pending) > MAX_PENDING and self._ray.wait([self._pending[0][1]], timeout=0)[0]
        ):
            self._pending.popleft()
        self._pending.append((call.serial, self.actor.call.remote(encode(call))))

    def receive(self, serial: int, deadline: float | None) -> Answer:
        while True:
            number, reference = self._pending.popleft()
            answer = self._answer(reference, deadline)
            if answer is not None and (number == serial or answer.is_fatal):
                return answer

    def _answer(self, reference: Any, deadline: float | None) -> Answer | None:
        while not self._ray.wait([reference], timeout=POLL_SECONDS)[0]:
            if deadline is not None and time.monotonic() > deadline:
                raise WorkerLostError(f"worker rank {self.rank} does not reply")
        try:
            frame: bytes = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(f"{self.exit_text()}: {error}") from error
        return decode_answer(frame) if frame else None

    def check_alive(self) -> None:
        try:
            ping = self.actor.ping.options(concurrency_group="health").remote()
            self._ray.get(ping, timeout=PLACEMENT_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(f"{self.exit_text()}: {error}") from error

    def exit_text(self) -> str:
        return f"worker rank {self.rank} (a Ray actor) is lost"

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(self.actor)


class RayExecutor(DriverExecutor, backend="ray"):
    """Connects to a running cluster (RAY_ADDRESS or local), or starts one on this machine and stops
    it at the end."""

    _children: list[RayActor]

    def _init_ranks(self) -> None:
        config = self.config
        self._ray = ray = import_ray()
        self._group: Any = None
        self._holder: Any = None  # actor with the GPU of the driver rank
        self._driver_socket: tuple[int, int] | None = None  # (descriptor, inode)
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, namespace="llaisys")
        try:
            self._start_ranks(_with_threads(config, ray))
            self._load_models()
        except BaseException:
            self.shutdown()
            raise

    def _start_ranks(self, config: EngineConfig) -> None:
        ray, size = self._ray, config.parallel.world_size
        here = f"node:{ray.util.get_node_ip_address()}"
        gpus = gpus_per_rank(config)
        needs = {"CPU": max(1, config.n_threads), **({"GPU": gpus} if gpus else {})}
        bundles: list[dict[str, float]] = [dict(needs) for _ in range(size)]
        bundles[0][here] = 0.001  # places the driver's bundle on this node
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT):
            raise InvalidInputError(
                f"the Ray cluster has no room for {size} ranks with {described(needs)} each: it "
                f"has {described(ray.cluster_resources(), *needs)}",
                field="tensor_parallel_size",
            )
        actors = [self._create(config, index, needs) for index in range(0 if gpus else 1, size)]
        if gpus:
            self._holder = actors.pop(0)
        first = self._driver_place()
        found = [(self._call_actor(actor, "place"), actor) for actor in actors]
        found.sort(key=lambda pair: (pair[0].node != first.node, pair[0].node, pair[0].gpu))
        places = [first, *(place for place, _ in found)]
        token = secrets.token_hex(16)
        for rank, (_, actor) in enumerate(found, 1):
            self._children.append(RayActor(ray, rank, actor))
            self._call_actor(actor, "join", rank, token, places)
        assert self._driver_socket is not None
        method = init_method(self._driver_socket[0], token, [place.address for place in places])
        self._make_driver(with_device_ids(config, places, 0), method)

    def _create(self, config: EngineConfig, bundle: int, needs: dict[str, float]) -> Any:
        """Create an actor in a bundle of the placement group."""
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        actor_class = ray.remote(concurrency_groups={"health": 1})(RayRank)
        return actor_class.options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
        ).remote(config.to_wire(), level_name(), format_name())

    def _driver_place(self) -> Place:
        """Open the socket of the driver rank; its GPU is that of the holder."""
        ray = self._ray
        descriptor, address = listen(ray.util.get_node_ip_address())
        self._driver_socket = descriptor, os.fstat(descriptor).st_ino
        if self._holder is None:
            return Place(address, ray.get_runtime_context().get_node_id())
        held: Place = self._call_actor(self._holder, "place", False)
        return replace(held, address=address)

    def _call_actor(self, actor: Any, method: str, *args: Any) -> Any:
        try:
            return self._ray.get(getattr(actor, method).remote(*args), timeout=PLACEMENT_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(f"a Ray actor of a rank is lost: {error}") from error

    def _release(self) -> None:
        if self._driver_socket is not None:
            close_if_same(*self._driver_socket)
        if self._holder is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._holder)
        if self._group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)
        if self._is_ours:
            self._ray.shutdown()


def gpus_per_rank(config: EngineConfig) -> float:
    """Return the GPUs that a rank reserves: a part of one if ranks share it, 0 on the CPU."""
    return 1 / config.parallel.ranks_per_device if config.device == "cuda" else 0.0


def described(resources: dict[str, float], *names: str) -> str:
    """For example "2 CPUs and 0.5 GPUs"."""
    return " and ".join(f"{resources.get(name, 0):g} {name}s" for name in names or resources)


def _with_threads(config: EngineConfig, ray: Any) -> EngineConfig:
    """Set the threads per rank: the option, or on the CPU an equal part of the cluster's CPUs."""
    if config.n_threads or config.device == "cuda":
        return config
    cpus = int(ray.cluster_resources().get("CPU", 1))
    return replace(config, n_threads=max(1, cpus // config.parallel.world_size))
