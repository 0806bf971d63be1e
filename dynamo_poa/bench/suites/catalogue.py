"""Which suites there are, and which cells each consists of.

Owns: the suites' fleets, workloads and lengths; words that choose some of their cells; how long they take.
Does not own: policies and how the best setting is found (baselines.py), the fleets of `hetero` (variants.py),
              the cells of `caching` (affinity.py), the order of cells (runner.py).
Invariant: in each group of cells (fleet, workload, load) stand all policies the engine offers, unless the
           suite says which and why. A suite's cells depend on its options alone.
Source: paper: topologies, workload, C = 96 and 128 in the sweep, the three phases. Speeds of live workers:
        measured on two cores, so that the simulated GPUs and not the processors are the limit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo_poa.bench.suites import affinity, allocation, baselines, profiles, runner, variants
from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Policy
from dynamo_poa.bench.suites.variants import LIVE_CONTENT, LIVE_FLEET, live_fleet
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Closed, Load, OnOff, Poisson, TraceTimes, Waves
from dynamo_poa.workloads.synthetic import Content, LongTail, Mixed, MultiTurn, Paper, Trace, Zipf

DEFAULT_SEEDS = 3
MAX_SEEDS = 100
GRAPH_START_S = 4.0  # each, of several that start at once
DRAIN_S = 2.0  # on average, until the last answer of a live cell has ended
REPLAY_S = (0.02, 0.0003)  # of a processor, per cell and per request

PAPER_USERS = (16, 64, 96, 128, 256)
PAPER_BELOW, PAPER_SATURATED = 16, 256
PAPER_TEMPERATURES = (0.0, 0.3, 0.7, 0.8)  # with the credits, the paper's three regimes are among them
PAPER_CREDITS = (1.0, 0.5, 0.1, 0.0)
# Replayed at the engine's own speed: prompts are then a larger part of a request.
REPLAY_BELOW, REPLAY_SATURATED = 32, 512

_ENGINES_OWN = Fleet(name="", prefill=0, decode=1)

Workload = tuple[Content, Load]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a person may choose of any suite.

    model:  a timing profile, for the mock engine's own timing
    trace:  a file in Mooncake's format, for the suites that replay one
    """

    seeds: tuple[int, ...] = tuple(range(1, DEFAULT_SEEDS + 1))
    model: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Suite:
    """A suite. `build` yields its cells; those with `baselines.BEST` need their setting found first."""

    name: str
    engines: str
    text: str
    build: Callable[[str, Options], Iterator[Cell]]

    def cells(self, options: Options) -> tuple[Cell, ...]:
        """Return its cells, each once.

        Raises:  ConfigError listing which options cannot be used.
        """
        _check(options)
        found = {cell.id: _on_model(cell, options.model) for cell in self.build(self.name, options)}
        return tuple(found.values())


def suite(name: str) -> Suite:
    """Return a suite by its name.

    Raises:  ConfigError with the list when there is none.
    """
    if name not in SUITES:
        raise ConfigError([f"suite {name!r}: must be one of {', '.join(SUITES)}"])
    return SUITES[name]


def chosen(cells: Sequence[Cell], words: Iterable[str]) -> tuple[Cell, ...]:
    """Return the cells that the words choose: names of policies, fleets, kinds of workload, loads.

    Words of one kind add up, those of different kinds narrow down: `kv,random,1P/5D` is two policies on one
    fleet.

    Raises:  ConfigError with the lists when a word is none of them, or no cell is all that they say.
    """
    kinds: dict[str, Callable[[Cell], str]] = {
        "policies": lambda cell: cell.policy.name,
        "fleets": lambda cell: cell.fleet.name,
        "workloads": lambda cell: cell.content.name.partition(",")[0],
        "loads": lambda cell: cell.load.text.partition(",")[0],
    }
    known = {kind: dict.fromkeys(map(name_of, cells)) for kind, name_of in kinds.items()}
    wanted: dict[str, set[str]] = {}
    problems = []
    for word in words:
        of_kinds = [kind for kind, names in known.items() if word in names]
        for kind in of_kinds:
            wanted.setdefault(kind, set()).add(word)
        if not of_kinds:
            lists = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in known.items())
            problems.append(f"--only {word!r}: must be one of this suite's {lists}")
    if problems:
        raise ConfigError(problems)
    found = tuple(cell for cell in cells if all(kinds[kind](cell) in names for kind, names in wanted.items()))
    if not found:
        asked = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in wanted.items())
        raise ConfigError([f"--only: no cell of this suite is of all these at once: {asked}"])
    return found


