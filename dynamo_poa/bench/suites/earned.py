"""Whether the policies that are to be left on have earned it: what is asked of them, beside what they did.

Owns: what is asked (issue 6), on which fleet and against what; when it is met.
Does not own: pairing and intervals (paired.py), the suites (catalogue.py, variants.py), layout
              (results_doc.py).
Invariant: everything is against Dynamo's KV routing at its defaults in the same run. `met` needs the median
           over seeds to reach what is asked and the whole 95 % interval to lie on the better side; what was
           not measured is `not measured`, never met. The paper's table stands beside, and is asked nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from dynamo_poa.bench.suites import arranged, variants
from dynamo_poa.bench.suites.baselines import DEFAULT
from dynamo_poa.bench.suites.cells import Cell, Fleet, Result
from dynamo_poa.bench.suites.paired import MORE_IS_BETTER, Comparison, compare
from dynamo_poa.bench.suites.standing import COMPARED, percent
from dynamo_poa.bench.suites.tables import Table, Text

AUTO, MARGINAL, THE_PAPERS = "ours auto", "ours marginal", "ours active"
POLICIES = (AUTO, MARGINAL, THE_PAPERS)
SUITES = ("hetero", "workloads-live")
HARM = 1.03  # so much worse is too much, once the whole interval is beyond it
KEPT = ("ttft_mean_s", "ttft_p99_s", "e2e_p99_s", "throughput_rps")  # that no policy may make worse
LEARNED_S = 60.0

Verdict = Literal["met", "missed", "not measured"]


class Found(NamedTuple):
    """What one policy did of what was asked; `text` says it with its interval."""

    text: str
    verdict: Verdict


def _times(ratio: float) -> str:
    return f"{1 / ratio:.2g}x"


class Aim(NamedTuple):
    """A figure over the default's to be reached: at most `ratio`, or at least where more is better."""

    figure: str
    ratio: float

    @property
    def many_times(self) -> bool:
        """Tell whether it is so much that a person counts in times, not in percent."""
        return self.ratio < 0.8

    @property
    def asked(self) -> str:
        """Return it for a person."""
        name = COMPARED[self.figure]
        if self.figure in MORE_IS_BETTER:
            return f"{name} ≥ {percent(self.ratio)}"
        return f"{name} ≥ {_times(self.ratio)} better" if self.many_times else f"{name} {percent(self.ratio)}"

    def reached(self, ratio: float) -> bool:
        """Tell whether a ratio is what is asked or better."""
        return ratio >= self.ratio if self.figure in MORE_IS_BETTER else ratio <= self.ratio

    def said(self, ratio: float) -> str:
        """Return a ratio for a person, in the words of what is asked."""
        return f"{_times(ratio)} better" if self.many_times else percent(ratio)


class Question(NamedTuple):
    """A row of the verdict.

    each:  both policies have to, else one of them
    find:  of one policy's results, the default's, and all of the fleet's
    """

    what: str
    asked: str
    find: Callable[[Sequence[Result], Sequence[Result]], Found]
    each: bool = False


NOT_MEASURED = Found("", "not measured")


def of_aim(aim: Aim, fleet: str, baseline_fleet: str = "") -> Callable[..., Found]:
    """Return what finds whether an aim was reached on a fleet."""

    def find(own: Sequence[Result], default: Sequence[Result]) -> Found:
        mine, theirs = _on(own, fleet), _on(default, baseline_fleet or fleet)
        if baseline_fleet:
            mine, theirs = _alike(mine), _alike(theirs)
        found = compare(mine, theirs, aim.figure)
        if found.ratio is None or found.low is None or found.high is None:
            return Found(found.reason, "not measured") if found.pairs else NOT_MEASURED
        met = aim.reached(found.ratio) and found.verdict == "better"
        if aim.ratio == 1:  # it is enough not to be worse
            met = found.verdict != "worse"
        return Found(f"{aim.said(found.ratio)} ({_interval(found, aim)})", "met" if met else "missed")

    return find


def of_learning(aims: Sequence[Aim], fleet: str) -> Callable[..., Found]:
    """Return what finds whether aims were reached by the first cell of a graph, and after how long a load."""

    def find(own: Sequence[Result], default: Sequence[Result]) -> Found:
        timed = [result for result in _on(own, fleet) if "loaded_s" in result.health]
        theirs = {result.cell.pair: result for result in _on(default, fleet)}
        paired = [
            result
            for result in timed
            if result.cell.pair in theirs
            and all(aim.figure in one.figures for one in (result, theirs[result.cell.pair]) for aim in aims)
        ]
        if not paired:
            return NOT_MEASURED
        first = min(paired, key=lambda result: result.health["loaded_s"])
        against, after_s = theirs[first.cell.pair], first.health["loaded_s"]
        ratios = [first.figures[aim.figure] / against.figures[aim.figure] for aim in aims]
        told = ", ".join(
            f"{COMPARED[aim.figure]} {aim.said(ratio)}" for aim, ratio in zip(aims, ratios, strict=True)
        )
        if after_s > LEARNED_S:
            return Found(f"first measured after {after_s:.0f} s of load", "not measured")
        met = all(aim.reached(ratio) for aim, ratio in zip(aims, ratios, strict=True))
        return Found(f"after {after_s:.0f} s of load: {told}", "met" if met else "missed")

    return find


