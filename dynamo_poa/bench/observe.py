"""What watching costs: the controller's processor time beside a live graph.

Owns: the graph, the open loop that drives it, the figure.
Does not own: serving (serve/), the client (load.py), reading processor time (processes.py).
Invariant: the controller is the served one with its defaults; void when the asked rate was not served.
"""

import asyncio
import random
from collections.abc import Callable
from urllib.parse import urlsplit

import uvloop

from dynamo_poa.bench.load import LoadClient, Result, prompts
from dynamo_poa.bench.processes import cpu_s
from dynamo_poa.bench.report import Figure, MeasurementError, at_most, plain
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph

WORKERS = 8
RATE = 100.0  # requests/s
WARM_UP_S = 8.0
LEAST_FRAC = 0.9  # of the asked rate
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=4",
    "PrefillWorker.per_process=4",
    "DecodeWorker.workers=4",
    "DecodeWorker.per_process=4",
    "PoaRouter.min_prefill_workers=4",
    "PoaRouter.min_decode_workers=4",
)


def measure(duration_s: float, say: Callable[[str], None]) -> Figure:
    """Watch the controller for so long.

    Raises:  MeasurementError when the rate was not served.
    """
    result: Figure = uvloop.run(_measure(duration_s, say))
    return result


async def _measure(duration_s: float, say: Callable[[str], None]) -> Figure:
    clock, results = SystemClock(), list[Result]()
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", OVERRIDES)
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    async with serve_graph(plan, clock=clock) as running:
        port = urlsplit(running.http_url).port or 80
        client = LoadClient("127.0.0.1", port, common.model_name, clock=clock)
        driving = asyncio.create_task(_drive(client, results, clock), name="open loop")
        try:
            await clock.sleep(WARM_UP_S)
            say(f"{len(results)} requests served, watching for {duration_s:.0f} s")
            served, spent_s, since_s = len(results), _controller_cpu_s(running), clock.monotonic_s()
            await clock.sleep(duration_s)
            elapsed_s = clock.monotonic_s() - since_s
            served, spent_s = len(results) - served, _controller_cpu_s(running) - spent_s
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
    return figure(spent_s / elapsed_s, served / elapsed_s, [result for result in results if not result.ok])


def figure(core_frac: float, rate: float, failed: list[Result]) -> Figure:
    """Turn what was seen into the figure.

    Raises:  MeasurementError when the rate was not served.
    """
    if rate < LEAST_FRAC * RATE:
        raise MeasurementError(f"load = {rate:.0f} requests/s: must be >= {LEAST_FRAC * RATE:g} to tell")
    return Figure(
        name="observe",
        title=f"the controller beside {WORKERS} workers and {RATE:g} requests a second",
        measures=(
            at_most("core_percent", "of one core", core_frac * 100, "%", 10),
            plain("rate", "load served", rate, "requests/s"),
            at_most("failed", "failed requests", len(failed), "", 0),
        ),
        conditions=("4 prefill and 4 decode mock workers, 128 tokens in, 8 out, Poisson arrivals",),
    )


async def _drive(client: LoadClient, results: list[Result], clock: Clock) -> None:
    """Send requests at random instants until cancelled, whatever becomes of those before."""
    rng, due_s = random.Random(1), clock.monotonic_s()

    async with asyncio.TaskGroup() as requests:
        for prompt in prompts(prompt_tokens=128, max_tokens=8, templates=5, shared_frac=0.25, seed=1):
            due_s += rng.expovariate(RATE)
            await clock.sleep(max(due_s - clock.monotonic_s(), 0.0))
            requests.create_task(client.complete(prompt)).add_done_callback(
                lambda done: None if done.cancelled() else results.append(done.result())
            )


def _controller_cpu_s(running: Running) -> float:
    pid = running.process("controller").pid
    if pid is None:
        raise MeasurementError("the controller is not running")
    return cpu_s(pid)
