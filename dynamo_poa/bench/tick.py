"""What one controller tick costs with many workers and requests in flight, and what pricing costs beside it.

Owns: filling the loop's inputs, timing its ticks, the figure.
Does not own: the loop, which runs as it does in its process: real bus, store, fleet, decisions and sinks.
Invariant: between two ticks time moves by one period and new traffic comes, so that no tick sees nothing new.
"""

import asyncio
import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import uvloop

from dynamo_poa.bench.bus_throughput import own_server
from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_most, plain
from dynamo_poa.bench.story import quantile
from dynamo_poa.bench.traffic import Traffic
from dynamo_poa.bus import Bus
from dynamo_poa.clock import ManualClock, SystemClock
from dynamo_poa.config import CommonConfig, ControllerConfig, RouterConfig
from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook
from dynamo_poa.loop import ControlLoop
from dynamo_poa.params import ParamsPublisher
from dynamo_poa.policies import make_policy
from dynamo_poa.pricing import Found, Pricer
from dynamo_poa.telemetry import BusSink, LogSink
from dynamo_poa.tick import Settings
from dynamo_poa.values import Role, Setting, WorkerCard

WORKERS = 64
WINDOW = 512
OPEN = 512
BLOCKS = 4096
WARM_UP_TICKS = 20
REQUESTS_PER_TICK = 32  # new decisions between two ticks: 128 a second
GOAL_MS = 20.0


class Kind(NamedTuple):
    """What distinguishes one run of ticks from another.

    random_frac:  of the router's choices: at 1 loads grow apart, and the best assignment is hard
    """

    name: str
    roles: tuple[Role, ...] = (Role.AGGREGATED,)
    estimates: bool = True
    random_frac: float = 0.25


class Spent(NamedTuple):
    """CPU seconds of each tick in its own thread, and of each pricing in the other."""

    ticks_s: list[float]
    pricing_s: list[float]


KINDS = (
    Kind("aggregated"),
    Kind("disaggregated", roles=(Role.PREFILL, Role.DECODE)),
    Kind("random choices", random_frac=1.0),
    Kind("no estimate", estimates=False),
)


def measure(ticks: int, say: Callable[[str], None]) -> Figure:
    """Time so many ticks of each kind.

    Raises:  MeasurementError when the ticks did not see what they should.
    """
    found = {}
    with own_server(jetstream=True) as url, Path(os.devnull).open("w") as nowhere:
        log = structlog.wrap_logger(
            structlog.PrintLogger(nowhere), processors=[structlog.processors.JSONRenderer()]
        )
        for kind in KINDS:
            spent = found[kind.name] = uvloop.run(_ticks(url, log, ticks, kind))
            beside = f", pricing {statistics.median(spent.pricing_s) * 1e3:.1f} ms" if spent.pricing_s else ""
            say(f"{kind.name}: median {statistics.median(spent.ticks_s) * 1e3:.1f} ms{beside}")
    return figure(found)


def figure(found: dict[str, Spent]) -> Figure:
    """Turn CPU seconds of each kind of tick into the figure."""
    config = ControllerConfig()
    every = config.estimate_s / config.tick_s
    measures: list[Measure] = []
    for kind, spent in found.items():
        measures += [at_most(*figures, GOAL_MS) for figures in _quantiles(f"{kind}: tick", spent.ticks_s)]
        if spent.pricing_s:
            beside = _quantiles(f"{kind}: pricing beside it", spent.pricing_s)
            measures += [plain(*figures) for figures in beside]
    return Figure(
        name="tick",
        title=f"CPU of a controller tick, {WORKERS} workers, {OPEN} requests in flight",
        measures=tuple(measures),
        conditions=(
            f"{len(found['aggregated'].ticks_s)} ticks each; by default one in {every:g} takes snapshots, "
            "here each but in the last kind; they are priced in another thread, which no tick waits for",
            f"the snapshots of all legs and the paper's estimate of {WINDOW} decisions a leg are priced",
            "the router takes the cheapest worker three times in four; with `random choices` never",
            f"between ticks {3 * WORKERS} messages and {REQUESTS_PER_TICK} requests arrive, not timed; "
            "store, heartbeat, log line, telemetry and metrics sinks are",
        ),
    )


