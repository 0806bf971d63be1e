"""What the relay costs beside Dynamo's own frontend on the same workers, and beside the stream path.

Owns: the topologies, how turns alternate, the goals, the figure.
Does not own: one turn and what is counted in it (turns.py), the stream path's own figure (hop.py).
Invariant: native, relay and stream have the same workers, the same prompts and the same place in time: each
           ratio is of turns that stand beside each other.
Source: goals: issue 4. At `cpu-bound` the workers are faster than the machine, and every microsecond of the
        hop shows as lost throughput, without a goal: such a run says nothing of a fleet. At `full-speed` the
        mock engine takes the time of the GPU it simulates, and with both legs on two cores the processors
        still have their say. At `engine-bound` it takes twice that: there the goals stand.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec
import uvloop

from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_least, at_most, plain
from dynamo_poa.bench.turns import CONCURRENCY, OUT_TOKENS, PROMPT_TOKENS, Turn, median, start, take_turn

LONG_OUT_TOKENS = 512
GOAL_TTFT = 1.15
GOAL_US_PER_TOKEN = 25.0
GOAL_LONG_US_PER_TOKEN = 12.0
KV_ROUTING = "Frontend.args={router-mode: kv}"  # natively the frontend itself routes, in the same way
ENGINE = "{{speedup-ratio: {speedup}, num-gpu-blocks-override: 16384}}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """An operating point: how much faster than the GPU it simulates the mock engine runs."""

    name: str
    speedup: float
    costs: bool = False  # also measure what a token of a long answer costs the router
    judged: bool = False  # the simulated GPUs are what limits, so that the ratios have goals


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A set of workers, the graphs without and with the plugin, and the throughput that is asked for."""

    name: str
    native: str
    plugin: str
    overrides: tuple[str, ...]
    engines: tuple[str, ...]  # whose workers run at the point's speed
    routed: tuple[str, ...]  # of the plugin's graph alone
    goal: float

    @property
    def key(self) -> str:
        """Return the name as part of a key."""
        return self.name.replace(" ", "_")


POINTS = (
    Point(name="cpu-bound", speedup=10, costs=True),
    Point(name="full-speed", speedup=1),
    Point(name="engine-bound", speedup=0.5, judged=True),
)
TOPOLOGIES = (
    Topology(
        name="aggregated",
        native="dynamo_poa.bench.native_agg_graph:Frontend",
        plugin="dynamo_poa.bench.hop_agg_graph:Frontend",
        overrides=("Worker.workers=5", "Worker.per_process=5"),
        engines=("Worker",),
        routed=("PoaRouter.legs=[aggregated]", "PoaRouter.min_decode_workers=5"),
        goal=0.92,
    ),
    Topology(
        name="both legs",
        native="dynamo_poa.bench.native_graph:Frontend",
        plugin="dynamo_poa.bench.hop_graph:Frontend",
        overrides=(
            "PrefillWorker.workers=1",
            "DecodeWorker.workers=5",
            "DecodeWorker.per_process=5",
            "Common.handover=bootstrap",
        ),
        engines=("PrefillWorker", "DecodeWorker"),
        routed=("PoaRouter.legs=[prefill, decode]", "PoaRouter.min_decode_workers=5"),
        goal=0.90,
    ),
)


class Comparison(NamedTuple):
    """Turns side by side; `long`: the relay's, long answers."""

    native: list[Turn]
    relay: list[Turn]
    stream: list[Turn]
    long: list[Turn]


def measure(repeats: int, turn_s: float, say: Callable[[str], None]) -> Figure:
    """Compare every topology at every point, in so many rounds of turns of so many seconds each.

    Raises:  MeasurementError when requests failed.
    """
    found = {}
    for point in POINTS:
        for topology in TOPOLOGIES:
            say(f"{point.name}, {topology.name}: starting three graphs")
            found[point.name, topology.name] = uvloop.run(_compare(point, topology, repeats, turn_s, say))
    return figure(found)


