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
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_least, at_most, plain
from dynamo_poa.bench.story import Story, SwapWatch
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.serve.target import ask
from dynamo_poa.wire import DecisionBatch, Heartbeat, subject

DATA_PATHS = ("relay", "stream")
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


class Swaps(NamedTuple):
    """What was seen on one data path: a latency for each swap, every request, requests a second."""

    latencies_s: list[float]
    results: list[Result]
    rate: float


def measure(swaps: int, say: Callable[[str], None]) -> Figure:
    """Swap so many times under load, on each data path.

    Raises:  MeasurementError when a swap was never seen, or the load was too low to tell.
    """
    return figure({path: uvloop.run(_measure(path, swaps, say)) for path in DATA_PATHS})


async def _measure(path: str, swaps: int, say: Callable[[str], None]) -> Swaps:
    clock, rng, results = SystemClock(), random.Random(1), list[Result]()
    overrides = (*OVERRIDES, f"PoaRouter.data_path={path}")
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", overrides)
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
                say(f"{path}: {number + 1} of {swaps} swaps")
            await clock.sleep(rng.uniform(*PAUSE_S))
        latencies_s = watch.latencies_s()[before:]
        rate = len([r for r in results if r.started_at_s >= started_at_s]) / (
            clock.monotonic_s() - started_at_s
        )
        await users.finish()
    return Swaps(latencies_s, results, rate)


def figure(found: dict[str, Swaps]) -> Figure:
    """Turn what was seen, by data path, into the figure.

    Raises:  MeasurementError when the load was too low.
    """
    measures, conditions = list[Measure](), list[str]()
    for path, one in found.items():
        if one.rate < LEAST_RPS:
            raise MeasurementError(f"load = {one.rate:.0f} requests/s: must be >= {LEAST_RPS:g} to tell")
        failures = [result.error for result in one.results if not result.ok]
        median_ms, worst_ms = statistics.median(one.latencies_s) * 1e3, max(one.latencies_s) * 1e3
        measures += [
            at_most(f"{path}_median_ms", f"{path}: median", median_ms, "ms", 50),
            at_most(f"{path}_worst_ms", f"{path}: worst", worst_ms, "ms", 1200),
            at_most(f"{path}_failed", f"{path}: failed requests", len(failures), "", 0),
            plain(f"{path}_swaps", f"{path}: swaps", len(one.latencies_s), ""),
            plain(f"{path}_requests", f"{path}: requests", len(one.results), ""),
            at_least(f"{path}_rate", f"{path}: load", one.rate, "requests/s", LEAST_RPS),
        ]
        conditions += [
            f"{path}: two choices a request, so waiting for the next one takes {500 / one.rate:.1f} ms of it",
            *(f"{path}: failure: {error}" for error in sorted(set(failures))),
        ]
    return Figure(
        name="swap",
        title="decision to first request routed with it, live graph of 2 prefill and 3 decode workers",
        measures=tuple(measures),
        conditions=(f"{CONCURRENCY} users, 128 tokens in, 8 out", *conditions),
    )


def watch_swaps(bus: Bus, namespace: str, watch: SwapWatch | Story) -> None:
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
