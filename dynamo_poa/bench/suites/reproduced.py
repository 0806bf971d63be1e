"""Whether our results bear out what the paper reports.

Owns: for each of the paper's claims, what ours say and whether that is the same.
Does not own: the claims (paper_figures.py), comparisons (paired.py), layout (results_doc.py).
Invariant: a claim without data is `not measured`, never reproduced; ratios are judged, levels are not.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.paired import Comparison, compare, typical
from dynamo_poa.bench.suites.paper_figures import Claim
from dynamo_poa.bench.suites.standing import against_default, percent, split_headline
from dynamo_poa.values import REGIMES, Regime

Verdict = Literal["yes", "partly", "no", "not measured", "new"]
PAPER_KNEE_USERS = 128
PAPER_SPREAD_RATIO = 37.0
THE_PAPERS_TABLE = "table"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What ours say of a claim."""

    text: str
    verdict: Verdict


NOT_MEASURED = Answer(text="-", verdict="not measured")


def answer(claim: Claim, results: Sequence[Result]) -> Answer:
    """Return what the results of the claim's suite say of it.

    Args:     results: of that suite, of every model and topology.
    """
    data = _of_claim(claim, arranged.done(results))
    found = _ANSWERS[claim.key](data)
    if claim.model and found.text != NOT_MEASURED.text and not any(r.cell.fleet.profile for r in data):
        text = f"{found.text} (workers of the mock engine's own timing, not of {claim.model.upper()})"
        return msgspec.structs.replace(found, text=text)
    return found


def _of_claim(claim: Claim, results: Sequence[Result]) -> tuple[Result, ...]:
    """Return the cells of the claim's topology and model; no profile stands for every model."""
    return tuple(
        result
        for result in results
        if claim.topology in ("", result.cell.fleet.topology)
        and (not result.cell.fleet.profile or claim.model in result.cell.fleet.profile)
    )


def _by_load(results: Sequence[Result]) -> dict[str, dict[float, tuple[Result, ...]]]:
    """Return the steady cells that told a PoA-hat, by fleet and by load, the lightest first."""
    told = [result for result in results if "poa_hat" in result.figures and not result.cell.phases]
    return {
        name: dict(sorted(arranged.grouped(cells, _users).items()))
        for name, cells in arranged.grouped(told, lambda result: result.cell.fleet.name).items()
    }


def _users(result: Result) -> float:
    return arranged.place(result.cell.load).value


def _knee(results: Sequence[Result]) -> Answer:
    knees = {}
    for name, loads in _by_load(results).items():
        regimes = {load: arranged.regime(cells) for load, cells in loads.items()}
        past = [load for load, regime in regimes.items() if regime not in (None, Regime.BELOW)]
        if any(regimes.values()):
            knees[name] = past[0] if past else None
    if not knees:
        return NOT_MEASURED
    text = "; ".join(
        f"{name}: {'no load past it' if knee is None else f'{knee:g}'}" for name, knee in knees.items()
    )
    alike = len(set(knees.values())) == 1 and None not in knees.values()
    same = alike and PAPER_KNEE_USERS in knees.values()
    return Answer(
        text=f"first load past `below`, users: {text}", verdict="yes" if same else "partly" if alike else "no"
    )


def _bands(results: Sequence[Result]) -> Answer:
    parts, seen = list[str](), list[bool]()
    for name, loads in _by_load(results).items():
        by_regime: dict[Regime, list[Result]] = {}
        for cells in loads.values():
            if (regime := arranged.regime(cells)) is not None:
                by_regime.setdefault(regime, []).extend(cells)
        medians = {regime: typical(by_regime.get(regime, ()), "poa_hat") for regime in REGIMES}
        told = [(regime, found.median) for regime, found in medians.items() if found is not None]
        if told:
            parts.append(f"{name}: " + ", ".join(f"{regime} {median:.2f}" for regime, median in told))
            rising = all(low[1] < high[1] for low, high in itertools.pairwise(told))
            seen.append(rising and len(told) == len(REGIMES))
    if not parts:
        return NOT_MEASURED
    return Answer(
        text="median PoA-hat by regime: " + "; ".join(parts),
        verdict="yes" if all(seen) else "partly" if any(seen) else "no",
    )


def _detection(results: Sequence[Result]) -> Answer:
    told = [result for result in results if result.series and result.cell.policy.plugin]
    if not told:
        return NOT_MEASURED
    changes = [sum(_changes(result)) for result in told]
    went = [number > 0 for number in changes]
    return Answer(
        text=f"the regime changed in {sum(went)} of {len(told)} runs, {sum(changes)} times in all",
        verdict="yes" if all(went) else "partly" if any(went) else "no",
    )


def _changes(result: Result) -> list[bool]:
    regimes = [point.regime for point in result.series if point.regime]
    return [before != after for before, after in itertools.pairwise(regimes)]


