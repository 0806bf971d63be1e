"""How long from the controller's decision until the first request routed with it.

Owns: the swaps, the load meanwhile, the figure.
Does not own: serving (serve/), the load client (load.py), telling decision from first use (story.SwapWatch).
Invariant: a swap no request was routed with in time makes the measurement void: it has no latency.
Source: `issued_at_s` of the record against `at_s` of the first Chosen event with its revision, both on this
        machine's clock.
"""

import asyncio
import random
import statistics
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import uvloop

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.report import Figure, MeasurementError, at_least, at_most, plain
from dynamo_poa.bench.story import SwapWatch
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.serve.target import ask
from dynamo_poa.wire import DecisionBatch, Heartbeat, subject

SETTINGS = ((0.7, 0.3), (0.0, 1.0))  # (τ, ω), in turn
PAUSE_S = (0.3, 0.7)  # between swaps, drawn evenly: requests must not fall in step with ticks
CONCURRENCY = 16
UNSEEN_S = 5.0
WARM_UP_S = 3.0
LEAST_RPS = 60.0  # below this the wait for the next request would be what is measured

OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=2",
    "PrefillWorker.per_process=2",
    "PrefillWorker.args={speedup-ratio: 2.0}",
    "DecodeWorker.workers=3",
    "DecodeWorker.per_process=3",
    "DecodeWorker.args={speedup-ratio: 2.0}",
    "PoaRouter.min_prefill_workers=2",
    "PoaRouter.min_decode_workers=3",
)


def measure(swaps: int, say: Callable[[str], None]) -> Figure:
    """Swap so many times under load.

    Raises:  MeasurementError when a swap was never seen, or the load was too low to tell.
    """
    result: Figure = uvloop.run(_measure(swaps, say))
    return result


async def _measure(swaps: int, say: Callable[[str], None]) -> Figure:
    clock, rng, results = SystemClock(), random.Random(1), list[Result]()
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", OVERRIDES)
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    async with (
        serve_graph(plan, clock=clock) as running,
        Bus(running.nats_url, name="bench-swap", clock=clock) as bus,
    ):
        watch = SwapWatch()
        watch_swaps(bus, plan.namespace, watch)
        await bus.wait_connected(10.0)
        port = urlsplit(running.http_url).port or 80
        client = LoadClient("127.0.0.1", port, common.model_name, clock=clock)
        source = prompts(prompt_tokens=128, max_tokens=8, templates=5, shared_frac=0.25, seed=1)
        users = ClosedLoop(client, source, results.append, clock)
        users.resize(CONCURRENCY)
        await clock.sleep(WARM_UP_S)
        before, started_at_s = len(watch.latencies_s()), clock.monotonic_s()
        for number in range(swaps):
            router_temperature, overlap_weight = SETTINGS[number % 2]
            await ask(
                bus,
                plan.namespace,
                {"op": "set", "router_temperature": router_temperature, "overlap_weight": overlap_weight},
            )
            await _seen(watch, before + number + 1, clock)
            if (number + 1) % 25 == 0:
                say(f"{number + 1} of {swaps} swaps")
            await clock.sleep(rng.uniform(*PAUSE_S))
        latencies_s = watch.latencies_s()[before:]
        rate = len([r for r in results if r.started_at_s >= started_at_s]) / (
            clock.monotonic_s() - started_at_s
        )
        await users.finish()
    return figure(latencies_s, results, rate)


def figure(latencies_s: list[float], results: list[Result], rate: float) -> Figure:
    """Turn what was seen into the figure.

    Raises:  MeasurementError when the load was too low.
    """
    if rate < LEAST_RPS:
        raise MeasurementError(f"load = {rate:.0f} requests/s: must be >= {LEAST_RPS:g} to tell")
    failures = [result.error for result in results if not result.ok]
    return Figure(
        name="swap",
        title="decision to first request routed with it, live graph of 2 prefill and 3 decode workers",
        measures=(
            at_most("median_ms", "median", statistics.median(latencies_s) * 1e3, "ms", 50),
            at_most("worst_ms", "worst", max(latencies_s) * 1e3, "ms", 1200),
            at_most("failed", "failed requests", len(failures), "", 0),
            plain("swaps", "swaps", len(latencies_s), ""),
            plain("requests", "requests", len(results), ""),
            at_least("rate", "load", rate, "requests/s", LEAST_RPS),
        ),
        conditions=(
            f"{CONCURRENCY} users, 128 tokens in, 8 out; two choices a request, so waiting for the next one "
            f"takes {500 / rate:.1f} ms of the median",
            *(f"failure: {error}" for error in sorted(set(failures))),
        ),
    )


def watch_swaps(bus: Bus, namespace: str, watch: SwapWatch) -> None:
    """Let a watch see every decision and every heartbeat of a graph."""
    batches, heartbeats = msgspec.msgpack.Decoder(DecisionBatch), msgspec.msgpack.Decoder(Heartbeat)
    bus.subscribe(subject(namespace, "decisions"), lambda _, data: watch.on_batch(batches.decode(data)))
    bus.subscribe(subject(namespace, "params"), lambda _, data: watch.on_heartbeat(heartbeats.decode(data)))


async def _seen(watch: SwapWatch, count: int, clock: SystemClock) -> None:
    """Wait until so many revisions have been routed with."""
    try:
        async with asyncio.timeout(UNSEEN_S):
            while len(watch.latencies_s()) < count:
                await clock.sleep(0.01)
    except TimeoutError:
        raise MeasurementError(f"no request was routed with a new revision within {UNSEEN_S:g} s") from None