def seconds_of(cell: Cell) -> float:
    """Return about how long a cell takes, without the start of its graph and its time to learn."""
    if cell.engine == "replay":
        per_cell_s, per_request_s = REPLAY_S
        return (per_cell_s + per_request_s * cell.requests) / runner.PROCESSES
    measured_s = sum(phase.seconds for phase in cell.phases) if cell.phases else cell.seconds
    return cell.warm_up_s + measured_s + DRAIN_S


def step_s(cells: Sequence[Cell]) -> float:
    """Return about how long these cells take, with the start of their graphs, each of which learns once."""
    graphs = dict.fromkeys(((cell.fleet, cell.policy) for cell in cells if cell.engine == "live"), 0.0)
    for cell in cells:
        if (graph := (cell.fleet, cell.policy)) in graphs:
            graphs[graph] = max(graphs[graph], cell.learn_s)
    return sum(map(seconds_of, cells)) + GRAPH_START_S * len(graphs) + sum(graphs.values())


def estimated_s(cells: Sequence[Cell]) -> float:
    """Return about how long a run of these cells takes: to find their best settings, and to measure."""
    return step_s(baselines.tuning_cells(cells)) + step_s(cells)


def _check(options: Options) -> None:
    problems = []
    if options.model and options.model not in profiles.names():
        problems.append(f"--model {options.model!r}: must be one of {', '.join(profiles.names())}")
    if options.trace and not Path(options.trace).is_file():
        problems.append(f"--trace {options.trace!r}: must be a file")
    if problems:
        raise ConfigError(problems)


def _on_model(cell: Cell, model: str) -> Cell:
    if not model:
        return cell
    fleet = msgspec.structs.replace(cell.fleet, name=f"{cell.fleet.name} on {model}", profile=model)
    if fleet.kv_blocks == _ENGINES_OWN.kv_blocks:  # else the suite means what it says
        fleet = msgspec.structs.replace(fleet, kv_blocks=profiles.about(model).kv_blocks)
    return msgspec.structs.replace(cell, fleet=fleet)


def _cross(
    suite_name: str,
    engine: Literal["replay", "live"],
    fleets: Iterable[Fleet],
    workloads: Sequence[Workload],
    seeds: Iterable[int],
    policies: Sequence[Policy] | None = None,
    **length: Any,
) -> Iterator[Cell]:
    """Yield every policy on every fleet under every workload with every seed."""
    offered = baselines.REPLAY if engine == "replay" else baselines.LIVE
    for fleet in fleets:
        for content, load in workloads:
            for seed in seeds:
                for policy in policies or offered:
                    yield Cell(
                        suite=suite_name,
                        engine=engine,
                        fleet=fleet,
                        content=content,
                        load=load,
                        policy=policy,
                        seed=seed,
                        **length,
                    )


def _equal(prefill: int, decode: int, **rest: Any) -> Fleet:
    """Return a fleet named after its topology, of workers that are alike."""
    fleet = Fleet(name="", prefill=prefill, decode=decode, **rest)
    return msgspec.structs.replace(fleet, name=fleet.topology)


