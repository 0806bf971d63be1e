"""The controller's own wiring and loop on a real NATS server, with workers that are told, not discovered."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig, ControllerConfig
from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.controller_process import listen
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook
from dynamo_poa.loop import ControlLoop
from dynamo_poa.params import ParamsPublisher
from dynamo_poa.policies import make_policy
from dynamo_poa.pricing import Pricer
from dynamo_poa.telemetry import BusSink, MetricsServer, TelemetryRecord
from dynamo_poa.tick import Settings
from dynamo_poa.values import Setting, WorkerCard

CLOCK = SystemClock()
STATIC = (0.0, 1.0)


class Records:
    """A sink that keeps every record."""

    def __init__(self) -> None:
        self.dropped = 0
        self.records: list[TelemetryRecord] = []

    async def emit(self, record: TelemetryRecord) -> None:
        self.records.append(record)


class Wired(NamedTuple):
    """A controller that runs: its /metrics, and its records, oldest first."""

    metrics_url: str
    records: list[TelemetryRecord]


@asynccontextmanager
async def wired_controller(
    url: str,
    common: CommonConfig,
    fleet: Fleet,
    cards: Sequence[WorkerCard],
    *,
    config: ControllerConfig,
    book: LatencyBook | None = None,
    bus_type: type[Bus] = Bus,
) -> AsyncIterator[Wired]:
    """Run a controller of `common.namespace` for as long as the block lasts."""
    decisions = DecisionLog(window=256, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    told = Records()
    pricer = Pricer(config.estimate_window_s, book or LatencyBook())
    metrics = ControllerMetrics(
        lambda: fleet.workers(CLOCK.monotonic_s()),
        lambda: fleet.publishers(CLOCK.monotonic_s()),
        lambda: pricer.latencies.values(),
    )
    name = f"controller-{common.namespace}"
    async with (
        bus_type(url, name=name, clock=CLOCK) as bus,
        bus_type(url, name=f"{name}-caches", clock=CLOCK) as caches,
    ):
        listen(bus, caches, common, fleet, decisions, CLOCK)
        await bus.wait_connected(5)
        await caches.wait_connected(5)
        loop = ControlLoop(
            Settings(
                namespace=common.namespace,
                config=config,
                policy=make_policy(config.policy),
                static=Setting(*STATIC),
            ),
            clock=CLOCK,
            bus=bus,
            feeds=(caches,),
            channel=ParamsPublisher(bus, common.namespace, name, CLOCK, config.mode),
            fleet=fleet,
            decisions=decisions,
            pricer=pricer,
            cards=lambda: cards,
            sinks=(metrics, told, BusSink(bus, common.namespace)),
        )
        async with MetricsServer(metrics.registry, 0, lambda: loop.ready) as server:
            task = asyncio.create_task(loop.run())
            try:
                yield Wired(f"http://127.0.0.1:{server.port}/metrics", told.records)
                assert not task.done()
                assert bus.reconnects == 0
                assert told.records[-1].failed_ticks == 0
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
