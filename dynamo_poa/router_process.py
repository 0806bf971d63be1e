"""Decides the order in which one router process joins Dynamo, registers, drains and leaves.

Owns: building the pieces of the process, registering once enough workers are there, draining on SIGTERM.
Does not own: the request path (router.py) or where parameters come from (params.py).
Source: Dynamo's convention for routers outside the frontend (host: dynamo/global_router). One runtime per
        leg: measured, on a shared one both legs have the same address and one handler serves both.
"""

import asyncio
import functools
import os
import random
import signal
from contextlib import AsyncExitStack
from typing import Any

import structlog

from dynamo_poa import dynamo_host
from dynamo_poa.avoid import AvoidList
from dynamo_poa.booking import PinnedBookings
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.coefficients import CoefficientsHolder, CoefficientsSubscriber
from dynamo_poa.config import CommonConfig, RouterConfig
from dynamo_poa.data_path import RelayPath, Served
from dynamo_poa.dynamo_host import WorkerDirectory
from dynamo_poa.errors import BusError, RecordUnchangeable
from dynamo_poa.handover import HandoverChannel, Handovers
from dynamo_poa.ledger import Ledger
from dynamo_poa.neighbours import Neighbours
from dynamo_poa.params import ParamsHolder, ParamsSubscriber
from dynamo_poa.picker import Picker
from dynamo_poa.reporter import DecisionReporter, RouterStatus
from dynamo_poa.router import Leg
from dynamo_poa.router_metrics import RouterMetrics
from dynamo_poa.telemetry import MetricsServer, configure_logging
from dynamo_poa.trip import RouterStats
from dynamo_poa.values import ParamsKind, Role, RouterParams

log = structlog.get_logger(__name__)
BUS_WAIT_S = 5.0  # Dynamo itself needs NATS to start; a bus away for longer has its own trouble
WAITING_SAID_S = 10.0
# From leaving discovery until no frontend sends here any more. Measured: discovery's file watch takes 50 ms;
# a request that comes after the handler has gone is a 500.
LEAVE_S = 0.5