def _grid(results: Sequence[Result]) -> dict[str, tuple[int, int, float]]:
    """Return by load, the lightest first: how many settings differ in mean TTFT, of how many, the spread."""
    names = arranged.setting_names(results)
    default = arranged.default_policy(results)
    data = [r for r in results if r.cell.policy.name in names or r.cell.policy.name == default]
    loads = arranged.grouped(data, lambda result: result.cell.load.text)
    found = {}
    for load in sorted(loads, key=lambda text: arranged.place(loads[text][0].cell.load).value):
        against = against_default(loads[load], "ttft_mean_s")
        ratios = [1.0, *(c.ratio for c in against.values() if c.ratio is not None)]
        differ = sum(comparison.verdict in ("better", "worse") for comparison in against.values())
        if names and against:
            found[load] = (differ, len(against), max(ratios) - min(ratios))
    return found


def _flat_below(results: Sequence[Result]) -> Answer:
    grid = _grid(results)
    if not grid:
        return NOT_MEASURED
    load, (differ, settings, spread) = next(iter(grid.items()))
    return Answer(
        text=f"{load}: mean TTFT of {differ} of {settings} settings differs from the default's, "
        f"spread {spread:.1%}",
        verdict="yes" if not differ else "partly" if differ < settings / 2 else "no",
    )


def _spread_at(results: Sequence[Result]) -> Answer:
    grid = list(_grid(results).items())
    if len(grid) < 2:
        return NOT_MEASURED
    (low, (_, _, before)), (high, (_, _, after)) = grid[0], grid[-1]
    ratio = after / before if before else float("inf")
    return Answer(
        text=f"spread of mean TTFT {before:.1%} ({low}) and {after:.1%} ({high}): {ratio:.1f} times",
        verdict="yes" if ratio >= PAPER_SPREAD_RATIO else "partly" if ratio > 1 else "no",
    )


def heaviest_phase(results: Sequence[Result]) -> str:
    """Return what stands before the figures of the phase with the highest load."""
    phases = [phase for result in results for phase in result.cell.phases]
    top = max(phases, key=lambda phase: arranged.place(phase.load).value, default=None)
    return "" if top is None else f"{top.name}."


def _adaptive(*figures: str) -> Callable[[Sequence[Result]], Answer]:
    """Return what judges adaptive against static in the heaviest phase: the first figure decides."""

    def judge(results: Sequence[Result]) -> Answer:
        phase = heaviest_phase(results)
        ours = [r for r in results if r.cell.policy.plugin == "active"]
        ours = [r for r in ours if r.cell.policy.table == THE_PAPERS_TABLE]
        static = [r for r in results if r.cell.policy.plugin in ("off", "shadow")]
        if len({result.cell.policy.name for result in static}) > 1:  # one policy is one side of a comparison
            static = [result for result in static if result.cell.policy.plugin == "shadow"]
        parts, verdicts = list[str](), dict[str, str]()
        for figure in figures:
            found = compare(ours, static, phase + figure)
            if found.pairs:
                parts.append(f"{NAMES[figure]} {_said(found)}")
                verdicts[figure] = found.verdict
        if not parts:
            return NOT_MEASURED
        text = f"{arranged.phase_name(phase) or 'one load'}: " + "; ".join(parts)
        first = verdicts.get(figures[0], "no verdict")
        if first == "no verdict":
            return Answer(text=text, verdict="not measured")
        return Answer(text=text, verdict="yes" if first == "better" else "no")

    return judge


NAMES = {"poa_hat": "PoA-hat", "ttft_p99_s": "TTFT P99", "throughput_rps": "throughput"}


def _said(found: Comparison) -> str:
    if found.low is None or found.high is None:
        return f"{found.verdict} ({found.reason})"
    interval = f"{percent(found.low)} to {percent(found.high)}"
    return f"{'no difference' if found.verdict == 'no difference' else percent(found.ratio)} ({interval})"


def _third_regime(results: Sequence[Result]) -> Answer:
    told = [result for result in results if any(point.regime for point in result.series)]
    if not told:
        return NOT_MEASURED
    fired = sum(any(p.regime == Regime.SATURATED for p in result.series) for result in told)
    return Answer(text=f"it fired in {fired} of {len(told)} runs", verdict="no" if fired else "yes")


def _splits(results: Sequence[Result]) -> Answer:
    said = split_headline(results)
    return Answer(text=said, verdict="new") if said else NOT_MEASURED


_ANSWERS: Mapping[str, Callable[[Sequence[Result]], Answer]] = {
    "knee": _knee,
    "bands": _bands,
    "detection": _detection,
    "flat-below": _flat_below,
    "spread-at": _spread_at,
    "adaptive-70b-5d": _adaptive("poa_hat", "throughput_rps", "ttft_p99_s"),
    "adaptive-70b-2d": _adaptive("poa_hat", "ttft_p99_s", "throughput_rps"),
    "adaptive-340b": _adaptive("poa_hat", "ttft_p99_s", "throughput_rps"),
    "third-regime": _third_regime,
    "splits": _splits,
}
