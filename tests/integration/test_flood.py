"""A flood of cache events over a real nats-server: the controller's own wiring stays prompt (case E8)."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import structlog
from dynamo_messages import W1, W2, W3, W4, card, cl, envelope, fp, km, st, subject
from nats_server import NatsServer
from waiting import eventually

from dynamo_poa.bench.replay import Message, RawPublisher, pub_lines
from dynamo_poa.bus import Bus, Handler
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig, ControllerConfig
from dynamo_poa.controller_process import listen
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.fleet import Fleet
from dynamo_poa.loop import ControlLoop
from dynamo_poa.params import ParamsPublisher
from dynamo_poa.policies import make_policy
from dynamo_poa.telemetry import ControllerMetrics, MetricsServer, TelemetryRecord
from dynamo_poa.tick import Settings
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import KV_EVENTS, DynamoMessage

pytestmark = pytest.mark.dynamo  # importing the controller's wiring imports Dynamo

CLOCK = SystemClock()
COMMON = CommonConfig()
WORKERS = (W1, W2, W3, W4)
FLOOD_S = 6.0
TICK_S = 0.5
BLOCKS = 64  # of a message
KEPT = 32  # messages' blocks are stored again and again, so that the cache never outgrows its capacity


def cache_event(event_id: int) -> Message:
    """Return the store of 64 blocks, published now."""
    first = 2**63 + event_id % KEPT * BLOCKS
    topic, body = st(W1, event_id, None, range(first, first + BLOCKS))
    return message(topic, body, publisher_id=7, sequence=event_id)


def message(topic: str, body: Any, publisher_id: int, sequence: int) -> Message:
    data = envelope(topic, msgspec.msgpack.encode(body), publisher_id, sequence, time.time())
    return Message(subject(topic, COMMON.worker_namespace), data)


def flood(url: str, control: Any) -> None:
    """Send cache events as fast as possible for FLOOD_S; say how many."""
    publisher = RawPublisher(url)
    event_id, until_s = 0, time.monotonic() + FLOOD_S
    while time.monotonic() < until_s:
        batch = range(event_id + 1, event_id + 51)
        publisher.send(pub_lines(map(cache_event, batch)))
        event_id = batch[-1]
    publisher.flush()
    control.send(event_id)


def measure_load(url: str, stop: Any) -> None:
    """Let each worker report its load twice a second, as workers do."""
    publisher, sequence = RawPublisher(url), 0
    while not stop.wait(0.5):
        sequence += 1
        for number, worker_id in enumerate(WORKERS):
            said = (km(worker_id, None, None, 4000), fp(worker_id, sequence, 0.05, nd=8))
            publisher.send(
                pub_lines(
                    message(topic, body, 100 + 2 * number + which, sequence)
                    for which, (topic, body) in enumerate(said)
                )
            )
    publisher.flush()


class LateFleet(Fleet):
    """A fleet that notes how long after its publication each message is handled.

    slow_s:  what a cache event takes longer than it should
    """

    def __init__(self, slow_s: float) -> None:
        super().__init__(COMMON.worker_namespace, 30.0)
        self.slow_s = slow_s
        self.late_s: dict[str, list[float]] = {}

    def observe(self, subject: str, data: bytes, at_s: float, wall_s: float) -> DynamoMessage | None:
        taken = super().observe(subject, data, at_s, wall_s)
        if taken is not None:
            self.late_s.setdefault(taken.topic, []).append(wall_s - taken.published_at_s)
            if taken.topic == KV_EVENTS:
                until_s = time.perf_counter() + self.slow_s
                while time.perf_counter() < until_s:
                    pass
        return taken


class SmallBus(Bus):
    """A bus whose subscriptions hold few messages."""

    def subscribe(self, subject: str, handler: Handler, **limits: int) -> None:
        super().subscribe(subject, handler, pending_messages=1000)


class Records:
    """A sink that keeps every record."""

    def __init__(self) -> None:
        self.dropped = 0
        self.records: list[TelemetryRecord] = []

    async def emit(self, record: TelemetryRecord) -> None:
        self.records.append(record)


@asynccontextmanager
async def controller(url: str, fleet: LateFleet, bus_type: type[Bus]) -> AsyncIterator[tuple[str, Records]]:
    """Run the control loop on the controller's own wiring; yields its /metrics and what it tells."""
    config = ControllerConfig(tick_s=TICK_S)
    decisions = DecisionLog(window=256, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    records = Records()
    metrics = ControllerMetrics(lambda: fleet.workers(CLOCK.monotonic_s()))
    async with bus_type(url, name="main", clock=CLOCK) as bus, bus_type(url, name="c", clock=CLOCK) as caches:
        listen(bus, caches, COMMON, fleet, decisions, CLOCK)
        await bus.wait_connected(5)
        await caches.wait_connected(5)
        loop = ControlLoop(
            Settings(
                namespace=COMMON.namespace,
                config=config,
                policy=make_policy(config.policy, (0.0, 1.0)),
                static=(0.0, 1.0),
            ),
            clock=CLOCK,
            bus=bus,
            feeds=(caches,),
            channel=ParamsPublisher(bus, COMMON.namespace, "controller", CLOCK, config.mode),
            fleet=fleet,
            decisions=decisions,
            cards=lambda: [card(worker_id) for worker_id in WORKERS],
            sinks=(metrics, records),
        )
        async with MetricsServer(metrics.registry, 0, lambda: loop.ready) as server:
            task = asyncio.create_task(loop.run())
            try:
                yield f"http://127.0.0.1:{server.port}/metrics", records
                assert not task.done()
                assert bus.reconnects == 0
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@contextmanager
def publishers(url: str) -> Iterator[Any]:
    """Run flood and load reports as processes of their own; yields where the flood says that it is over."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    stop = spawn.Event()
    processes = [
        spawn.Process(target=flood, args=(url, theirs)),
        spawn.Process(target=measure_load, args=(url, stop)),
    ]
    for process in processes:
        process.start()
    try:
        yield ours
    finally:
        stop.set()
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def resident_mib() -> float:
    """Return what this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("overloaded", [False, True])
async def test_a_flood_of_cache_events_delays_nothing_else(nats_server: NatsServer, overloaded: bool) -> None:
    """Case E8: load is handled within 1 s, ticks come, /metrics answers; what is dropped is told.

    `overloaded`: few messages may wait and each takes so long that most of the flood is dropped.
    """
    fleet = LateFleet(slow_s=0.0003 if overloaded else 0.0)
    bus_type = SmallBus if overloaded else Bus
    with structlog.testing.capture_logs() as lines:
        async with (
            controller(nats_server.url, fleet, bus_type) as (metrics_url, told),
            aiohttp.ClientSession() as client,
        ):
            await eventually(lambda: told.records)
            held_mib = resident_mib()
            with publishers(nats_server.url) as flooded:
                await eventually(lambda: fleet.received[KV_EVENTS] > 1000, 10)
                began = len(told.records)
                scrapes_s = []
                while not flooded.poll():
                    asked_s = time.perf_counter()
                    async with client.get(metrics_url) as answer:
                        assert 'poa_worker_resident_approximate{dp_rank="0"' in await answer.text()
                    scrapes_s.append(time.perf_counter() - asked_s)
                    await asyncio.sleep(0.25)
                sent, over_s = flooded.recv(), time.monotonic()
                flooded_to = sent
                grew_mib = resident_mib() - held_mib
                ticks = told.records[began:]
                load_late_s = [s for topic, late in fleet.late_s.items() if topic != KV_EVENTS for s in late]

                publisher = RawPublisher(nats_server.url)
                while fleet.late_s[KV_EVENTS][-1] > 1.0 or sent < flooded_to + 10:
                    assert time.monotonic() < over_s + 10
                    sent += 1
                    publisher.send(pub_lines([cache_event(sent)]))
                    await asyncio.sleep(0.1)

            assert flooded_to > 5000 * FLOOD_S
            assert len(load_late_s) > 8 * FLOOD_S
            assert max(load_late_s) < 1.0
            gaps_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(ticks)]
            assert len(gaps_s) > FLOOD_S / TICK_S / 2
            assert max(gaps_s) < 2 * TICK_S
            assert max(scrapes_s) < 1.0
            assert grew_mib < 250

            dropped = told.records[-1].messages_dropped.get("slow_consumer", 0)
            await eventually(lambda: fleet.received[KV_EVENTS] + dropped == sent)
            assert (dropped > 0) or not overloaded
            said = [line for line in lines if line["event"] == "poa.bus.dropped"]
            assert len(said) <= FLOOD_S + 2
            assert bool(said) is bool(dropped)
            (state,) = (state for state in fleet.workers(CLOCK.monotonic_s()) if state.key.worker_id == W1)
            assert state.cache.approximate is bool(dropped)
            topic, body = cl(W1, sent + 1)
            publisher.send(pub_lines([message(topic, body, publisher_id=7, sequence=sent + 1)]))
            await eventually(lambda: not fleet.resident_blocks(WorkerKey(W1, 0)))
            (state,) = (state for state in fleet.workers(CLOCK.monotonic_s()) if state.key.worker_id == W1)
            assert (state.cache.approximate, state.cache.resident_blocks) == (False, 0)
            publisher.close()
