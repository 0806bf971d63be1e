"""How much memory a controller process holds under a steady flood of messages.

Owns: the flood at a given rate, sampling the process, the figure.
Does not own: the controller, which is a real process of a served graph with real (idle) workers.
Invariant: the controller took what was sent: otherwise its memory says nothing.
Source: resident set as proc(5) counts it, once in SAMPLE_S.
"""

import asyncio
import contextlib
import multiprocessing
import random
import re
import time
from collections.abc import Callable

import aiohttp
import uvloop

from dynamo_poa.bench.processes import cpu_s, resident_bytes
from dynamo_poa.bench.replay import RawPublisher, pub_lines
from dynamo_poa.bench.report import Figure, MeasurementError, at_most, plain
from dynamo_poa.bench.traffic import Traffic
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.serve.target import ask
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Role

WORKERS = 16
BLOCKS = 8192  # of each worker's cache: full after half a minute, evicting from then on
RATE_PER_S = 5_000
BATCHES_PER_S = 20  # of decisions, among those messages
REQUESTS_PER_BATCH = 5
SLICE_S = 0.01
SAMPLE_S = 2.0
LEAST_SHARE = 0.95  # of the messages sent that the controller must have taken
MB = 1e6
GOAL_MB = 200.0
FLAT_MB = 5.0  # growth over the second half that still counts as flat
FILLED_S = 60.0  # by then caches and windows are full: a second half that begins before is not judged

OVERRIDES = (
    "Frontend.http_port=0",
    f"Worker.workers={WORKERS}",
    f"Worker.per_process={WORKERS}",
    f"Worker.args={{num-gpu-blocks-override: {BLOCKS}}}",
    f"PoaRouter.min_decode_workers={WORKERS}",
)


def measure(minutes: float, say: Callable[[str], None]) -> Figure:
    """Flood a controller for so many minutes.

    Raises:  MeasurementError when it did not take what was sent, or was restarted.
    """
    result: Figure = uvloop.run(_measure(minutes, say))
    return result


async def _measure(minutes: float, say: Callable[[str], None]) -> Figure:
    clock = SystemClock()
    plan = make_plan("graphs.agg_poa:Frontend", "graphs/agg_poa.yaml", OVERRIDES)
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    async with (
        serve_graph(plan, clock=clock) as running,
        Bus(running.nats_url, name="bench-memory", clock=clock) as bus,
    ):
        await bus.wait_connected(10.0)
        workers = await _worker_ids(running, clock)
        controller = running.process("controller")
        pid = controller.pid
        assert pid is not None
        before = await ask(bus, plan.namespace, {"op": "status"})
        sender = multiprocessing.get_context("spawn").Process(
            target=_flood, args=(running.nats_url, common, workers, minutes * 60), daemon=True
        )
        sender.start()
        samples, cpu_before_s, started_s = list[tuple[float, float]](), cpu_s(pid), clock.monotonic_s()
        said_s = 0.0
        try:
            while sender.is_alive():
                if controller.pid != pid:
                    raise MeasurementError("the controller ended while it was being flooded")
                at_s = clock.monotonic_s() - started_s
                samples.append((at_s, resident_bytes(pid) / MB))
                if at_s - said_s >= 30:
                    said_s = at_s
                    say(f"{at_s:.0f} s: {samples[-1][1]:.1f} MB")
                await clock.sleep(SAMPLE_S)
            cpu_frac = (cpu_s(pid) - cpu_before_s) / (clock.monotonic_s() - started_s)
            after = await ask(bus, plan.namespace, {"op": "status"})
        finally:
            sender.terminate()
            sender.join()
    return figure(samples, before, after, cpu_frac)


