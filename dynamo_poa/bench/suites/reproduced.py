"""Whether our results bear out what the paper reports.

Owns: for each of the paper's claims, what ours say and whether that is the same.
Does not own: the claims (paper_figures.py), comparisons (paired.py), layout (results_doc.py).
Invariant: a claim without data is `not measured`, never reproduced. `yes` is for the paper's own quantity, at
           least as large as it reports and outside the noise; a smaller effect or another quantity is
           `partly` at most. What we have arranged ourselves is `not judged`. Ratios are judged, levels not.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.cells import Phase, Result
from dynamo_poa.bench.suites.paired import Comparison, Interval, compare, typical
from dynamo_poa.bench.suites.paper_figures import Claim
from dynamo_poa.bench.suites.standing import against_default, percent, split_headline
from dynamo_poa.values import REGIMES, Regime

Verdict = Literal["yes", "partly", "no", "not judged", "not measured", "new"]
# Adaptive over static, saturated: by how much PoA-hat falls.
PAPER_70B_5D, PAPER_70B_2D, PAPER_340B = 21.5 / 66.4, 1 / 2.2, 5.9 / 28.3
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
    """Return the cells of the claim's topology and model; without any of the model, those of no profile."""
    here = tuple(r for r in results if claim.topology in ("", r.cell.fleet.topology))
    if not claim.model:
        return here
    return tuple(r for r in here if claim.model in r.cell.fleet.profile) or tuple(
        r for r in here if not r.cell.fleet.profile
    )


def _by_load(results: Sequence[Result]) -> dict[str, dict[float, tuple[Result, ...]]]:
    """Return the steady cells that told a PoA-hat, by fleet and by load, the lightest first."""
    told = [result for result in results if "poa_hat" in result.figures and not result.cell.phases]
    return {
        name: dict(sorted(arranged.grouped(cells, _users).items()))
        for name, cells in arranged.grouped(told, lambda result: result.cell.fleet.name).items()
    }


def _static(results: Sequence[Result]) -> tuple[Result, ...]:
    """Return the cells of our router that changes nothing: one policy, for medians and pairs are of one."""
    static = tuple(result for result in results if result.cell.policy.plugin in ("off", "shadow"))
    shadow = tuple(result for result in static if result.cell.policy.plugin == "shadow")
    return shadow or static


def _users(result: Result) -> float:
    return arranged.place(result.cell.load).value


def _knee(results: Sequence[Result]) -> Answer:
    """Tell where the knee is; not whether that is as in the paper: our workers' batch was chosen for it."""
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
    return Answer(
        text=f"first load past `below`, users: {text}; by our choice of the workers' batch, so no evidence",
        verdict="not judged",
    )


def _bands(results: Sequence[Result]) -> Answer:
    parts, seen = list[str](), list[bool]()
    for name, loads in _by_load(_static(results)).items():
        by_regime: dict[Regime, list[Result]] = {}
        for cells in loads.values():
            if (regime := arranged.regime(cells)) is not None:
                by_regime.setdefault(regime, []).extend(cells)
        medians = {regime: typical(by_regime.get(regime, ()), "poa_hat") for regime in REGIMES}
        told = {regime: found for regime, found in medians.items() if found is not None}
        if told:
            parts.append(f"{name}: " + ", ".join(f"{regime} {i.median:.2f}" for regime, i in told.items()))
            rising = all(_clearly_less(low, high) for low, high in itertools.pairwise(told.values()))
            seen.append(rising and len(told) == len(REGIMES))
    if not parts:
        return NOT_MEASURED
    return Answer(
        text="median PoA-hat by regime: " + "; ".join(parts),
        verdict="yes" if all(seen) else "partly" if any(seen) else "no",
    )


def _clearly_less(one: Interval, other: Interval) -> bool:
    """Tell whether it is so outside the noise: their 95 % intervals do not touch."""
    return one.high is not None and other.low is not None and one.high < other.low


def _detection(results: Sequence[Result]) -> Answer:
    told = [result for result in results if result.series and len(result.cell.phases) > 1]
    if not told:
        return NOT_MEASURED
    apart = []
    for result in told:
        light, heavy = _regime_in(result, min), _regime_in(result, max)
        apart.append(light is Regime.BELOW and heavy not in (None, Regime.BELOW))
    return Answer(
        text=f"`below` under the lightest load and past it under the heaviest, most of the time: in "
        f"{sum(apart)} of {len(apart)} runs",
        verdict="yes" if all(apart) else "partly" if any(apart) else "no",
    )


def _regime_in(result: Result, which: Callable[..., Phase]) -> Regime | None:
    """Return the regime told most of the time in the lightest (`min`) or the heaviest (`max`) phase."""
    phase = which(result.cell.phases, key=lambda phase: arranged.place(phase.load).value)
    points = tuple(point for point in result.series if point.phase == phase.name)
    return arranged.regime([msgspec.structs.replace(result, series=points)])


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
        verdict="partly" if differ < settings / 2 else "no",  # the paper's is PoA-hat
    )


def _spread_at(results: Sequence[Result]) -> Answer:
    grid = list(_grid(results).items())
    if len(grid) < 2:
        return NOT_MEASURED
    (low, (few, _, before)), (high, (many, _, after)) = grid[0], grid[-1]
    ratio = after / before if before else float("inf")
    return Answer(
        text=f"spread of mean TTFT {before:.1%} ({low}) and {after:.1%} ({high}): {ratio:.1f} times",
        verdict="partly" if ratio > 1 and many > few else "no",  # the paper's is PoA-hat, and 37 times
    )


def heaviest_phase(results: Sequence[Result]) -> str:
    """Return what stands before the figures of the phase with the highest load."""
    phases = [phase for result in results for phase in result.cell.phases]
    top = max(phases, key=lambda phase: arranged.place(phase.load).value, default=None)
    return "" if top is None else f"{top.name}."


def _adaptive(paper_ratio: float, *figures: str) -> Callable[[Sequence[Result]], Answer]:
    """Return what judges adaptive against static in the heaviest phase: the first figure decides.

    Args:     paper_ratio: that figure's, adaptive over static, as the paper has it.
    """

    def judge(results: Sequence[Result]) -> Answer:
        phase = heaviest_phase(results)
        ours = [r for r in results if r.cell.policy.plugin == "active"]
        ours = [r for r in ours if r.cell.policy.table == THE_PAPERS_TABLE]
        static = _static(results)
        parts, found_by = list[str](), dict[str, Comparison]()
        for figure in figures:
            found = compare(ours, static, phase + figure)
            if found.pairs:
                parts.append(f"{NAMES[figure]} {_said(found)}")
                found_by[figure] = found
        if not parts:
            return NOT_MEASURED
        text = f"{arranged.phase_name(phase) or 'one load'}: " + "; ".join(parts)
        first = found_by.get(figures[0])
        if first is None or first.low is None:
            return Answer(text=text, verdict="not measured")
        if first.verdict != "better":
            return Answer(text=text, verdict="no")
        return Answer(text=text, verdict="yes" if first.low <= paper_ratio else "partly")

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
    "adaptive-70b-5d": _adaptive(PAPER_70B_5D, "poa_hat", "throughput_rps", "ttft_p99_s"),
    "adaptive-70b-2d": _adaptive(PAPER_70B_2D, "poa_hat", "ttft_p99_s", "throughput_rps"),
    "adaptive-340b": _adaptive(PAPER_340B, "poa_hat", "ttft_p99_s", "throughput_rps"),
    "third-regime": _third_regime,
    "splits": _splits,
}
