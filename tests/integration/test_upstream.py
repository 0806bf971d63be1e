"""A router that is short of processor time, live: slow answers of idle workers are not saturation (I8c)."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from live_graph import CLOCK, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.bench.load import Result, prompts
from dynamo_poa.values import Regime

pytestmark = pytest.mark.dynamo

FAST = "{speedup-ratio: 20, num-gpu-blocks-override: 4096}"
RATE = 12.0
STOPPED_S, RUNNING_S = 0.7, 0.14


async def test_a_throttled_router_is_no_saturation_of_the_workers() -> None:
    """Case I8(c): workers scheduled under 30 % of the time, TTFT over 5 x its start: told as `upstream`."""
    overrides = (
        "PrefillWorker.workers=2",
        "PrefillWorker.per_process=2",
        f"PrefillWorker.args={FAST}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        f"DecodeWorker.args={FAST}",
        "PoaController.tick_s=0.1",
        "PoaController.regime={confirm_s: 1, dwell_s: 1, window_s: 1.5, half_life_s: 0.3, min_samples: 10}",
    )
    async with live_graph("disagg", *overrides) as graph:
        calm: list[Result] = []
        async with arrivals(graph, calm):
            await graph.until(lambda record: record.baseline_s is not None, 20)
            assert graph.latest.bottleneck == ""
        slow: list[Result] = []
        seen = len(graph.telemetry)
        async with throttled(graph, "router"), arrivals(graph, slow):
            await graph.until(lambda record: record.bottleneck == "upstream", 15)
            throttled_from = len(graph.telemetry)
            await eventually(lambda: len(graph.telemetry) > throttled_from + 30)
            # at an instant the window may hold too few first tokens to tell
            await graph.metrics_until("controller", lambda seen: seen["poa_bottleneck_upstream"] == 1)
        records = graph.telemetry[seen:]
        assert Regime.SATURATED not in {record.regime for record in records}
        for record in graph.telemetry[throttled_from : throttled_from + 30]:
            assert all((pool.busy_frac or 0.0) < 0.3 for pool in record.pools.values())
        assert median_ttft_s(slow[len(slow) // 2 :]) > 5 * median_ttft_s(calm)
        await graph.until(lambda record: record.bottleneck == "" and record.regime is Regime.BELOW, 10)


def median_ttft_s(results: list[Result]) -> float:
    """Return the median of those that got a token; all must have."""
    assert [result.error for result in results if not result.ok] == []
    times_s = sorted(result.ttft_s for result in results if result.ttft_s is not None)
    return times_s[len(times_s) // 2]


@asynccontextmanager
async def arrivals(graph: LiveGraph, results: list[Result]) -> AsyncIterator[None]:
    """Send RATE requests a second while the block lasts; all have their results after it."""
    source = prompts(prompt_tokens=256, max_tokens=4, templates=0, shared_frac=0, seed=len(graph.telemetry))
    sent: list[asyncio.Task[Result]] = []

    async def send() -> None:
        started_s = CLOCK.monotonic_s()
        while True:
            sent.append(asyncio.create_task(graph.complete(next(source))))
            await asyncio.sleep(max(started_s + len(sent) / RATE - CLOCK.monotonic_s(), 0))

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        results += await asyncio.gather(*sent)


@asynccontextmanager
async def throttled(graph: LiveGraph, process: str) -> AsyncIterator[None]:
    """Let a process run for a share of the time only."""

    async def throttle() -> None:
        while True:
            await graph.running.kill(process, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            await graph.running.kill(process, signal.SIGCONT)
            await asyncio.sleep(RUNNING_S)

    task = asyncio.create_task(throttle())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await graph.running.kill(process, signal.SIGCONT)
