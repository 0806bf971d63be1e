"""What the plugin's hop costs on the stream path beside Dynamo's own frontend on the same workers.

Owns: the variants that are compared, how turns alternate, the figure.
Does not own: one turn and what is counted in it (turns.py), the relay's figures (relay.py).
Invariant: like is compared with like: a variant's yardstick hands the KV cache over in the same way, has the
           same workers, the same prompts and the same place in time, turn by turn.
Source: CPU of processes as proc(5) counts it. At `cpu-bound` the workers are faster than the machine, on
        purpose: there every microsecond of the hop shows as lost throughput. At `full-speed` the mock
        engine takes the time of the GPU it simulates, and the hop shows as latency while it keeps up.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec
import uvloop

from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_least, plain
from dynamo_poa.bench.turns import CONCURRENCY, OUT_TOKENS, PROMPT_TOKENS, Turn, median, start, take_turn

SHORT_OUT_TOKENS = 16  # a second point, to tell the cost of a request from that of a token
GOAL_PREFILL = 0.95
WORKERS = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=1",
    "DecodeWorker.workers=5",
    "DecodeWorker.per_process=5",
)
KV_ROUTING = "Frontend.args={router-mode: kv}"  # of legs the frontend routes itself
STREAM = ("PoaRouter.data_path=stream",)
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
    Point(name="full-speed", speedup=1),
)
PAIRS = (
    Pair(legs="[prefill]", handover="sequential", plugin=(KV_ROUTING,), goal=GOAL_PREFILL),
    Pair(legs="[prefill, decode]", handover="bootstrap", plugin=("PoaRouter.min_decode_workers=5",)),
)


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
        native = await start(stack, NATIVE, (*both, KV_ROUTING))
        plugin = await start(stack, PLUGIN, (*both, *STREAM, f"PoaRouter.legs={pair.legs}", *pair.plugin))
        for number in range(repeats):
            found.native.append(await take_turn(native, [plugin], OUT_TOKENS, turn_s, number))
            found.plugin.append(await take_turn(plugin, [native], OUT_TOKENS, turn_s, number))
            say(
                f"{number + 1} of {repeats}: native {found.native[-1].rps:.0f} requests/s, "
                f"plugin {found.plugin[-1].rps:.0f}"
            )
        for number in range((repeats + 1) // 2 if point.costs else 0):
            found.short.append(await take_turn(plugin, [native], SHORT_OUT_TOKENS, turn_s, number))
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
            f"is {median(t.machine_busy_frac for t in native):.0%} busy; load client "
            f"{median(t.client_cpu_s / t.seconds for t in native):.2f} cores, the graph that waits "
            f"{median(t.idle_graph_cpu_s / t.seconds for t in native):.2f}, what else this machine does "
            f"{median(t.others_cpu_s / t.seconds for t in native):.2f}"
        )
    turns = len(next(iter(found.values())).native)
    return Figure(
        name="hop",
        title=f"the hop by stream beside the native frontend, {CONCURRENCY} users, 1 prefill and 5 decode",
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
    throughput = median(plugin.rps / native.rps for native, plugin in together)
    ttft = median(plugin.ttft_p50_s / native.ttft_p50_s for native, plugin in together)
    ratio = f"{key}_throughput_ratio", f"{what}throughput, of native", throughput, "x"
    measures = [
        plain(*ratio) if pair.goal is None else at_least(*ratio, pair.goal),
        plain(f"{key}_ttft_p50_ratio", f"{what}TTFT P50, of native", ttft, "x"),
    ]
    for side, turns in (("native", one.native), ("plugin", one.plugin)):
        rps, ttft_ms = median(t.rps for t in turns), median(t.ttft_p50_s for t in turns) * 1e3
        measures.append(plain(f"{key}_{side}_rps", f"{what}{side}", rps, "requests/s"))
        measures.append(plain(f"{key}_{side}_ttft_p50_ms", f"{what}TTFT P50, {side}", ttft_ms, "ms"))
    router = median(turn.cpu_s["router"] / turn.seconds for turn in one.plugin)
    measures.append(plain(f"{key}_router_cores", f"{what}CPU of the router process", router, "cores"))
    return measures


def _costs(pair: Pair, one: Comparison) -> list[Measure]:
    """Tell a request's cost from a token's.

    per token   = (router CPU of a long request - of a short one) / difference in tokens
    per request = router CPU of a short request - its tokens * per token
    """
    long_us = median(turn.us_per_request("router") for turn in one.plugin)
    short_us = median(turn.us_per_request("router") for turn in one.short)
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
            median(turn.us_per_request("frontend") for turn in one.plugin),
            "µs",
        ),
        plain(
            f"{key}_native_frontend_us",
            f"{what}{frontend}, native",
            median(turn.us_per_request("frontend") for turn in one.native),
            "µs",
        ),
    ]
