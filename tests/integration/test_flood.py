"""A flood of cache events over a real nats-server: the controller's own wiring stays prompt (case E8)."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import structlog
from dynamo_messages import W1, W2, W3, W4, card, cl, envelope, fp, km, st, subject
from nats_server import NatsServer
from waiting import eventually
from wired_controller import CLOCK, wired_controller

from dynamo_poa.bench.replay import Message, RawPublisher, pub_lines
from dynamo_poa.bus import Bus, Handler
from dynamo_poa.config import CommonConfig, ControllerConfig
from dynamo_poa.fleet import Fleet
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import KV_EVENTS, DynamoMessage

pytestmark = pytest.mark.dynamo  # importing the controller's wiring imports Dynamo

COMMON = CommonConfig()
WORKERS = (W1, W2, W3, W4)
CARDS = [card(worker_id) for worker_id in WORKERS]
FLOOD_S = 4.0
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
    with structlog.testing.capture_logs() as lines, ExitStack() as held:
        async with (
            wired_controller(
                nats_server.url,
                COMMON,
                fleet,
                CARDS,
                config=ControllerConfig(tick_s=TICK_S),
                bus_type=bus_type,
            ) as (metrics_url, records),
            aiohttp.ClientSession() as client,
        ):
            await eventually(lambda: records)
            held_mib = resident_mib()
            with publishers(nats_server.url) as flooded:
                await eventually(lambda: fleet.received[KV_EVENTS] > 1000, 10)
                began = len(records)
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
                ticks = records[began:]
                load_late_s = [s for topic, late in fleet.late_s.items() if topic != KV_EVENTS for s in late]

                publisher = held.enter_context(closing(RawPublisher(nats_server.url)))
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

            def dropped() -> int:
                return records[-1].messages_dropped.get("slow_consumer", 0)

            await eventually(lambda: fleet.received[KV_EVENTS] + dropped() == sent)
            assert dropped() > 0 or not overloaded
            said = [line for line in lines if line["event"] == "poa.bus.dropped"]
            assert len(said) <= FLOOD_S + 2
            assert bool(said) is (dropped() > 0)
            (state,) = (state for state in fleet.workers(CLOCK.monotonic_s()) if state.key.worker_id == W1)
            assert state.cache.approximate is (dropped() > 0)
            topic, body = cl(W1, sent + 1)
            publisher.send(pub_lines([message(topic, body, publisher_id=7, sequence=sent + 1)]))
            await eventually(lambda: not fleet.resident_blocks(WorkerKey(W1, 0)))
            (state,) = (state for state in fleet.workers(CLOCK.monotonic_s()) if state.key.worker_id == W1)
            assert (state.cache.approximate, state.cache.resident_blocks) == (False, 0)
