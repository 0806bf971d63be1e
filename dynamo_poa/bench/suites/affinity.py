"""What becomes of the caches when the router cares less for what they hold: the suite `caching`.

Owns: its fleet, its load and the settings of ω; the table of what telemetry said, and whether it rose.
Does not own: the estimate (placement.py), how a cell is run (live.py), intervals and verdicts (paired.py).
Invariant: the settings are static: no policy moves them. The caches together hold less than what is asked
           for, or the best placement would cost nothing and there would be no ratio.
Source: issue 7: duplication and PoA-hat of caching rise as ω falls.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result
from dynamo_poa.bench.suites.paired import compare, typical
from dynamo_poa.bench.suites.tables import Table, Text, compared, typical_text
from dynamo_poa.workloads.arrivals import Poisson
from dynamo_poa.workloads.synthetic import Zipf

SUITE = "caching"
WEIGHTS = (1.0, 0.5, 0.0)
# 60 prefixes of 28 blocks each are asked for, of four caches of 320: were there no other blocks, three in
# four would find room in all of them together, and one in five in a single one. At this speed the load of
# workers weighs about as much as what they hold: with less of it any ω above 0 would do the same.
FLEET = Fleet(name="small KV caches", prefill=4, decode=4, speedup=0.25, kv_blocks=320)
CONTENT = Zipf(prefixes=60, output_tokens=8, shared_frac=0.9)
LOAD = Poisson(rate_rps=40.0)
# The estimate looks back as far as is measured, and so does the demand each look is priced on.
SECONDS = 15.0
FIGURES = {
    "poa_caching": "PoA-hat of caching",
    "duplication": "copies of a block",
    "hit_frac": "prompt tokens found cached",
    "caching_observed_s": "fetching and recomputing (s/s)",
    "caching_optimal_s": "at best (s/s)",
    "ttft_mean_s": "TTFT mean (s)",
}
RISING = ("poa_caching", "duplication")


def policy(overlap_weight: float) -> Policy:
    """Return our router with a static ω, its controller watching."""
    return Policy(name=f"ω={overlap_weight:g}", plugin="off", overlap_credit=overlap_weight)


def cells(suite: str, seeds: Iterable[int]) -> Iterator[Cell]:
    """Yield the suite's cells."""
    for seed in seeds:
        for overlap_weight in WEIGHTS:
            yield Cell(
                suite=suite,
                engine="live",
                fleet=FLEET,
                content=CONTENT,
                load=LOAD,
                policy=policy(overlap_weight),
                seed=seed,
                warm_up_s=SECONDS,
                seconds=SECONDS,
            )


def told(results: Sequence[Result]) -> Iterator[Table]:
    """Yield what telemetry said of the caches, setting by setting; nothing where it said nothing."""
    data = [r for r in arranged.done(results) if r.cell.suite == SUITE and "duplication" in r.figures]
    by_weight = arranged.grouped(data, lambda result: result.cell.policy.overlap_credit)
    if not by_weight:
        return
    weights = sorted(by_weight, reverse=True)
    yield Table(
        title="What the caches hold, by ω",
        columns=("ω", *FIGURES.values()),
        rows=tuple(
            (Text(f"{weight:g}"), *(typical_text(typical(by_weight[weight], key), key) for key in FIGURES))
            for weight in weights
        ),
        note="Medians over seeds with 95 % intervals, from the controller's telemetry: copies are the mean "
        f"over what was measured, the others its last word, which looks back {SECONDS:g} s and of hits 256 "
        f"decisions. {rising(data)}",
    )
    first, *others = weights
    yield Table(
        title=f"What the caches hold against ω = {first:g}",
        columns=("ω", *FIGURES.values()),
        rows=tuple(
            (
                Text(f"{weight:g}"),
                *(compared(compare(by_weight[weight], by_weight[first], key)) for key in FIGURES),
            )
            for weight in others
        ),
        note="Change of the median over seeds, with its 95 % interval.",
    )


def rising(results: Sequence[Result]) -> str:
    """Say in how many seeds each figure is higher at the lowest ω than at the highest, and always rises."""
    by_seed = arranged.grouped(results, lambda result: result.cell.seed)
    said = []
    for key in RISING:
        courses = [
            [
                result.figures[key]
                for result in sorted(members, key=lambda result: -result.cell.policy.overlap_credit)
                if key in result.figures
            ]
            for members in by_seed.values()
        ]
        whole = [course for course in courses if len(course) == len(WEIGHTS)]
        higher = sum(course[0] < course[-1] for course in whole)
        rose = sum(all(a < b for a, b in itertools.pairwise(course)) for course in whole)
        lacking = len(courses) - len(whole)
        said.append(
            f"{FIGURES[key]}: higher at the lowest ω than at the highest in {higher} of {len(whole)} seeds, "
            f"higher with every step in {rose}" + f" ({lacking} lack a figure)" * bool(lacking)
        )
    return "; ".join(said) + "."