# The paper's. The batch is chosen so that one prefill worker has its knee near the paper's 128 users: with
# the engine's own 8,192 tokens 256 users do not saturate it. Slowed, so that they do not saturate two cores.
_PAPER_BATCH = 1024
_PAPER_LIVE = tuple(_equal(1, n, speedup=0.1, max_num_batched_tokens=_PAPER_BATCH) for n in (5, 2))
_PAPER_REPLAY = tuple(_equal(1, n, max_num_batched_tokens=_PAPER_BATCH) for n in (5, 2))
_PAPER = Paper(output_tokens=32)


def _paper_1(name: str, options: Options) -> Iterator[Cell]:
    loads = [(_PAPER, Closed(users=users)) for users in PAPER_USERS]
    yield from _cross(name, "live", _PAPER_LIVE, loads, options.seeds, warm_up_s=8.0, seconds=10.0)


def _paper_2(name: str, options: Options) -> Iterator[Cell]:
    phases = tuple(
        Phase(name=f"{users} users", load=Closed(users=users), seconds=10.0) for users in PAPER_USERS
    )
    loads = [(_PAPER, Closed(users=PAPER_SATURATED))]
    yield from _cross(name, "live", _PAPER_LIVE[:1], loads, options.seeds, warm_up_s=5.0, phases=phases)


def _paper_3(name: str, options: Options) -> Iterator[Cell]:
    phases = (
        Phase(name="below", load=Closed(users=PAPER_BELOW), seconds=12.0),
        Phase(name="saturated", load=Closed(users=PAPER_SATURATED), seconds=25.0),
        Phase(name="below again", load=Closed(users=PAPER_BELOW), seconds=20.0),
    )
    loads = [(_PAPER, Closed(users=PAPER_SATURATED))]
    yield from _cross(name, "live", _PAPER_LIVE, loads, options.seeds, warm_up_s=5.0, phases=phases)


def _paper_4(name: str, options: Options) -> Iterator[Cell]:
    grid = [baselines.setting(tau, omega) for omega in PAPER_CREDITS for tau in PAPER_TEMPERATURES]
    policies = tuple(dict.fromkeys((*grid, *baselines.REPLAY)))
    loads = [(Paper(), Closed(users=users)) for users in (REPLAY_BELOW, REPLAY_SATURATED)]
    yield from _cross(name, "replay", _PAPER_REPLAY, loads, options.seeds, policies, requests=3000)


def _splits(*sizes: int) -> Callable[[str, Options], Iterator[Cell]]:
    """Return the suite of every split of so many workers, and of as many aggregated ones.

    The best setting is looked for under the heavy load alone: under the light one nothing is at stake.
    """
    contents = (
        Zipf(input_tokens=4096, output_tokens=32),
        Zipf(input_tokens=256, output_tokens=256),
        LongTail(),
    )
    static = tuple(policy for policy in baselines.REPLAY if policy != baselines.BEST)

    def build(name: str, options: Options) -> Iterator[Cell]:
        for workers in sizes:
            fleets = [_equal(prefill, workers - prefill) for prefill in range(workers)]
            for users, policies in ((32, static), (256, baselines.REPLAY)):
                loads = [(content, Closed(users=users)) for content in contents]
                yield from _cross(name, "replay", fleets, loads, options.seeds, policies, requests=600)

    return build


def _hetero(name: str, options: Options) -> Iterator[Cell]:
    yield from variants.cells(name, options.seeds)


def _workloads(name: str, options: Options) -> Iterator[Cell]:
    loads: list[Workload] = [
        (Paper(), Closed(users=REPLAY_BELOW)),
        (Paper(), Closed(users=REPLAY_SATURATED)),
        (Zipf(), Poisson(rate_rps=80.0)),
        (Zipf(), Poisson(rate_rps=180.0)),
        (Zipf(input_tokens=4096), Closed(users=256)),
        (LongTail(), Poisson(rate_rps=15.0)),
        (LongTail(), Poisson(rate_rps=30.0)),
        (Zipf(), OnOff(on_rps=250.0, off_rps=40.0, on_s=5.0, off_s=10.0)),
        (Zipf(), Waves(mean_rps=120.0, swing_frac=0.8, period_s=10.0)),
        (MultiTurn(), Poisson(rate_rps=120.0)),
        (Mixed(), Poisson(rate_rps=35.0)),
    ]
    if options.trace:
        loads += [
            (Trace(path=options.trace, part="second", limit=2000), TraceTimes(speedup=s, spread_s=3.0))
            for s in (1.0, 2.0)
        ]
    fleets = (_equal(2, 4), _equal(0, 6))
    yield from _cross(name, "replay", fleets, loads, options.seeds, requests=2000)


