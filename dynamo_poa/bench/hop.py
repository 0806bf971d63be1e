"""What the plugin's hop costs beside Dynamo's own frontend on the same workers.

Owns: the variants that are compared, how turns alternate, what is counted, the figure.
Does not own: serving (serve/), the load client (load.py).
Invariant: like is compared with like: a variant's yardstick hands the KV cache over in the same way, has the
           same workers, the same prompts and the same place in time, turn by turn.
Source: CPU of processes as proc(5) counts it. At `cpu-bound` the workers are faster than the machine, on
        purpose: there every microsecond of the hop shows as lost throughput. At `engine-bound` the mock
        engine takes the time of the GPU it simulates, and the hop shows as latency while it keeps up.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.processes import busy_frac, cpu_s, machine_time
from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_least, plain
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph

CONCURRENCY = 128
PROMPT_TOKENS = 128
OUT_TOKENS = 64
SHORT_OUT_TOKENS = 16  # a second point, to tell the cost of a request from that of a token
WARM_UP_S = 2.0
GOAL_PREFILL = 0.95
WORKERS = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=1",
    "DecodeWorker.workers=5",
    "DecodeWorker.per_process=5",
)
KV_ROUTING = "Frontend.args={router-mode: kv}"  # of legs the frontend routes itself
NATIVE = "dynamo_poa.bench.native_graph:Frontend"
PLUGIN = "dynamo_poa.bench.hop_graph:Frontend"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """An operating point: how much faster than the GPU it simulates the mock engine runs."""

    name: str
    speedup: float
    costs: bool = False  # also measure what a request and a token cost the router


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A set of legs through the plugin, how its yardstick and it hand over, what the plugin's graph needs."""

    legs: str
    handover: str
    plugin: tuple[str, ...]
    goal: float | None = None

    @property
    def key(self) -> str:
        """Return the legs as part of a key."""
        return self.legs.strip("[]").replace(", ", "_")


