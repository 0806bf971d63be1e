"""How many of Dynamo's messages a second one core takes from a real NATS server into the fleet view.

Owns: the processes of the measurement and on which cores they run, the rounds, the figure.
Does not own: the traffic (replay.py), the wiring under test (controller_process.listen).
Invariant: every message of a round is applied; one that was dropped makes the measurement void.
Source: recordings of real traffic, carried on; a round is short enough to fit the bus's own queue, so the
        sender may be faster than the consumer without loss.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from dynamo_poa.bench.bus_throughput import own_server
from dynamo_poa.bench.fleet_decode import cards, load
from dynamo_poa.bench.replay import RawPublisher, Replay, pub_lines
from dynamo_poa.bench.report import Figure, MeasurementError, at_least, plain
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.fleet import Fleet
from dynamo_poa.telemetry import configure_logging

RECORDINGS = ("disagg_2p3d", "agg_4w_smallcache")
FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
PASSES = 20  # of the recordings in a round: 45,000 messages of the busiest topic, of 65,536 a queue takes
FIRST = 1000  # messages before the clock starts: the consumer has woken up, its caches are warm
TIMEOUT_S = 60.0
GOAL_PER_S = 50_000


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round as the consumer saw it, from message FIRST on."""

    messages: int
    cpu_s: float
    wall_s: float


def measure(rounds: int, say: Callable[[str], None]) -> Figure:
    """Measure so many rounds and one to warm up.

    Raises:  MeasurementError when recordings are missing or messages were lost.
    """
    missing = [name for name in RECORDINGS if not _path(name).is_file()]
    if missing:
        raise MeasurementError(f"{FIXTURES}: no recording {', '.join(missing)}; run it in a checkout")
    cores = sorted(os.sched_getaffinity(0))
    consumer_cores, others = {cores[-1]}, set(cores[:-1]) or set(cores)
    spawn = multiprocessing.get_context("spawn")
    os.sched_setaffinity(0, others)  # inherited by the server and the publisher
    try:
        with own_server() as url:
            to_publisher, publisher_end = spawn.Pipe()
            to_consumer, consumer_end = spawn.Pipe()
            publisher = spawn.Process(target=_publish, args=(url, publisher_end, rounds + 1), daemon=True)
            consumer = spawn.Process(
                target=_consume, args=(url, consumer_end, rounds + 1, consumer_cores), daemon=True
            )
            publisher.start()
            consumer.start()
            try:
                return figure(_run(to_publisher, to_consumer, rounds, say), len(cores))
            finally:
                for process in (publisher, consumer):
                    process.terminate()
                    process.join()
    finally:
        os.sched_setaffinity(0, cores)


def _run(publisher: Connection, consumer: Connection, rounds: int, say: Callable[[str], None]) -> list[Round]:
    done = []
    _hear(consumer)
    for number in range(rounds + 1):
        _hear(publisher)  # has made its messages
        publisher.send("go")
        answer = _hear(consumer)
        if isinstance(answer, str):
            raise MeasurementError(answer)
        assert isinstance(answer, Round)
        if number:
            done.append(answer)
            say(
                f"{answer.messages} messages: {answer.messages / answer.cpu_s:,.0f}/s of CPU, "
                f"{answer.messages / answer.wall_s:,.0f}/s of wall time"
            )
    return done


def _hear(connection: Connection) -> object:
    if not connection.poll(TIMEOUT_S):
        raise MeasurementError(f"a process of the measurement said nothing for {TIMEOUT_S:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise MeasurementError("a process of the measurement ended; see its output above") from None


def figure(rounds: list[Round], cores: int) -> Figure:
    """Turn rounds into the figure."""
    by_cpu = [one.messages / one.cpu_s for one in rounds]
    by_wall = [one.messages / one.wall_s for one in rounds]
    return Figure(
        name="ingest",
        title="event plane into the fleet view, through a real NATS server, consumer on one core",
        measures=(
            at_least("per_cpu_s", "messages per second of CPU", statistics.median(by_cpu), "/s", GOAL_PER_S),
            at_least("per_wall_s", "messages per second", statistics.median(by_wall), "/s", GOAL_PER_S),
            plain("worst_per_wall_s", "slowest round", min(by_wall), "/s"),
            plain("us_per_message", "CPU per message", 1e6 / statistics.median(by_cpu), "µs"),
        ),
        conditions=(
            f"median of {len(rounds)} rounds of {rounds[0].messages + FIRST:,} messages, none lost; "
            f"recordings {', '.join(RECORDINGS)} carried on, all three topics",
            "server and publisher share the consumer's core"
            if cores == 1
            else f"server and publisher on the other {cores - 1} core(s)",
        ),
    )


def _path(name: str) -> Path:
    return FIXTURES / f"{name}.ndjson.gz"


def _publish(url: str, control: Connection, rounds: int) -> None:
    common = CommonConfig()
    recorded = [(to, data) for name in RECORDINGS for to, data, _ in load(_path(name))]
    replay = Replay(recorded, common.worker_namespace)
    publisher = RawPublisher(url)
    for _ in range(rounds):
        lines = pub_lines([m for _ in range(PASSES) for m in replay.next_pass(time.time())])
        control.send("ready")
        control.recv()
        publisher.send(lines)
        publisher.flush()


def _consume(url: str, control: Connection, rounds: int, cores: set[int]) -> None:
    configure_logging("warning")
    os.sched_setaffinity(0, cores)
    uvloop.run(_measure(url, control, rounds))


async def _measure(url: str, control: Connection, rounds: int) -> None:
    clock, common = SystemClock(), CommonConfig()
    recordings = [load(_path(name)) for name in RECORDINGS]
    expected = PASSES * sum(len(recording) for recording in recordings)
    fleet = Fleet(common.worker_namespace, stale_s=30.0)
    fleet.set_cards((card for one in recordings for card in cards(one)), clock.monotonic_s())
    decisions = DecisionLog(window=256, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    del recordings
    # imported here: Dynamo takes half a second to import, which the other processes need not wait for
    from dynamo_poa.controller_process import listen

    async with (
        Bus(url, name="bench-ingest", clock=clock) as bus,
        Bus(url, name="bench-ingest-caches", clock=clock) as caches,
    ):
        listen(bus, caches, common, fleet, decisions, clock)
        await bus.wait_connected(10.0)
        await caches.wait_connected(10.0)
        await clock.sleep(0.2)  # subscriptions are at the server
        control.send("ready")
        for number in range(rounds):
            async with asyncio.timeout(TIMEOUT_S):  # whoever started this may be gone
                done = await _round(
                    fleet, (bus, caches), number * expected + FIRST, (number + 1) * expected, clock
                )
            fleet.take_notices(clock.monotonic_s())
            unread = bus.dropped + caches.dropped
            lost = {**fleet.dropped} | ({"slow_consumer": unread} if unread else {})
            control.send(f"messages were dropped: {lost}" if lost else done)


async def _round(fleet: Fleet, buses: tuple[Bus, ...], start: int, end: int, clock: SystemClock) -> Round:
    """Time the messages from number `start` to number `end`."""
    while fleet.received.total() < start:
        await clock.sleep(0.001)
    before, cpu_s, wall_s = fleet.received.total(), time.process_time(), time.perf_counter()
    while fleet.received.total() < end and not any(bus.dropped for bus in buses):
        await clock.sleep(0.002)
    return Round(
        messages=fleet.received.total() - before,
        cpu_s=time.process_time() - cpu_s,
        wall_s=time.perf_counter() - wall_s,
    )
