"""How much load the bench's own client can make on one core before it is late itself.

Owns: the rate it is asked for, what counts as late, the figure.
Does not own: the client (suites/live_client.py), the server it talks to (answers_server.py).
Invariant: the client has one core and shares it with nothing of ours; the server has the others.
Source: goals: issue 5.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop

from dynamo_poa.bench.load import LoadClient
from dynamo_poa.bench.report import Figure, MeasurementError, at_least, at_most, plain
from dynamo_poa.bench.story import quantile
from dynamo_poa.bench.suites.live_client import Asked, LiveClient
from dynamo_poa.clock import SystemClock
from dynamo_poa.workloads.arrivals import Poisson
from dynamo_poa.workloads.synthetic import Paper

RATE_RPS = 330.0  # so that chance does not take it below the goal
CHUNKS = 33
INTERVAL_S = 0.01
GOAL_RPS, GOAL_CHUNKS_PER_S, GOAL_LAG_MS = 300.0, 10_000.0, 20.0
WARM_UP_S = 2.0
START_S = 10.0


def measure(seconds: float, say: Callable[[str], None]) -> Figure:
    """Load a server that answers at once for so many seconds.

    Raises:  MeasurementError when a request failed.
    """
    say(f"{RATE_RPS:g} requests/s for {WARM_UP_S + seconds:g} s")
    figure: Figure = uvloop.run(_measure(seconds))
    return figure


async def _measure(seconds: float) -> Figure:
    clock, asked = SystemClock(), list[Asked]()
    cores = sorted(os.sched_getaffinity(0))
    async with _server(cores[1:] or cores) as port:
        http = LoadClient("127.0.0.1", port, "mock", clock=clock, ask_workers=True)
        client = LiveClient([http], Paper(), 1, 16, asked.append, clock)
        with _pinned(cores[0]):
            await client.load(Poisson(rate_rps=RATE_RPS))
            await clock.sleep(WARM_UP_S)
            began_s, cpu_before_s, tokens_before = clock.monotonic_s(), time.process_time(), client.tokens
            await clock.sleep(seconds)
            ended_s, cpu_after_s, tokens_after = clock.monotonic_s(), time.process_time(), client.tokens
            await client.finish(10.0)
    elapsed_s = ended_s - began_s
    due = [one for one in asked if began_s <= one.due_at_s < ended_s]
    failed = [one for one in due if not one.result.ok or one.result.tokens != CHUNKS]
    if failed or not due:
        raise MeasurementError(f"{len(failed)} of {len(due)} requests failed: {failed[:1]}")
    lags_s = [one.sent_at_s - one.due_at_s for one in due]
    ttfts_s = [one.result.ttft_s for one in due if one.result.ttft_s is not None]
    return Figure(
        name="client",
        title="what the bench's own client sustains on one core, open loop",
        measures=(
            at_least("client_rps", "requests", len(due) / elapsed_s, "requests/s", GOAL_RPS),
            at_least(
                "client_chunks_per_s",
                "chunks read",
                (tokens_after - tokens_before) / elapsed_s,
                "chunks/s",
                GOAL_CHUNKS_PER_S,
            ),
            at_most("client_lag_p99_ms", "sent late, P99", quantile(lags_s, 0.99) * 1e3, "ms", GOAL_LAG_MS),
            at_most("client_lag_max_ms", "sent late, worst", max(lags_s) * 1e3, "ms", GOAL_LAG_MS),
            plain(
                "client_ttft_p99_ms", "TTFT of a server without any, P99", quantile(ttfts_s, 0.99) * 1e3, "ms"
            ),
            plain("client_cores", "CPU of the client", (cpu_after_s - cpu_before_s) / elapsed_s, "cores"),
        ),
        conditions=(
            f"Poisson, {RATE_RPS:g} requests/s of 128 tokens in and {CHUNKS} chunks out, a connection each; "
            f"chunks {INTERVAL_S * 1e3:g} ms apart; {elapsed_s:.0f} s after {WARM_UP_S:g} s of warm-up",
            "the client is pinned to one core, the server, a process of its own, to the others",
        ),
    )


@asynccontextmanager
async def _server(cores: list[int]) -> AsyncIterator[int]:
    """Serve answers in a process of its own while the block lasts; yields its port."""
    command = (sys.executable, "-m", "dynamo_poa.bench.answers_server", str(CHUNKS), str(INTERVAL_S))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        try:
            port = int(await asyncio.wait_for(process.stdout.readline(), START_S))
        except (TimeoutError, ValueError) as error:
            raise MeasurementError("the server of answers did not start") from error
        os.sched_setaffinity(process.pid, cores)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Keep this thread on one core while the block lasts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