POINTS = (
    Point(name="cpu-bound", speedup=10, costs=True),
    Point(name="engine-bound", speedup=1),
)
PAIRS = (
    Pair(legs="[prefill]", handover="sequential", plugin=(KV_ROUTING,), goal=GOAL_PREFILL),
    Pair(legs="[prefill, decode]", handover="bootstrap", plugin=("PoaRouter.min_decode_workers=5",)),
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of load on one graph, from after its warm-up on. CPU in seconds by process."""

    seconds: float
    requests: int
    failed: int
    ttft_p50_s: float
    cpu_s: dict[str, float]
    machine_busy_frac: float
    client_cpu_s: float
    idle_graph_cpu_s: float
    others_cpu_s: float  # whatever else this machine did meanwhile

    @property
    def rps(self) -> float:
        """Return completed requests a second."""
        return self.requests / self.seconds

    def us_per_request(self, *names: str) -> float:
        """Return processor time of some processes per completed request."""
        return sum(self.cpu_s.get(name, 0.0) for name in names) / self.requests * 1e6


class Comparison(NamedTuple):
    """Turns of the native graph and of the plugin's, side by side; `short`: the plugin's, short answers."""

    native: list[Turn]
    plugin: list[Turn]
    short: list[Turn]


def measure(repeats: int, turn_s: float, say: Callable[[str], None]) -> Figure:
    """Compare every pair at every point, in so many alternating turns of so many seconds each.

    Raises:  MeasurementError when requests failed.
    """
    found = {}
    for point in POINTS:
        for pair in PAIRS:
            say(f"{point.name}, {pair.legs}: starting both graphs")
            found[point.name, pair.legs] = uvloop.run(_compare(point, pair, repeats, turn_s, say))
    return figure(found)


async def _compare(
    point: Point, pair: Pair, repeats: int, turn_s: float, say: Callable[[str], None]
) -> Comparison:
    engine = f"{{speedup-ratio: {point.speedup}, num-gpu-blocks-override: 16384}}"
    both = (
        *WORKERS,
        f"PrefillWorker.args={engine}",
        f"DecodeWorker.args={engine}",
        f"Common.handover={pair.handover}",
    )
    found = Comparison([], [], [])
    async with AsyncExitStack() as stack:
        native = await _start(stack, NATIVE, (*both, KV_ROUTING))
        plugin = await _start(stack, PLUGIN, (*both, f"PoaRouter.legs={pair.legs}", *pair.plugin))
        for number in range(repeats):
            found.native.append(await _turn(native, plugin, OUT_TOKENS, turn_s, number))
            found.plugin.append(await _turn(plugin, native, OUT_TOKENS, turn_s, number))
            say(
                f"{number + 1} of {repeats}: native {found.native[-1].rps:.0f} requests/s, "
                f"plugin {found.plugin[-1].rps:.0f}"
            )
        for number in range((repeats + 1) // 2 if point.costs else 0):
            found.short.append(await _turn(plugin, native, SHORT_OUT_TOKENS, turn_s, number))
    return found


async def _start(stack: AsyncExitStack, target: str, overrides: tuple[str, ...]) -> Running:
    return await stack.enter_async_context(serve_graph(make_plan(target, None, overrides)))


async def _turn(graph: Running, idle: Running, out_tokens: int, turn_s: float, seed: int) -> Turn:
    clock, results = SystemClock(), list[Result]()
    common = graph.plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    port = urlsplit(graph.http_url).port or 80
    client = LoadClient("127.0.0.1", port, common.model_name, clock=clock)
    source = prompts(
        prompt_tokens=PROMPT_TOKENS, max_tokens=out_tokens, templates=5, shared_frac=0.25, seed=seed
    )
    users = ClosedLoop(client, source, results.append, clock)
    users.resize(CONCURRENCY)
    await clock.sleep(WARM_UP_S)
    done_before, before, idle_before = len(results), _cpu_by_process(graph), _cpu_by_process(idle)
    machine_before, own_before_s = machine_time(), time.process_time()
    started_s = clock.monotonic_s()
    await clock.sleep(turn_s)
    seconds = clock.monotonic_s() - started_s
    done, after, idle_after = results[done_before:], _cpu_by_process(graph), _cpu_by_process(idle)
    own_after_s, machine_after = time.process_time(), machine_time()
    await users.finish()
    await asyncio.sleep(0.5)  # what the turn has left behind, bookings and events, is over
    good = [result for result in done if result.ok]
    ttfts_s = [result.ttft_s for result in good if result.ttft_s is not None]
    if not ttfts_s:
        errors = sorted({result.error for result in results if not result.ok})
        raise MeasurementError(f"{graph.plan.target}: no request succeeded in {seconds:.0f} s: {errors[:3]}")
    spent_s = {name: after[name] - before[name] for name in after}
    idle_s, own_s = sum(idle_after.values()) - sum(idle_before.values()), own_after_s - own_before_s
    busy_s = machine_after.busy_s - machine_before.busy_s
    return Turn(
        seconds=seconds,
        requests=len(good),
        failed=len([result for result in results if not result.ok]),
        ttft_p50_s=statistics.median(ttfts_s),
        cpu_s=spent_s,
        machine_busy_frac=busy_frac(machine_before, machine_after),
        client_cpu_s=own_s,
        idle_graph_cpu_s=idle_s,
        others_cpu_s=busy_s - sum(spent_s.values()) - idle_s - own_s,
    )


def _cpu_by_process(graph: Running) -> dict[str, float]:
    found = {}
    for process in graph.plan.processes:
        pid = graph.process(process.name).pid
        if pid is None:
            raise MeasurementError(f"{graph.plan.target}: {process.name} is down")
        found[process.name] = cpu_s(pid)
    return found


def figure(found: dict[tuple[str, str], Comparison]) -> Figure:
    """Turn the comparisons, by point and legs, into the figure.

    Raises:  MeasurementError when requests failed.
    """
    failed = sum(turn.failed for one in found.values() for turns in one for turn in turns)
    if failed:
        raise MeasurementError(f"{failed} requests failed: must be 0 to compare")
    measures, conditions = list[Measure](), list[str]()
    for point in POINTS:
        here = [(pair, found[point.name, pair.legs]) for pair in PAIRS]
        for pair, one in here:
            measures += _ratios(point, pair, one)
            if point.costs:
                measures += _costs(pair, one)
        native = [turn for _, one in here for turn in one.native]
        conditions.append(
            f"{point.name}: engine at {point.speedup:g} x its GPU's speed; while native serves the machine "
            f"is {_median(t.machine_busy_frac for t in native):.0%} busy; load client "
            f"{_median(t.client_cpu_s / t.seconds for t in native):.2f} cores, the graph that waits "
            f"{_median(t.idle_graph_cpu_s / t.seconds for t in native):.2f}, what else this machine does "
            f"{_median(t.others_cpu_s / t.seconds for t in native):.2f}"
        )
    turns = len(next(iter(found.values())).native)
    return Figure(
        name="hop",
        title=f"the hop beside the native frontend, {CONCURRENCY} users, 1 prefill and 5 decode workers",
        measures=tuple(measures),
        conditions=(
            f"{PROMPT_TOKENS} tokens in, {OUT_TOKENS} out; native and plugin by turns, medians of {turns}; "
            "ratios are of neighbouring turns; native hands over in the same way",
            "no controller; the frontend routes in KV mode what does not go through the plugin",
            *conditions,
            f"cost of a request and of a token: from answers of {SHORT_OUT_TOKENS} and {OUT_TOKENS} tokens",
        ),
    )


def _ratios(point: Point, pair: Pair, one: Comparison) -> list[Measure]:
    key, what = f"{pair.key}_{point.name.replace('-', '_')}", f"{point.name}, {pair.legs}: "
    together = list(zip(one.native, one.plugin, strict=True))
    throughput = _median(plugin.rps / native.rps for native, plugin in together)
    ttft = _median(plugin.ttft_p50_s / native.ttft_p50_s for native, plugin in together)
    ratio = f"{key}_throughput_ratio", f"{what}throughput, of native", throughput, "x"
    measures = [
        plain(*ratio) if pair.goal is None else at_least(*ratio, pair.goal),
        plain(f"{key}_ttft_p50_ratio", f"{what}TTFT P50, of native", ttft, "x"),
    ]
    for side, turns in (("native", one.native), ("plugin", one.plugin)):
        rps, ttft_ms = _median(t.rps for t in turns), _median(t.ttft_p50_s for t in turns) * 1e3
        measures.append(plain(f"{key}_{side}_rps", f"{what}{side}", rps, "requests/s"))
        measures.append(plain(f"{key}_{side}_ttft_p50_ms", f"{what}TTFT P50, {side}", ttft_ms, "ms"))
    router = _median(turn.cpu_s["router"] / turn.seconds for turn in one.plugin)
    measures.append(plain(f"{key}_router_cores", f"{what}CPU of the router process", router, "cores"))
    return measures


def _costs(pair: Pair, one: Comparison) -> list[Measure]:
    """Tell a request's cost from a token's.

    per token   = (router CPU of a long request - of a short one) / difference in tokens
    per request = router CPU of a short request - its tokens * per token
    """
    long_us = _median(turn.us_per_request("router") for turn in one.plugin)
    short_us = _median(turn.us_per_request("router") for turn in one.short)
    per_token_us = (long_us - short_us) / (OUT_TOKENS - SHORT_OUT_TOKENS)
    per_request_us = short_us - SHORT_OUT_TOKENS * per_token_us
    key, what = pair.key, f"{pair.legs}: "
    frontend = f"frontend CPU for {OUT_TOKENS} tokens"
    return [
        plain(f"{key}_us_per_request", f"{what}router CPU per request", per_request_us, "µs"),
        plain(f"{key}_us_per_token", f"{what}router CPU per token", per_token_us, "µs"),
        plain(f"{key}_us_in_all", f"{what}router CPU for {OUT_TOKENS} tokens", long_us, "µs"),
        plain(
            f"{key}_frontend_us",
            f"{what}{frontend}",
            _median(turn.us_per_request("frontend") for turn in one.plugin),
            "µs",
        ),
        plain(
            f"{key}_native_frontend_us",
            f"{what}{frontend}, native",
            _median(turn.us_per_request("frontend") for turn in one.native),
            "µs",
        ),
    ]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