def no_harm(own: Sequence[Result], default: Sequence[Result]) -> Found:
    """Find whether no figure of any group is worse by more than `HARM` beyond the noise.

    worse: the whole 95 % interval lies beyond; open: a part of it does, so that nothing is shown either way
    """
    compared = [
        (group, figure, found)
        for group, figures in harms(own, default).items()
        for figure, found in figures.items()
    ]
    told = [one for one in compared if one[2].low is not None]
    if not told:
        return NOT_MEASURED
    worse = [one for one in told if _harmful(one[2], one[2].low, one[2].high)]
    unsure = [one for one in told if one not in worse and not _harmless(one[2])]
    text = f"{len(worse)} of {len(told)} figures of {len({group for group, *_ in told})} groups worse"
    if worse:
        text += ": " + "; ".join(f"{g}: {COMPARED[f]} {percent(c.ratio)}" for g, f, c in worse)
    text += f"; {len(unsure)} open" if unsure else ""
    text += f"; {len(compared) - len(told)} of too few seeds" if len(compared) > len(told) else ""
    return Found(text, "missed" if worse else "met")


def no_more_failures(own: Sequence[Result], default: Sequence[Result]) -> Found:
    """Find whether no larger share of requests failed: one that failed is in no latency."""
    theirs = {result.cell.pair for result in default}
    mine = [result for result in own if result.cell.pair in theirs]
    if not mine:
        return NOT_MEASURED
    pairs = {result.cell.pair for result in mine}
    failed, asked = _failures(mine)
    base_failed, base_asked = _failures([result for result in default if result.cell.pair in pairs])
    text = f"{failed:,.0f} of {asked:,.0f} requests, {base_failed:,.0f} of {base_asked:,.0f} of the default's"
    return Found(text, "met" if failed * base_asked <= base_failed * asked else "missed")


def harms(own: Sequence[Result], default: Sequence[Result]) -> dict[str, dict[str, Comparison]]:
    """Return each group's figures that may not become worse, a policy's over the default's."""
    mine, theirs = (arranged.grouped(some, lambda result: result.cell.group) for some in (own, default))
    return {
        group: {figure: compare(results, theirs[group], figure) for figure in KEPT}
        for group, results in mine.items()
        if group in theirs
    }


def _harmful(found: Comparison, low: float | None, high: float | None) -> bool:
    """Tell whether the better end of an interval is worse than `HARM` still."""
    assert low is not None
    assert high is not None
    return high < 1 / HARM if found.figure in MORE_IS_BETTER else low > HARM


def _harmless(found: Comparison) -> bool:
    """Tell whether even the worse end is not."""
    return not _harmful(found, found.high, found.low)


_FIVE = (Aim("e2e_p99_s", 1 / 3), Aim("throughput_rps", 1.25))
_SLOW = {"aggregated": variants.SLOW_AGGREGATED, "decode pool": variants.SLOW_DECODE}


def _questions() -> Iterable[Question]:
    everywhere = "every workload and fleet variant"
    kept = ", ".join(COMPARED[figure] for figure in KEPT)
    yield Question(everywhere, f"{kept}: never worse by more than 3 % beyond noise", no_harm, each=True)
    yield Question(everywhere, "requests that fail: no larger share", no_more_failures, each=True)
    for pool, fleet in _SLOW.items():
        for aim in _FIVE:
            yield Question(f"one worker 5x slower, {pool}", aim.asked, of_aim(aim, fleet))
        learned = f"both, learned within {LEARNED_S:.0f} s"
        yield Question(f"one worker 5x slower, {pool}", learned, of_learning(_FIVE, fleet))
    for what, fleet, aim in (
        ("a worker stalling 2 s in every 6 (R6)", variants.STALLING, Aim("e2e_p99_s", 1 / 1.5)),
        ("prefill-bound, Zipf prefixes", variants.PREFILL_BOUND, Aim("ttft_mean_s", 0.92)),
        ("decode-bound, short prompts", variants.DECODE_BOUND, Aim("ttft_mean_s", 0.90)),
        ("4 routers without replica sync", variants.FOUR_ROUTERS, Aim("ttft_p99_s", 0.90)),
    ):
        yield Question(what, aim.asked, of_aim(aim, fleet))
    alone = of_aim(Aim("ttft_p99_s", 1.0), variants.FOUR_ROUTERS, variants.PREFILL_BOUND)
    yield Question("4 routers without replica sync", "TTFT P99 no worse than one static router's", alone)


