"""Decides how a controller process is put together, and in which order it starts and stops.

Owns: building the pieces, wiring the event plane to them, waiting for NATS, stopping on a signal.
Does not own: what a tick does (loop.py, controller.py).
Invariant: whatever was opened is closed, in reverse order, however serving ends.
Source: Dynamo exits when NATS is not there at its start, so we wait for NATS first (measured, 1.4.2).
"""

import asyncio
import os
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack

import aiohttp
import structlog

from dynamo_poa import dynamo_host, telemetry
from dynamo_poa.bus import Bus
from dynamo_poa.cache_whole import CacheWhole
from dynamo_poa.cards import CardsSink
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.coefficients_sink import CoefficientsSink
from dynamo_poa.config import CommonConfig, ControllerConfig, RouterConfig
from dynamo_poa.control import ControlService
from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.coupling import CacheSwap
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import BusError, ParamsError
from dynamo_poa.fleet import Fleet
from dynamo_poa.following import Following, Seen, turnover
from dynamo_poa.latency import LatencyBook
from dynamo_poa.loop import ControlLoop, Follow
from dynamo_poa.output_tokens import OutputTokens
from dynamo_poa.params import ParamsPublisher, decode_heartbeat
from dynamo_poa.placement import Placements
from dynamo_poa.policies import make_policy, make_shadow
from dynamo_poa.pricing import Pricer
from dynamo_poa.resync import Resync
from dynamo_poa.slow_games import SlowGames
from dynamo_poa.split import note_split
from dynamo_poa.telemetry import BusSink, LogSink, MetricsServer, configure_logging
from dynamo_poa.tick import Settings
from dynamo_poa.ttft import FrontendScraper
from dynamo_poa.values import Role, Setting, WorkerCard, WorkerKey
from dynamo_poa.wire import FORWARD_PASS_METRICS, KV_EVENTS, KV_METRICS, ForwardPass, subject

log = structlog.get_logger()

BUS_WAIT_S = 10.0  # between two lines that say so
MAX_SAID = 16  # other controllers named; a predecessor's last heartbeat may be one
GATHER_S = 0.05  # a tick is 0.25 s, so messages need not be looked at one by one
SCRAPE_TIMEOUT_S = 2.0
# A frontend that has not answered for so long says nothing of what is in flight.
SCRAPE_MAX_AGE_S = 5.0


