"""How results are arranged to be looked at: which policy is the default, what shares an axis, what is a grid.

Owns: which results count as data, the default and the order of policies, a load's place on an axis,
      which fleets are splits of one another.
Does not own: comparisons (paired.py, standing.py), drawing (plots.py, maps.py).
Invariant: only cells that are `done` are data; open and closed loops never share an axis.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from dynamo_poa.bench.suites.baselines import BEST, DEFAULT, LIVE, TUNING_SUFFIX
from dynamo_poa.bench.suites.cells import Fleet, Policy, Result
from dynamo_poa.values import REGIMES, Regime
from dynamo_poa.workloads.arrivals import Closed, Load, OnOff, Poisson, TraceTimes, Waves

Key = TypeVar("Key", bound=Hashable)
LEAST_TEMPERATURES = 4  # make a grid of τ and ω
LEAST_SPLITS = 3


class Place(NamedTuple):
    """A load on the axis that `unit` labels."""

    value: float
    unit: str


def done(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return the results that are data."""
    return tuple(result for result in results if result.state == "done")


def swept(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return the results that are data, each phase of a sweep as a cell of its own.

    A sweep's phases are loads that come once each. Phases whose load comes again are told by their names.
    """
    return tuple(itertools.chain.from_iterable(map(_phase_by_phase, done(results))))


def _phase_by_phase(result: Result) -> Iterator[Result]:
    phases = result.cell.phases
    if not phases or len({phase.load for phase in phases}) < len(phases):
        yield result
        return
    for phase in phases:
        prefix = f"{phase.name}."
        yield msgspec.structs.replace(
            result,
            cell=msgspec.structs.replace(result.cell, load=phase.load, seconds=phase.seconds, phases=()),
            figures={k.removeprefix(prefix): v for k, v in result.figures.items() if k.startswith(prefix)},
            picks={},  # known over all phases together alone
            series=tuple(point for point in result.series if point.phase == phase.name),
        )


def measured(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return the results without those that only chose a setting: it is measured on other seeds."""
    return tuple(result for result in results if not result.cell.suite.endswith(TUNING_SUFFIX))


def grouped(results: Iterable[Result], key: Callable[[Result], Key]) -> dict[Key, tuple[Result, ...]]:
    """Return the results by key, both in their order."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return {name: tuple(members) for name, members in groups.items()}


def place(load: Load) -> Place:
    """Return where a load stands on its axis; only loads with the same unit share one."""
    match load:
        case Closed():
            return Place(load.users, "users (closed loop)")
        case Poisson():
            return Place(load.rate_rps, "requests/s (open loop)")
        case Waves():
            return Place(load.mean_rps, "requests/s on average (open loop, waves)")
        case OnOff():
            sent = load.on_rps * load.on_s + load.off_rps * load.off_s
            return Place(sent / (load.on_s + load.off_s), "requests/s on average (open loop, on-off)")
        case TraceTimes():
            return Place(load.speedup, "times the trace's own rate (open loop)")


def loop(load: Load) -> str:
    """Return which kind of loop it is: in an open one, throughput is what was asked for."""
    return "closed loop" if isinstance(load, Closed) else "open loop"


def is_default(policy: Policy) -> bool:
    """Tell whether a policy is Dynamo's own KV routing with every parameter at its default."""
    return policy == Policy(name=policy.name)


def default_policy(results: Iterable[Result]) -> str | None:
    """Return the policy that all others are measured against; None where nothing can be.

    Dynamo's own KV routing, at its defaults in every cell of that name: the best setting found may be it here
    and there. Where there is none, our router that changes nothing.
    """
    by_name = _policies(results)
    native = [name for name, policies in by_name.items() if all(map(is_default, policies))]
    if not native:
        native = [
            name
            for name, policies in by_name.items()
            if all(
                policy.plugin in ("off", "shadow") and is_default(_unplugged(policy)) for policy in policies
            )
        ]
    return min(native, key=lambda name: (name != DEFAULT.name, name), default=None)


def _policies(results: Iterable[Result]) -> dict[str, set[Policy]]:
    found: dict[str, set[Policy]] = {}
    for result in results:
        found.setdefault(result.cell.policy.name, set()).add(result.cell.policy)
    return found


def _unplugged(policy: Policy) -> Policy:
    return msgspec.structs.replace(policy, plugin="", table=DEFAULT.table)


def policy_names(results: Sequence[Result]) -> tuple[str, ...]:
    """Return the policies, the default before all, then the known ones in their order, then the others."""
    default, known = default_policy(results), [policy.name for policy in LIVE]
    names = {result.cell.policy.name for result in results}

    def order(name: str) -> tuple[bool, int, str]:
        return name != default, known.index(name) if name in known else len(known), name

    return tuple(sorted(names, key=order))


def setting_names(results: Iterable[Result]) -> frozenset[str]:
    """Return the policies that make a grid of τ and ω: four values of τ or more, each with several of ω."""
    policies = {
        policy
        for name, settings in _policies(results).items()
        for policy in settings
        if len(settings) == 1 and name != BEST.name and _is_setting(policy)
    }
    counts = Counter(policy.router_temperature for policy in policies)
    columns = {temperature for temperature, number in counts.items() if number > 1}
    if len(columns) < LEAST_TEMPERATURES:
        return frozenset()
    return frozenset(policy.name for policy in policies if policy.router_temperature in columns)


def _is_setting(policy: Policy) -> bool:
    return is_default(msgspec.structs.replace(policy, router_temperature=0.0, overlap_credit=1.0))


def lines(results: Sequence[Result]) -> tuple[Result, ...]:
    """Return the results that curves show, without what has a map: settings but the default, and splits."""
    settings, default = setting_names(results), default_policy(results)
    mapped = {result.cell.id for cells in splits(results) for result in cells}
    return tuple(
        result
        for result in results
        if (result.cell.policy.name == default or result.cell.policy.name not in settings)
        and result.cell.id not in mapped
    )


def splits(results: Iterable[Result]) -> tuple[tuple[Result, ...], ...]:
    """Return the cells of the same workers under every split of them, three splits or more, by content."""
    families = grouped(
        (result for result in results if result.cell.fleet.prefill),
        lambda result: (_workers(result.cell.fleet), result.cell.content.name),
    )
    return tuple(cells for cells in families.values() if len(split_names(cells)) >= LEAST_SPLITS)


def split_names(results: Iterable[Result]) -> tuple[str, ...]:
    """Return the splits, the fewest prefill workers first."""
    return tuple(name for _, name in sorted({(r.cell.fleet.prefill, r.cell.fleet.topology) for r in results}))


def best(values: Mapping[str, float], shown: Mapping[str, str], *, higher: bool) -> frozenset[str]:
    """Return the names of the best value: all that read like it, and none where all do."""
    if len(set(shown.values())) < 2:
        return frozenset()
    first = (max if higher else min)(values, key=lambda name: values[name])
    return frozenset(name for name, text in shown.items() if text == shown[first])


def phases(results: Iterable[Result]) -> tuple[str, ...]:
    """Return what stands before figures' names: nothing, or in cells of phases each one's name and a dot."""
    names = dict.fromkeys(phase.name for result in results for phase in result.cell.phases)
    return tuple(f"{name}." for name in names) or ("",)


def regime(results: Iterable[Result]) -> Regime | None:
    """Return the regime that the controllers were in most of the time; None where none told."""
    seen = Counter(point.regime for result in results for point in result.series if point.regime)
    return max(REGIMES, key=lambda regime: seen[regime]) if seen else None


def _workers(fleet: Fleet) -> Hashable:
    """Return what the splits of the same workers have in common."""
    return msgspec.structs.replace(fleet, name="", prefill=0, decode=fleet.prefill + fleet.decode)


def phase_name(prefix: str) -> str:
    """Return a phase for a person, from what stands before its figures' names."""
    return f"{prefix.rstrip('.')} phase" if prefix else ""