def _quantiles(what: str, spent_s: list[float]) -> Iterator[tuple[str, str, float, str]]:
    """Yield key, name, value and unit of each quantile."""
    for name, value_s in (
        ("median", quantile(spent_s, 0.5)),
        ("P99", quantile(spent_s, 0.99)),
        ("worst", max(spent_s)),
    ):
        key = f"{what} {name.lower()} ms".replace(":", "").replace(" ", "_")
        yield key, f"{what}, {name}", value_s * 1e3, "ms"


async def _ticks(url: str, log: Any, ticks: int, kind: Kind) -> Spent:
    """Return the CPU seconds of each tick and of each pricing."""
    common, router, rng, clock = CommonConfig(), RouterConfig(), random.Random(1), ManualClock()
    config = ControllerConfig(window=WINDOW, tick_s=0.25, estimate_s=0.25 if kind.estimates else 60.0)
    share = WORKERS // len(kind.roles)
    pools = {role: [rng.getrandbits(64) for _ in range(share)] for role in kind.roles}
    traffic = Traffic(pools, common, blocks=BLOCKS, rng=rng, random_frac=kind.random_frac, open_requests=OPEN)
    book = LatencyBook()
    fleet = Fleet(common.worker_namespace, config.stale_s, on_pass=book.observe)
    pricing_s: list[float] = []
    pricer = Pricer(config.estimate_window_s, book, run=functools.partial(_timed, pricing_s))
    decisions = DecisionLog(
        window=WINDOW,
        ttft_window_s=config.regime.window_s,
        stale_s=config.stale_s,
        block_size=common.block_size,
    )
    cards = [
        WorkerCard(worker_id=worker, role=role, kv_block_size=common.block_size, total_kv_blocks=BLOCKS)
        for role, workers in pools.items()
        for worker in workers
    ]
    metrics = ControllerMetrics(lambda: fleet.workers(clock.monotonic_s()))
    static = Setting(router.router_temperature, router.overlap_weight)
    async with Bus(url, name="bench-tick", clock=SystemClock()) as bus:
        await bus.wait_connected(10.0)
        loop = ControlLoop(
            Settings(
                namespace=common.namespace,
                config=config,
                policy=make_policy(config.policy),
                static=static,
            ),
            clock=clock,
            bus=bus,
            channel=ParamsPublisher(bus, common.namespace, "bench", clock, config.mode),
            fleet=fleet,
            decisions=decisions,
            pricer=pricer,
            cards=lambda: cards,
            sinks=(LogSink(log), BusSink(bus, common.namespace), metrics),
        )
        await loop.tick()  # takes the cards; later traffic then finds its workers
        _feed(traffic, fleet, decisions, clock, 2 * OPEN)
        ticks_s = []
        for number in range(-WARM_UP_TICKS, ticks):
            await clock.advance(config.tick_s)
            _feed(traffic, fleet, decisions, clock, REQUESTS_PER_TICK)
            before_s = time.thread_time()
            await loop.tick()
            if number >= 0:
                ticks_s.append(time.thread_time() - before_s)
            await pricer.settled()
    record = loop.latest
    if record is None or fleet.dropped or (kind.estimates and (record.poa_hat is None or pricer.skipped)):
        raise MeasurementError(f"ticks did not see what they should, or messages were dropped: {record}")
    return Spent(ticks_s, pricing_s[-ticks:] if kind.estimates else [])


async def _timed(spent_s: list[float], job: Callable[[], Found]) -> Found:
    """Run a job in a thread and note its CPU time."""

    def timed() -> Found:
        before_s = time.thread_time()
        try:
            return job()
        finally:
            spent_s.append(time.thread_time() - before_s)

    return await asyncio.to_thread(timed)


def _feed(
    traffic: Traffic,
    fleet: Fleet,
    decisions: DecisionLog,
    clock: ManualClock,
    requests: int,
) -> None:
    at_s, wall_s = clock.monotonic_s(), clock.wall_s()
    for worker in traffic.workers:
        for message in (
            traffic.forward_pass(worker, wall_s),
            traffic.kv_metrics(worker, wall_s),
            traffic.kv_event(worker, wall_s),
        ):
            fleet.observe(message.subject, message.data, at_s, wall_s)
    decisions.receive(traffic.decision_batch(requests, wall_s).data, at_s)