class ControllerProcess:
    """One controller of one namespace."""

    def __init__(
        self,
        common: CommonConfig,
        router: RouterConfig,
        config: ControllerConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._common = common
        self._router = router
        self._config = config
        self._clock = clock or SystemClock()
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        """Control until SIGTERM or SIGINT."""
        common, config, clock = self._common, self._config, self._clock
        configure_logging(common.log_level)
        structlog.contextvars.bind_contextvars(component="controller")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        controller_id = f"controller-{os.getpid()}"
        book = LatencyBook(half_life_s=config.latency_half_life_s, straggler_factor=config.straggler_factor)
        output_tokens = OutputTokens()

        def on_pass(key: WorkerKey, card: WorkerCard, done: ForwardPass, at_s: float) -> None:
            book.observe(key, card, done, at_s)
            output_tokens.observe(key, card, done, at_s)

        exposed = common.namespace if self._router.exposes_decode else None
        fleet = Fleet(
            common.worker_namespace,
            config.stale_s,
            exposed=exposed,
            routers_synced=self._router.hears_replicas,
            on_pass=on_pass,
            on_restart=book.forget,
            reload_s=config.caching.reload_s,
        )
        decisions = self._decision_log()
        pricer = Pricer(
            config.estimate_window_s,
            book,
            block_size=common.block_size,
            output_tokens=output_tokens.mean,
            scale_is_weight=self._router.overlap_key == "prefill_load_scale",
        )
        placements = Placements(
            config.caching,
            caches=fleet.caches,
            groups=decisions.demand.groups,
            latencies=lambda: pricer.latencies,
        )
        games = SlowGames(
            placements.note_caches,
            lambda at_s: note_split(
                at_s,
                fleet.workers(at_s),
                decisions,
                book.pool_curves(),
                output_tokens.mean,
                config.slo,
                output_tokens.contexts,
            ),
        )
        metrics = ControllerMetrics(
            lambda: fleet.workers(clock.monotonic_s()),
            lambda: fleet.publishers(clock.monotonic_s()),
            lambda: pricer.latencies.values(),
        )
        async with AsyncExitStack() as stack:
            nats_url = os.environ.get("NATS_SERVER", common.nats_url)
            bus = await stack.enter_async_context(Bus(nats_url, name=controller_id, clock=clock))
            caches = await stack.enter_async_context(
                Bus(nats_url, name=f"{controller_id}-caches", clock=clock)
            )
            listen(bus, caches, common, fleet, decisions, clock, exposed)
            watch_for_another(bus, common.namespace, controller_id)
            channel = ParamsPublisher(bus, common.namespace, controller_id, clock, config.mode)
            directory: list[dynamo_host.WorkerDirectory] = []

            def cards() -> Iterable[WorkerCard]:
                return directory[0].cards() if directory else ()

            loop = ControlLoop(
                self._settings(),
                clock=clock,
                bus=bus,
                feeds=(caches,),
                channel=channel,
                fleet=fleet,
                decisions=decisions,
                pricer=pricer,
                games=games,
                follow=follower(fleet, decisions, games),
                cards=cards,
                frontend=await self._frontend(stack),
                sinks=(
                    LogSink(log),
                    BusSink(bus, common.namespace),
                    metrics,
                    CardsSink(bus, common.namespace, cards, clock),
                    CoefficientsSink(
                        bus,
                        common.namespace,
                        controller_id,
                        clock,
                        decisions=decisions,
                        output_tokens=output_tokens,
                        workers=lambda: fleet.workers(clock.monotonic_s()),
                        latencies=lambda: pricer.latencies,
                        pools=book.pool_curves,
                    ),
                ),
            )
            await stack.enter_async_context(
                MetricsServer(metrics.registry, config.metrics_port, lambda: loop.ready)
            )
            service = ControlService(loop, config.mode, clock)
            bus.respond(subject(common.namespace, "control"), service.answer)
            if await self._nats_came(bus):
                directory.append(await self._workers(stack, fleet))
                await self._until_stopped(loop)
        log.info(telemetry.STOPPED)

    def _settings(self) -> Settings:
        return Settings(
            namespace=self._common.namespace,
            config=self._config,
            policy=make_policy(self._config.policy),
            shadow=make_shadow(self._config.policy),
            static=Setting(self._router.router_temperature, self._router.overlap_weight),
        )

    def _decision_log(self) -> DecisionLog:
        answering = {Role.PREFILL} if self._router.exposes_decode else {Role.DECODE, Role.AGGREGATED}
        return DecisionLog(
            window=self._config.window,
            ttft_window_s=self._config.regime.window_s,
            stale_s=self._config.stale_s,
            block_size=self._common.block_size,
            answering=frozenset(answering),
            demand_window_s=self._config.caching.demand_window_s,
            prompts_window_s=self._config.estimate_window_s,
        )

    async def _frontend(self, stack: AsyncExitStack) -> FrontendScraper | None:
        """Return a reader of the frontend's /metrics, None when no frontend is configured."""
        if not self._config.frontend_url:
            return None
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        url = f"{self._config.frontend_url.rstrip('/')}/metrics"

        async def fetch() -> str:
            try:
                async with session.get(url, raise_for_status=True) as answer:
                    return await answer.text()
            except aiohttp.ClientError as error:
                raise OSError(f"{url}: {error}") from error

        return FrontendScraper(fetch, window_s=self._config.regime.window_s, max_age_s=SCRAPE_MAX_AGE_S)

    async def _nats_came(self, bus: Bus) -> bool:
        """Wait for NATS for as long as it takes; False when told to stop before."""
        while not self._stop.is_set():
            connected = asyncio.create_task(bus.wait_connected(BUS_WAIT_S), name="wait for NATS")
            stopped = asyncio.create_task(self._stop.wait(), name="wait for a signal")
            await asyncio.wait({connected, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (connected, stopped):
                task.cancel()
            results = await asyncio.gather(connected, stopped, return_exceptions=True)
            if results[0] is None:
                return not self._stop.is_set()
            if isinstance(results[0], BusError):
                log.warning(telemetry.WAITING, waiting_for="NATS", error=str(results[0]))
        return False

    async def _workers(self, stack: AsyncExitStack, fleet: Fleet) -> dynamo_host.WorkerDirectory:
        runtime = dynamo_host.open_runtime()
        stack.callback(runtime.shutdown)

        endpoints = {role: self._common.worker_endpoint(role) for role in Role}
        if self._router.exposes_decode:
            endpoints[Role.DECODE] = self._common.router_endpoint(Role.DECODE)
        directory = await stack.enter_async_context(
            dynamo_host.WorkerDirectory(
                runtime,
                endpoints,
                self._clock,
                block_size=self._common.block_size,  # whom routers refuse is no part of the pool
            )
        )

        async def ask(card: WorkerCard, key: WorkerKey, publisher_id: int) -> CacheWhole:
            return await directory.cache_of(key, publisher_id)

        await stack.enter_async_context(Resync(fleet, ask, self._clock))
        return directory

    async def _until_stopped(self, loop: ControlLoop) -> None:
        """Run the loop until a signal comes; a loop that ends by itself is an error."""
        ticking = asyncio.create_task(loop.run(), name="control loop")
        stopped = asyncio.create_task(self._stop.wait(), name="wait for a signal")
        await asyncio.wait({ticking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ticking, stopped):
            task.cancel()
        results = await asyncio.gather(ticking, stopped, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]


def follower(fleet: Fleet, decisions: DecisionLog, games: SlowGames) -> Follow:
    """Return what is told the setting in force on every tick, and says how caches followed its changes."""
    following = Following()

    def follow(at_s: float, wall_s: float, setting: Setting | None) -> CacheSwap | None:
        stored_blocks, pool_blocks = turnover(fleet.stored_blocks())
        return following.observe(
            Seen(
                at_s=at_s,
                wall_s=wall_s,
                setting=setting,
                prompts_seen=decisions.prompts_seen,
                prompt_tokens_seen=decisions.prompt_tokens_seen,
                cached_tokens_seen=decisions.cached_tokens_seen,
                stored_blocks=stored_blocks,
                pool_blocks=pool_blocks,
                duplication=games.caching.duplication,
            )
        )

    return follow


def listen(
    bus: Bus,
    caches: Bus,
    common: CommonConfig,
    fleet: Fleet,
    decisions: DecisionLog,
    clock: Clock,
    exposed: str | None = None,
) -> None:
    """Subscribe to all that is watched, each topic by itself: a flood of one must not delay another (E8).

    Args:     caches: the connection that cache events come over. They are the one topic that floods, and the
              server queues up to 64 MB for a connection: all else would wait behind that (measured: 0.5 s).
    """

    def on_event(topic_subject: str, data: bytes) -> None:
        fleet.observe(topic_subject, data, clock.monotonic_s(), clock.wall_s())

    for over, topic in ((bus, FORWARD_PASS_METRICS), (bus, KV_METRICS), (caches, KV_EVENTS)):
        for namespace in filter(None, (common.worker_namespace, exposed)):
            over.subscribe(
                f"namespace.{namespace}.component.*.endpoint.*.{topic}", on_event, gather_s=GATHER_S
            )
    bus.subscribe(
        subject(common.namespace, "decisions"),
        lambda _, data: decisions.receive(data, clock.monotonic_s()),
    )


def watch_for_another(bus: Bus, namespace: str, controller_id: str) -> None:
    """Say once of each that another controller speaks to the same routers."""
    said: set[str] = set()

    def on_heartbeat(_: str, data: bytes) -> None:
        try:
            other = decode_heartbeat(data).controller_id
        except ParamsError:
            return  # the routers count it
        if other != controller_id and other not in said and len(said) < MAX_SAID:
            said.add(other)
            log.warning(telemetry.SECOND, namespace=namespace, other=other)

    bus.subscribe(subject(namespace, "params"), on_heartbeat)