QUESTIONS = tuple(_questions())


def verdict(results: Sequence[Result]) -> Table:
    """Return the table of what was asked and what each policy did of it.

    Args:  results: of `hetero` and `workloads-live`.
    """
    rows = []
    for question in QUESTIONS:
        found = [question.find(_of(results, name), _of(results, DEFAULT.name)) for name in POLICIES]
        rows.append(
            (
                Text(question.what),
                Text(question.asked),
                *map(_field, found),
                _overall(found[:-1], question.each),
            )
        )
    return Table(
        title="Have the policies earned their place",
        columns=("suite", "asked", *POLICIES[:-1], f"{THE_PAPERS} (the paper's table)", "verdict"),
        rows=tuple(rows),
        note=f"Against {DEFAULT.name}, Dynamo's KV routing at its defaults, in the same run: medians over "
        "pairs of the same fleet, workload, load and seed, with their 95 % intervals. `met`: the median "
        "reaches it and the whole interval is on the better side. Worse: the whole interval is beyond 3 % "
        "worse; open: a part of it is. The verdict is of auto and marginal: the first two rows ask it of "
        "both, the others of one. Cases R1, R2, R3, R6 and R7 are tests: "
        "`tests/integration/test_cases_routing.py`.",
    )


def everywhere(results: Sequence[Result]) -> Table | None:
    """Return what the first row counts: each group's figures under each policy; None when there are none."""
    default = _of(results, DEFAULT.name)
    by_policy = {name: harms(_of(results, name), default) for name in POLICIES}
    groups = dict.fromkeys(group for found in by_policy.values() for group in found)
    if not groups:
        return None
    return Table(
        title="Every workload and fleet variant",
        columns=("fleet | workload | load", *POLICIES),
        rows=tuple(
            (Text(group), *(_kept(by_policy[name].get(group, {})) for name in POLICIES)) for group in groups
        ),
        note=f"Change of {', '.join(COMPARED[figure] for figure in KEPT)}, in this order. ▲: better outside "
        "the noise; ▼: worse by more than 3 % beyond it.",
    )


def _kept(figures: dict[str, Comparison]) -> Text:
    told = {figure: found for figure, found in figures.items() if found.ratio is not None}
    if not told:
        return Text("not measured")
    marks = {figure: _mark(found) for figure, found in told.items()}
    text = ", ".join(f"{percent(found.ratio)}{marks[figure]}" for figure, found in told.items())
    return Text(text, verdict="worse" if "▼" in marks.values() else "")


def _mark(found: Comparison) -> str:
    if found.low is None:
        return ""
    if _harmful(found, found.low, found.high):
        return "▼"
    return "▲" if found.verdict == "better" else ""


def _field(found: Found) -> Text:
    return Text(found.verdict, found.text)


def _overall(found: Sequence[Found], each: bool) -> Text:
    """Return the row's: of all policies where `each` has to, else of the best."""
    verdicts = {one.verdict for one in found}
    order: tuple[Verdict, ...] = (
        ("missed", "not measured", "met") if each else ("met", "missed", "not measured")
    )
    overall = next(one for one in order if one in verdicts)
    return Text(overall, verdict={"met": "better", "missed": "worse"}.get(overall, ""))


def _of(results: Iterable[Result], policy: str) -> tuple[Result, ...]:
    return tuple(result for result in arranged.done(results) if result.cell.policy.name == policy)


def _on(results: Iterable[Result], fleet: str) -> tuple[Result, ...]:
    return tuple(result for result in results if result.cell.fleet.name == fleet)


def _alike(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return results as if of one fleet and one length, so that different fleets' can be paired."""
    return tuple(msgspec.structs.replace(result, cell=_bare(result.cell)) for result in results)


def _bare(cell: Cell) -> Cell:
    fleet = Fleet(name="", prefill=0, decode=1)
    return msgspec.structs.replace(cell, fleet=fleet, learn_s=0.0, warm_up_s=0.0, seconds=0.0)


def _failures(results: Iterable[Result]) -> tuple[float, float]:
    counts = [(r.figures.get("failed", 0.0), r.figures.get("requests", 0.0)) for r in results]
    failed = sum(count for count, _ in counts)
    return failed, failed + sum(answered for _, answered in counts)


def _interval(found: Comparison, aim: Aim) -> str:
    assert found.low is not None
    assert found.high is not None
    ends = (found.high, found.low) if aim.many_times else (found.low, found.high)
    return " to ".join(_times(end) if aim.many_times else percent(end) for end in ends)