class RouterProcess:
    """The pieces of one router process and the order they come and go in."""

    def __init__(self, common: CommonConfig, config: RouterConfig, replica: int) -> None:
        self._common, self._config, self._replica = common, config, replica
        self._roles = [Role(leg) for leg in config.legs]
        self._router_id = f"router-{replica}-{os.getpid()}"
        self._clock: Clock = SystemClock()
        self._rng = random.Random()
        self._coefficients = CoefficientsHolder(self._clock.monotonic_s)
        self._stop = asyncio.Event()
        self._endpoints: list[Any] = []  # ours, as the frontend sees them
        self._served: list[Served] = []

    async def serve(self) -> None:
        """Serve the configured legs until SIGTERM or SIGINT, then let running requests finish."""
        common, config, clock = self._common, self._config, self._clock
        configure_logging(common.log_level)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        stats, holder = RouterStats(), ParamsHolder(_static(config), clock_s=clock.monotonic_s)
        async with AsyncExitStack() as stack:
            nats_url = os.environ.get("NATS_SERVER", common.nats_url)
            bus = await stack.enter_async_context(Bus(nats_url, name=self._router_id, clock=clock))
            reporter = DecisionReporter(
                bus,
                common.namespace,
                self._router_id,
                functools.partial(_status, stats, holder),
                clock=clock,
                batch_s=config.batch_s,
                batch_size=config.batch_size,
                queue_size=config.queue_size,
            )
            metrics = RouterMetrics(stats, holder, reporter, bus, self._coefficients)
            port = config.metrics_port and config.metrics_port + self._replica
            await stack.enter_async_context(
                MetricsServer(
                    metrics.registry, port, lambda: metrics.registered, key="PoaRouter.metrics_port"
                )
            )
            subscriber = ParamsSubscriber(bus, common.namespace, holder, clock)
            await stack.enter_async_context(subscriber)
            speeds = CoefficientsSubscriber(bus, common.namespace, self._coefficients, clock)
            await stack.enter_async_context(speeds)
            await stack.enter_async_context(reporter)
            runtimes: dict[Role, Any] = {}
            for role in self._roles:
                runtimes[role] = dynamo_host.open_runtime()
                stack.callback(runtimes[role].shutdown)  # out of discovery however this ends
            directory = await stack.enter_async_context(
                dynamo_host.WorkerDirectory(
                    runtimes[self._roles[0]],
                    {role: common.worker_endpoint(role) for role in runtimes},
                    clock,
                    block_size=common.block_size,
                )
            )
            if await self._workers_came(directory):
                await self._first_params(bus, subscriber)
                pinned = await self._pinned(bus, stack)
                neighbours = metrics.neighbours = await self._neighbours(bus, stack)
                serving = await self._register(
                    runtimes, directory, bus, holder, reporter, stats, pinned, neighbours
                )
                path = metrics.path = await self._data_path(stack)
                metrics.registered = True
                relaying = [] if path is None else [path.workers.task]
                telling = [bookings.task for bookings in pinned.values()]
                await self._until_stopped([*serving, directory.task, reporter.task, *telling, *relaying])
                metrics.registered = False
                await self._drain(runtimes, serving, stats, path)

    async def _workers_came(self, directory: WorkerDirectory) -> bool:
        """Wait until every leg has its workers: registered without them, each request would fail."""
        needed = dict.fromkeys(self._roles, self._config.min_decode_workers)
        if Role.PREFILL in needed:
            needed[Role.PREFILL] = self._config.min_prefill_workers
        said_at_s = self._clock.monotonic_s()
        while any(directory.count(role) < count for role, count in needed.items()):
            if self._stop.is_set():
                return False
            if self._clock.monotonic_s() - said_at_s >= WAITING_SAID_S:
                said_at_s = self._clock.monotonic_s()
                log.info(
                    "poa.router.waiting",
                    workers={role.value: directory.count(role) for role in needed},
                    needed={role.value: count for role, count in needed.items()},
                )
            await self._clock.sleep(0.1)
        return True

    async def _first_params(self, bus: Bus, subscriber: ParamsSubscriber) -> None:
        """Have the stored parameters before the first request, unless the bus is away."""
        try:
            await bus.wait_connected(BUS_WAIT_S)
            await subscriber.wait_loaded(BUS_WAIT_S)
        except BusError as error:
            log.warning("poa.params.unavailable", error=str(error), using="static parameters")

    def _handovers(self, directory: WorkerDirectory, bus: Bus) -> Handovers | None:
        """Decide the hand-over: by configuration, or by whether prefill workers give a bootstrap address."""
        if not {Role.PREFILL, Role.DECODE} <= set(self._roles):
            return None
        prefill = [card for card in directory.cards() if card.role is Role.PREFILL]
        offered = any(card.bootstrap_port is not None for card in prefill)
        if self._common.handover == "sequential" or (self._common.handover == "auto" and not offered):
            return None
        if self._config.replicas == 1:
            return Handovers()
        return HandoverChannel(bus, self._common.namespace, self._router_id, self._clock).table()

    async def _pinned(self, bus: Bus, stack: AsyncExitStack) -> dict[Role, PinnedBookings]:
        """Tell Dynamo's router of pinned requests, where it may hear of replicas.

        Of several routers that are not to know of each other's requests none may: it would hear of all.
        """
        common, config = self._common, self._config
        if not config.hears_replicas or os.environ.get("DYN_EVENT_PLANE", "nats") != "nats":
            return {}
        hashes = functools.partial(dynamo_host.sequence_hashes, block_size=common.block_size)
        return {
            role: await stack.enter_async_context(
                PinnedBookings(bus, common.worker_endpoint(role), hashes, self._clock, self._rng)
            )
            for role in self._roles
        }

    async def _neighbours(self, bus: Bus, stack: AsyncExitStack) -> Neighbours | None:
        """Listen to the other routers, where there are any."""
        if self._config.replicas == 1:
            return None
        ledgers = {role: Ledger(role, self._clock) for role in self._roles}
        namespace = self._common.namespace
        return await stack.enter_async_context(
            Neighbours(bus, namespace, self._router_id, ledgers, self._coefficients, self._clock)
        )

    async def _register(
        self,
        runtimes: dict[Role, Any],
        directory: WorkerDirectory,
        bus: Bus,
        holder: ParamsHolder,
        reporter: DecisionReporter,
        stats: RouterStats,
        pinned: dict[Role, PinnedBookings],
        neighbours: Neighbours | None,
    ) -> list[asyncio.Future[None]]:
        """Open Dynamo's router for each leg, serve it, and let the frontend know."""
        common, config, clock = self._common, self._config, self._clock
        handovers = self._handovers(directory, bus)
        avoid = AvoidList(config.avoid_s, clock)
        serving: list[asyncio.Future[None]] = []
        for role, runtime in runtimes.items():
            pool = await dynamo_host.WorkerPool.open(runtime, role, config, common, clock, pinned.get(role))
            leg = Leg(
                role,
                pool,
                override=functools.partial(dynamo_host.router_override, role, config.overlap_key),
                params=holder,
                events=reporter,
                directory=directory,
                handovers=handovers,
                avoid=avoid,
                stats=stats,
                config=config,
                clock=clock,
                picker=Picker(
                    Ledger(role, clock),
                    self._coefficients,
                    directory,
                    avoid,
                    clock,
                    self._rng,
                    # Dynamo's queue and its limits are its selection's: who set them wants them kept
                    refusal="queue_policy" if config.policy_config else "",
                    neighbours=neighbours,
                ),
            )
            endpoint = runtime.endpoint(common.router_endpoint(role))
            self._endpoints.append(endpoint)
            path = common.router_endpoint(role)
            self._served.append(Served(leg, pool, path, endpoint.connection_id()))
            serving.append(asyncio.ensure_future(endpoint.serve_endpoint(leg.generate)))
            await dynamo_host.register(
                endpoint, role, common, directory.raw_card(role), bootstrap=handovers is not None
            )
        log.info(
            "poa.router.started",
            router_id=self._router_id,
            legs=list(config.legs),
            handover="sequential" if handovers is None else "bootstrap",
            workers={role.value: directory.count(role) for role in runtimes},
            revision=holder.current.revision,
        )
        return serving

    async def _data_path(self, stack: AsyncExitStack) -> RelayPath | None:
        """Bring the relay up, where it is wanted and can be had.

        Raises:  ConfigError when it is asked for and cannot be had.
        """
        plane = os.environ.get("DYN_REQUEST_PLANE", "tcp")
        lack = dynamo_host.relay_lack(self._common.discovery, dynamo_host.dynamo_version(), plane)
        if not dynamo_host.use_relay(self._config, lack):
            return None
        try:
            return await stack.enter_async_context(RelayPath(self._served, self._clock))
        except RecordUnchangeable as unchangeable:
            lack = unchangeable.reason
        except OSError as error:
            lack = f"the relay cannot listen: {error}"
        dynamo_host.use_relay(self._config, lack)
        return None

    async def _until_stopped(self, working: list[Any]) -> None:
        """Wait for a signal, or for something that should run for ever to end; the supervisor restarts us."""
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            done, _ = await asyncio.wait({stopped, *working}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for ended in done - {stopped}:
            log.error("poa.router.lost", what=str(ended), error=repr(ended.exception()))

    async def _drain(
        self,
        runtimes: dict[Role, Any],
        serving: list[asyncio.Future[None]],
        stats: RouterStats,
        path: RelayPath | None,
    ) -> None:
        """Leave discovery at once, serve what is still sent here, let it finish for up to `drain_s`."""
        log.info("poa.router.draining", in_flight=sum(stats.in_flight.values()))
        await dynamo_host.leave(self._endpoints)
        await self._clock.sleep(LEAVE_S)
        until_s = self._clock.monotonic_s() + self._config.drain_s
        if path is not None:
            await path.drained(self._config.drain_s)
        for runtime in runtimes.values():
            runtime.shutdown()
        _, running = await asyncio.wait(serving, timeout=max(until_s - self._clock.monotonic_s(), 0.1))
        log.info("poa.router.stopped", cut_off=sum(stats.in_flight.values()), endpoints_open=len(running))


def _static(config: RouterConfig) -> RouterParams:
    return RouterParams(
        revision=0,
        router_temperature=config.router_temperature,
        overlap_weight=config.overlap_weight,
        kind=ParamsKind.STATIC,
        reason="configured",
    )


def _status(stats: RouterStats, holder: ParamsHolder) -> RouterStatus:
    return RouterStatus(
        in_flight=dict(stats.in_flight),
        params_revision=holder.current.revision,
        params_source=holder.source,
    )
