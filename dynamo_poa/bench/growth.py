"""Whether a router process grows with the requests it has served over the relay.

Owns: the graph, load by count instead of time, when the process is looked at, the goals, the figure.
Does not own: the load client (load.py), what the kernel counts (processes.py).
Invariant: what is judged are requests that were all served, all over the relay, by one process.
Source: issue 4: no growth after 100,000 requests. The same prompts come again: of ever new ones Dynamo's own
        trees keep the empty nodes until it sweeps them, every 5 minutes (host: kv-router/cleanup.rs).
        Measured, on `stream` as on the relay: 1 kB a request of 32 tokens, all of it given back at the sweep.
        The decode leg makes nodes whatever the prompt: both legs are judged by the soak.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts, take
from dynamo_poa.bench.processes import resident_bytes, sockets
from dynamo_poa.bench.report import Figure, MeasurementError, at_most, plain
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph

USERS = 32
PROMPT_TOKENS = 32
OUT_TOKENS = 2
PROMPTS = 64  # that are sent again and again
BLOCKS = 512  # of each worker's cache: all prompts fit
WARM_UP = 1_000  # requests: by then every connection that is kept is there
SETTLE_S = 12.0  # without load: longer than an answer's connection lingers
SAMPLE_S = 0.25
MARKS = (0.2, 0.6, 1.0)  # of the requests; growth is judged from the first to the last
JUDGED = 100_000  # fewer do not tell growth from an allocator that is still filling
FLAT_MB = 5.0
FLAT = 4  # sockets and tasks beyond those at first that still count as none
MB = 1e6

ENGINE = f"{{speedup-ratio: 1000, num-gpu-blocks-override: {BLOCKS}}}"
OVERRIDES = (
    "Frontend.http_port=0",
    "Worker.workers=2",
    "Worker.per_process=2",
    f"Worker.args={ENGINE}",
    "PoaRouter.legs=[aggregated]",
    "PoaRouter.min_decode_workers=2",
    "PoaRouter.data_path=relay",
)


class Idle(NamedTuple):
    """A router process without load; `relayed`: requests it has taken over the relay since its start."""

    sockets: int
    tasks: int
    in_flight: int
    relayed: int


class Look(NamedTuple):
    """A router process under load: after how many requests and seconds, and its memory."""

    requests: int
    at_s: float
    mb: float


def measure(requests: int, say: Callable[[str], None]) -> Figure:
    """Send so many requests.

    Raises:  MeasurementError when some failed, or the process was restarted.
    """
    result: Figure = uvloop.run(_measure(requests, say))
    return result


async def _measure(requests: int, say: Callable[[str], None]) -> Figure:
    clock = SystemClock()
    plan = make_plan("dynamo_poa.bench.hop_agg_graph:Frontend", None, OVERRIDES)
    async with serve_graph(plan, clock=clock) as running, aiohttp.ClientSession() as http:
        router = running.process("router")
        pid = router.pid
        assert pid is not None
        url, looks = running.metrics_urls["router"], list[Look]()
        await _load(running, WARM_UP, lambda done: None, clock)
        await clock.sleep(SETTLE_S)
        before, started_s = await _idle(http, url, pid), clock.monotonic_s()

        def look(done: int) -> None:
            if done >= MARKS[len(looks)] * requests:
                looks.append(Look(done, clock.monotonic_s() - started_s, resident_bytes(pid) / MB))
                say("{:,} requests in {:.0f} s: {:.1f} MB".format(*looks[-1]))

        await _load(running, requests, look, clock)
        await clock.sleep(SETTLE_S)
        after = await _idle(http, url, pid)
        if router.pid != pid:
            raise MeasurementError("the router ended meanwhile")
    return figure(before, looks, after)


def figure(before: Idle, looks: Sequence[Look], after: Idle) -> Figure:
    """Turn a look at each mark, and the process without load before and after, into the figure.

    Raises:  MeasurementError when requests did not go over the relay.
    """
    first, last = looks[0], looks[-1]
    relayed = after.relayed - before.relayed
    if relayed != last.requests:
        raise MeasurementError(f"{relayed:,} requests went over the relay, not all of {last.requests:,}")
    growth = "growth_mb", f"from {first.requests:,} to {last.requests:,}", last.mb - first.mb, "MB"
    return Figure(
        name="growth",
        title=f"a router's memory, sockets and tasks over {last.requests:,} requests by relay",
        measures=(
            *(plain(f"mb_{n}", f"memory at {at.requests:,}", at.mb, "MB") for n, at in enumerate(looks)),
            at_most(*growth, FLAT_MB) if last.requests >= JUDGED else plain(*growth),
            at_most("sockets", f"sockets, {before.sockets} before", after.sockets, "", before.sockets + FLAT),
            at_most("tasks", f"tasks, {before.tasks} before", after.tasks, "", before.tasks + FLAT),
            at_most("in_flight", "in flight afterwards", after.in_flight, "", 0),
            plain("rps", "requests", last.requests / last.at_s, "/s"),
        ),
        conditions=(
            f"{PROMPT_TOKENS} tokens in, {OUT_TOKENS} out, {USERS} users; 2 aggregated workers",
            f"{PROMPTS} prompts again and again: new ones fill Dynamo's own trees until it sweeps them",
            f"sockets and tasks are those without load, before: after {WARM_UP:,} requests",
        ),
    )


async def _load(running: Running, requests: int, look: Callable[[int], None], clock: SystemClock) -> None:
    """Send so many requests or a few more, and wait for their end; `look` is told how many have ended.

    Raises:  MeasurementError when some failed.
    """
    common = running.plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    client = LoadClient("127.0.0.1", urlsplit(running.http_url).port or 80, common.model_name, clock=clock)
    source = prompts(prompt_tokens=PROMPT_TOKENS, max_tokens=OUT_TOKENS, templates=0, shared_frac=0, seed=1)
    done, failed = 0, list[Result]()

    def ended(result: Result) -> None:
        nonlocal done
        done += 1
        if not result.ok:
            failed.append(result)

    users = ClosedLoop(client, itertools.cycle(take(source, PROMPTS)), ended, clock)
    users.resize(USERS)
    while done < requests - USERS and not failed:  # each user's last one comes on top
        await clock.sleep(SAMPLE_S)
        if done < requests:
            look(done)
    await users.finish()
    if failed:
        raise MeasurementError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    look(done)


async def _idle(http: aiohttp.ClientSession, url: str, pid: int) -> Idle:
    """Look at a router process without load."""
    async with http.get(url) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    counts = Counter[str]()
    for family in families:
        for sample in family.samples:
            counts[sample.name] += round(sample.value)
    return Idle(
        sockets=len(sockets(pid)),
        tasks=counts["poa_router_tasks"],
        in_flight=counts["poa_router_in_flight_requests"],
        relayed=counts["poa_router_relay_requests_total"],
    )