async def _compare(
    point: Point, topology: Topology, repeats: int, turn_s: float, say: Callable[[str], None]
) -> Comparison:
    engine = ENGINE.format(speedup=point.speedup)
    both = (
        "Frontend.http_port=0",
        *topology.overrides,
        *(f"{section}.args={engine}" for section in topology.engines),
    )
    found = Comparison([], [], [], [])
    async with AsyncExitStack() as stack:
        native = await start(stack, topology.native, (*both, KV_ROUTING))
        relay, stream = [
            await start(stack, topology.plugin, (*both, *topology.routed, f"PoaRouter.data_path={path}"))
            for path in ("relay", "stream")
        ]
        graphs = [(native, found.native), (relay, found.relay), (stream, found.stream)]
        for number in range(repeats):
            for graph, turns in graphs:
                idle = [other for other, _ in graphs if other is not graph]
                turns.append(await take_turn(graph, idle, OUT_TOKENS, turn_s, number))
            last = [round(turns[-1].tokens_per_s) for _, turns in graphs]
            say(f"{number + 1} of {repeats}: native {last[0]} tokens/s, relay {last[1]}, stream {last[2]}")
        for number in range((repeats + 1) // 2 if point.costs else 0):
            found.long.append(await take_turn(relay, [native, stream], LONG_OUT_TOKENS, turn_s, number))
    return found


def figure(found: dict[tuple[str, str], Comparison]) -> Figure:
    """Turn the comparisons, by point and topology, into the figure.

    Raises:  MeasurementError when requests failed.
    """
    failed = sum(turn.failed for one in found.values() for turns in one for turn in turns)
    if failed:
        raise MeasurementError(f"{failed} requests failed: must be 0 to compare")
    measures, conditions = list[Measure](), list[str]()
    for point in POINTS:
        for topology in TOPOLOGIES:
            one = found[point.name, topology.name]
            measures += _ratios(point, topology, one)
            if point.costs:
                measures += _costs(topology, one)
            conditions.append(_condition(point, topology, one))
    turns = len(next(iter(found.values())).native)
    return Figure(
        name="relay",
        title=f"the hop by relay and by stream beside the native frontend, {CONCURRENCY} users",
        measures=tuple(measures),
        conditions=(
            f"{PROMPT_TOKENS} tokens in, {OUT_TOKENS} out; native, relay and stream by turns, medians of "
            f"{turns}; ratios are of neighbouring turns",
            "aggregated: 5 workers; both legs: 1 prefill and 5 decode workers, bootstrap; no controller",
            *conditions,
            "router CPU is that of its whole process, Dynamo's own threads included, both legs together",
        ),
    )


def _condition(point: Point, topology: Topology, one: Comparison) -> str:
    """Tell how busy the machine was: a ratio of two runs that share too few processors is no hop's."""
    native, relay = one.native, one.relay
    return (
        f"{point.name}, {topology.name}: engine at {point.speedup:g} x its GPU's speed; the machine is "
        f"{median(t.machine_busy_frac for t in native):.0%} busy while native serves and "
        f"{median(t.machine_busy_frac for t in relay):.0%} while the relay does; load client "
        f"{median(t.client_cpu_s / t.seconds for t in native):.2f} cores, the graphs that wait "
        f"{median(t.idle_graph_cpu_s / t.seconds for t in native):.2f}, what else this machine does "
        f"{median(t.others_cpu_s / t.seconds for t in native):.2f}"
    )


def _ratios(point: Point, topology: Topology, one: Comparison) -> list[Measure]:
    key, what = f"{topology.key}_{point.name.replace('-', '_')}", f"{point.name}, {topology.name}: "
    measures = []
    for path, turns in (("relay", one.relay), ("stream", one.stream)):
        together = list(zip(one.native, turns, strict=True))
        throughput = median(turn.tokens_per_s / native.tokens_per_s for native, turn in together)
        ttft = median(turn.ttft_p50_s / native.ttft_p50_s for native, turn in together)
        of_throughput = (
            f"{key}_{path}_throughput_ratio",
            f"{what}{path}, throughput of native",
            throughput,
            "x",
        )
        of_ttft = f"{key}_{path}_ttft_p50_ratio", f"{what}{path}, TTFT P50 of native", ttft, "x"
        if path == "relay" and point.judged:
            measures += [at_least(*of_throughput, topology.goal), at_most(*of_ttft, GOAL_TTFT)]
        else:
            measures += [plain(*of_throughput), plain(*of_ttft)]
    native_tps, native_ttft_s = (
        median(turn.tokens_per_s for turn in one.native),
        median(turn.ttft_p50_s for turn in one.native),
    )
    return [
        *measures,
        plain(f"{key}_native_tokens_per_s", f"{what}native", native_tps, "tokens/s"),
        plain(f"{key}_native_ttft_p50_ms", f"{what}native, TTFT P50", native_ttft_s * 1e3, "ms"),
    ]


def _costs(topology: Topology, one: Comparison) -> list[Measure]:
    """Tell what a token costs the router, its share of its request included."""
    key, what = topology.key, f"{topology.name}: "
    relay_us, stream_us, long_us = (
        median(turn.us_per_token("router") for turn in turns) for turns in (one.relay, one.stream, one.long)
    )
    short, long = f"router CPU per token, {OUT_TOKENS} out", f"router CPU per token, {LONG_OUT_TOKENS} out"
    return [
        at_most(f"{key}_relay_us_per_token", f"{what}relay, {short}", relay_us, "µs", GOAL_US_PER_TOKEN),
        at_most(
            f"{key}_relay_long_us_per_token", f"{what}relay, {long}", long_us, "µs", GOAL_LONG_US_PER_TOKEN
        ),
        plain(f"{key}_stream_us_per_token", f"{what}stream, {short}", stream_us, "µs"),
    ]