def figure(
    samples: list[tuple[float, float]], before: TelemetryRecord, after: TelemetryRecord, cpu_frac: float
) -> Figure:
    """Turn (seconds, MB) samples and the controller's own counts into the figure.

    Raises:  MeasurementError when messages did not arrive.
    """
    span_s = samples[-1][0] - samples[0][0]
    taken = sum(after.messages_received.values()) - sum(before.messages_received.values())
    rate = taken / span_s
    lost = {
        reason: count - before.messages_dropped.get(reason, 0)
        for reason, count in after.messages_dropped.items()
        if count > before.messages_dropped.get(reason, 0)
    }
    if rate < LEAST_SHARE * RATE_PER_S or sum(lost.values()) > (1 - LEAST_SHARE) * taken:
        raise MeasurementError(
            f"the controller took {rate:,.0f} messages/s of {RATE_PER_S:,}, dropped {lost or 'none'}"
        )
    second_half = [(at_s, mb) for at_s, mb in samples if at_s >= samples[0][0] + span_s / 2]
    growth_mb = slope(second_half) * span_s / 2
    growth = "growth_mb", "trend over the second half", growth_mb, "MB"
    return Figure(
        name="memory",
        title=f"controller's memory at {RATE_PER_S:,} messages/s, {WORKERS} workers",
        measures=(
            plain("start_mb", "resident at the start", samples[0][1], "MB"),
            at_most("end_mb", "at the end", samples[-1][1], "MB", GOAL_MB),
            at_most("most_mb", "at most", max(mb for _, mb in samples), "MB", GOAL_MB),
            at_most(*growth, FLAT_MB) if span_s / 2 >= FILLED_S - SAMPLE_S else plain(*growth),
            plain("slope_mb_per_min", "trend per minute", slope(second_half) * 60, "MB/min"),
            plain("seconds", "seconds", span_s, "s"),
            plain("rate", "messages taken", rate, "/s"),
            plain("cpu_frac", "CPU of the controller", cpu_frac * 100, "% of a core"),
        ),
        conditions=(
            f"each worker's cache of {BLOCKS:,} blocks fills and then evicts; "
            f"{BATCHES_PER_S * REQUESTS_PER_BATCH} requests/s of decisions with {WORKERS} candidates",
            f"dropped: {lost or 'none'}",
        ),
    )


def slope(samples: list[tuple[float, float]]) -> float:
    """Return the least-squares trend per second."""
    mean_at = sum(at for at, _ in samples) / len(samples)
    mean_value = sum(value for _, value in samples) / len(samples)
    spread = sum((at - mean_at) ** 2 for at, _ in samples)
    together = sum((at - mean_at) * (value - mean_value) for at, value in samples)
    return together / spread if spread else 0.0


async def _worker_ids(running: Running, clock: SystemClock) -> list[int]:
    """Return the workers the controller knows, from its own metrics."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            text = ""
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(running.metrics_urls["controller"]) as answer:
                    text = await answer.text()
            found = {int(one) for one in re.findall(r'poa_worker_stale\{[^}]*worker_id="(\d+)"', text)}
            if len(found) == WORKERS:
                return sorted(found)
            await clock.sleep(0.25)


def _flood(url: str, common: CommonConfig, workers: list[int], seconds: float) -> None:
    """Send RATE_PER_S messages a second, evenly."""
    rng = random.Random(1)
    traffic = Traffic({Role.AGGREGATED: workers}, common, blocks=BLOCKS, rng=rng)
    publisher = RawPublisher(url)
    started_s, sent, batches = time.perf_counter(), 0, 0
    while (at_s := time.perf_counter() - started_s) < seconds:
        wall_s, messages = time.time(), []
        if batches < at_s * BATCHES_PER_S:
            batches += 1
            messages.append(traffic.decision_batch(REQUESTS_PER_BATCH, wall_s))
        due = min(int(at_s * RATE_PER_S) - sent, RATE_PER_S)  # after a stall not everything at once
        messages += [traffic.any_message(wall_s) for _ in range(due - len(messages))]
        sent += len(messages)
        publisher.send(pub_lines(messages))
        time.sleep(SLICE_S)
    publisher.flush()
