"""How each policy stands against the default: over everything, and cell group by cell group.

Owns: which figures are compared and under what name, the order policies are listed in, the sentence that
      says what routing was worth.
Does not own: pairing, intervals and verdicts (paired.py), layout (page.py, summary.py).
Invariant: a policy is called better or worse only where paired.py says so; what could not be compared is
           listed with the reason.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.cells import Fleet, Result
from dynamo_poa.bench.suites.paired import Comparison, Interval, compare, typical
from dynamo_poa.serve.show import UNKNOWN

# What the tables compare, and what a person calls it.
COMPARED = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT P99",
    "itl_p99_s": "ITL P99",
    "e2e_p99_s": "E2E P99",
    "throughput_rps": "throughput",
    "poa_hat": "PoA-hat",
}
LEADING = "ttft_mean_s"  # orders the policies and makes the headline
SPLIT_FIGURE = "e2e_mean_s"  # what both pools pay into
WORDS = {
    "better": "better",
    "worse": "worse",
    "no difference": "without a difference",
    "no verdict": "with too little to say",
}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One policy.

    against:  by figure, the policy over the default, over all groups
    better, worse:  in so many of its `groups` (fleet, workload, load), by the leading figure
    cached:   share of the prompts' tokens that was cached, see `cached`
    """

    policy: str
    against: dict[str, Comparison]
    better: int
    worse: int
    groups: int
    cached: Interval | None


def against_default(results: Sequence[Result], figure: str) -> dict[str, Comparison]:
    """Return every other policy's figure over the default's, where both have it in a pair."""
    default = arranged.default_policy(results)
    by_policy = arranged.grouped(results, lambda result: result.cell.policy.name)
    if default is None:
        return {}
    found = {
        name: compare(own, by_policy[default], figure) for name, own in by_policy.items() if name != default
    }
    return {name: comparison for name, comparison in found.items() if comparison.pairs}


def by_group(results: Sequence[Result], figure: str) -> dict[str, dict[str, Comparison]]:
    """Return `against_default` for each (fleet, workload, load)."""
    groups = arranged.grouped(arranged.done(results), lambda result: result.cell.group)
    found = {group: against_default(members, figure) for group, members in groups.items()}
    return {group: policies for group, policies in found.items() if policies}


def standings(results: Sequence[Result], phase: str = "") -> tuple[Standing, ...]:
    """Return all policies but the default, the lowest mean TTFT first.

    Args:     phase: what stands before the figures' names, see `arranged.phases`.
    """
    data = arranged.done(results)
    against = {phase + figure: against_default(data, phase + figure) for figure in COMPARED}
    groups = by_group(data, phase + LEADING)
    listed = []
    for name in arranged.policy_names(data):
        if name == arranged.default_policy(data):
            continue
        verdicts = [policies[name].verdict for policies in groups.values() if name in policies]
        listed.append(
            Standing(
                policy=name,
                against={key: found[name] for key, found in against.items() if name in found},
                better=verdicts.count("better"),
                worse=verdicts.count("worse"),
                groups=len(verdicts),
                cached=cached(data, name, phase),
            )
        )
    return tuple(sorted(listed, key=lambda standing: _ratio(standing, phase)))


def cached(results: Sequence[Result], policy: str, phase: str = "") -> Interval | None:
    """Return a policy's cached share over the groups that all policies went through; None of none."""
    own = [result for result in _shared(results) if result.cell.policy.name == policy]
    return typical(own, phase + "cached_frac")


def _shared(results: Sequence[Result]) -> tuple[Result, ...]:
    groups = arranged.grouped(arranged.done(results), lambda result: result.cell.group)
    names = {name: {result.cell.policy.name for result in cells} for name, cells in groups.items()}
    every = set[str]().union(*names.values())
    return tuple(result for name, cells in groups.items() if names[name] == every for result in cells)


def _ratio(standing: Standing, phase: str) -> float:
    found = standing.against.get(phase + LEADING)
    return float("inf") if found is None or found.ratio is None else found.ratio


def headline(results: Sequence[Result], phase: str = "") -> str:
    """Say in a sentence or two what routing was worth, by mean TTFT."""
    default = arranged.default_policy(arranged.done(results))
    if default is None:
        return "No cell of a default policy is done, so nothing is compared."
    listed = standings(results, phase)
    groups = {standing.policy: standing.groups for standing in listed}
    against = ((standing.policy, standing.against.get(phase + LEADING)) for standing in listed)
    found = [(policy, comparison) for policy, comparison in against if comparison is not None]
    if not found:
        return f"No other policy was measured beside {default}."
    counts = Counter[str](comparison.verdict for _, comparison in found)
    parts = [f"{counts[verdict]} {words}" for verdict, words in WORDS.items() if counts[verdict]]
    text = f"By mean TTFT against {default}, of {len(found)} other policies: {', '.join(parts)}."
    if counts["better"]:
        policy, best = next(pair for pair in found if pair[1].verdict == "better")
        text += f" The best is {policy}: {percent(best.ratio)} ({percent(best.low)} to {percent(best.high)})"
        text += f" over {groups[policy]} of {max(groups.values())} groups."
    return text


def split_headline(results: Sequence[Result]) -> str:
    """Say which split of the same workers was best, and what the wrong one costs, by mean E2E; or nothing.

    A split is best where the next one is worse outside the noise, seed by seed: both were asked the same.

    Returns:  the default policy's; rows are one workload under one load, workers equally many.
    """
    default = arranged.default_policy(arranged.done(results))
    own = [result for result in arranged.done(results) if result.cell.policy.name == default]
    best, costs = Counter[str](), list[float]()
    for cells in arranged.splits(own):
        for row in arranged.grouped(cells, lambda result: result.cell.load.text).values():
            by_split = arranged.grouped(row, lambda result: result.cell.fleet.topology)
            found = {name: typical(members, SPLIT_FIGURE) for name, members in by_split.items()}
            medians = {name: interval.median for name, interval in found.items() if interval is not None}
            if len(medians) > 1:
                least, second, *_ = sorted(medians, key=lambda name: medians[name])
                behind, ahead = (_on_one_fleet(by_split[name]) for name in (second, least))
                clear = compare(behind, ahead, SPLIT_FIGURE).verdict == "worse"
                best.update([least] if clear else [])
                costs.append(max(medians.values()) / medians[least])
    if not costs:
        return ""
    wins = ", ".join(f"{name} in {number}" for name, number in best.most_common())
    alike = len(costs) - best.total()
    within = f"; in {alike} the first two do not differ beyond the noise" * bool(alike)
    return (
        f"By mean E2E the best split of the workers is {wins or 'clear in 0'} of {len(costs)} workloads and "
        f"loads{within}; the worst takes {min(costs):.2g} to {max(costs):.2g} times as long."
    )


def _on_one_fleet(results: Sequence[Result]) -> list[Result]:
    """Return results as if of one fleet, so that different fleets can be paired."""
    fleet = Fleet(name="", prefill=0, decode=1)
    return [
        msgspec.structs.replace(result, cell=msgspec.structs.replace(result.cell, fleet=fleet))
        for result in results
    ]


def percent(ratio: float | None) -> str:
    """Return a ratio as a change: +8.1 %, -12 %; of ten times and more as it is: 31x."""
    if ratio is None:
        return UNKNOWN
    change = round(100 * (ratio - 1), 1) + 0.0  # no minus before nothing
    if ratio >= 10:
        return f"{ratio:.0f}x"
    return f"{change:+.{0 if abs(change) >= 10 else 1}f} %".replace("-", "\N{MINUS SIGN}")