def _workloads_live(name: str, options: Options) -> Iterator[Cell]:
    loads: list[Workload] = [
        (Paper(output_tokens=32), Closed(users=32)),
        (Zipf(output_tokens=32), Poisson(rate_rps=40.0)),
        (Zipf(output_tokens=32), OnOff(on_rps=70.0, off_rps=10.0, on_s=2.0, off_s=3.0)),
        (Zipf(output_tokens=32), Waves(mean_rps=40.0, swing_frac=0.8, period_s=5.0)),
        (LongTail(output_median_tokens=32.0, output_max_tokens=256), Poisson(rate_rps=10.0)),
        (MultiTurn(output_tokens=32, think_s=0.5), Closed(users=32)),
        (
            Mixed(
                first=MultiTurn(output_tokens=32, think_s=0.5),
                second=LongTail(output_median_tokens=32.0, output_max_tokens=256),
            ),
            Poisson(rate_rps=15.0),
        ),
    ]
    if options.trace:
        trace = Trace(path=options.trace, part="second", limit=500)
        loads.append((trace, TraceTimes(speedup=1.0, spread_s=3.0)))
    yield from _cross(name, "live", [LIVE_FLEET], loads, options.seeds, warm_up_s=3.0, seconds=10.0)


def _caching(name: str, options: Options) -> Iterator[Cell]:
    yield from affinity.cells(name, options.seeds)


def _allocation(name: str, options: Options) -> Iterator[Cell]:
    yield from allocation.cells(name, options.seeds, Path(options.trace).parent if options.trace else None)


def _smoke(name: str, options: Options) -> Iterator[Cell]:
    loads = [(Zipf(), Closed(users=users)) for users in (32, 256)]
    yield from _cross(name, "replay", [_equal(2, 4), _equal(0, 6)], loads, options.seeds, requests=500)
    policies = tuple(map(baselines.policy, ("kv", "ours active", "ours marginal")))
    load = [(LIVE_CONTENT, Closed(users=16))]
    fleet = [live_fleet("2P/4D live")]
    yield from _cross(name, "live", fleet, load, options.seeds[:1], policies, warm_up_s=3.0, seconds=10.0)


SUITES = {
    one.name: one
    for one in (
        Suite("paper-1", "live", "PoA-hat and latency against users, 1P/5D and 1P/2D", _paper_1),
        Suite("paper-2", "live", "when saturation is seen: users rising over the knee, 1P/5D", _paper_2),
        Suite("paper-3", "live", "below, saturated and below again: adaptive against static", _paper_3),
        Suite("paper-4", "replay", "16 settings of τ and ω below and at saturation", _paper_4),
        Suite("splits", "replay", "every P/D split of 6 and of 8 workers", _splits(6, 8)),
        Suite("splits-8", "replay", "every P/D split of 8 workers", _splits(8)),
        Suite(
            "hetero", "live", "slow and stalling workers, several routers, small caches, a host tier", _hetero
        ),
        Suite("workloads", "replay", "every workload; --trace adds one of your own", _workloads),
        Suite("workloads-live", "live", "every workload on live graphs", _workloads_live),
        Suite("caching", "live", "what caches hold when ω falls, static; no other policy", _caching),
        Suite(
            allocation.SUITE,
            "replay",
            "every split of 8 workers, kv alone; --trace adds Mooncake's two in its folder",
            _allocation,
        ),
        Suite("smoke", "replay, live", "three minutes: whether the bench works", _smoke),
    )
}
