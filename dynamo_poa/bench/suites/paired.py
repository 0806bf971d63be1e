"""Whether one policy is better than another on the same requests, and from when on that is more than noise.

Owns: how results are paired, the ratio of two policies' figures and its 95 % interval, the verdict; a
      figure's median over seeds with its interval.
Does not own: which figures are compared and how they are shown (page.py, summary.py).
Invariant: only cells that differ in nothing but their policy are paired; void and failed ones never are. From
           fewer than 3 seeds there is no verdict.
Source: the percentile bootstrap is too narrow for few seeds: of 3 values it covers their median's true value
        3 times in 4. Distances are therefore taken to both sides alike and widened as Hesterberg proposes for
        small samples (The American Statistician 69, 2015: `t` in place of `z`, and sqrt(n / (n - 1))).
        Simulated: 96 to 99 % for 3 to 15 seeds, normal and Laplace.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from scipy import stats

from dynamo_poa.bench.suites.cells import Cell, Result

LEAST_SEEDS = 3
MATERIAL = 0.005  # in virtual time less than that can be outside the noise; it is of no use to anybody
RESAMPLES = 1999
CONFIDENCE = 0.95
ROUNDING = 1e-9  # of sums and logarithms: equal figures are equal
MORE_IS_BETTER = frozenset({"throughput_rps", "output_tokens_per_s", "cached_frac", "hit_frac", "requests"})

Verdict = Literal["better", "worse", "no difference", "no verdict"]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A median over seeds and what it may be; without `low` and `high` there were too few seeds to say."""

    median: float
    low: float | None
    high: float | None
    seeds: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's figure over the baseline's: median ratio, 95 % interval, what to make of it.

    ratio:    None when nothing could be paired
    pairs:    that were compared, of so many `seeds`
    reason:   of there being no verdict
    """

    figure: str
    ratio: float | None
    low: float | None = None
    high: float | None = None
    verdict: Verdict = "no verdict"
    pairs: int
    seeds: int
    reason: str = ""

    @property
    def text(self) -> str:
        """Return it for a person: `-8.1 % (-9.0 to -7.2): better`, or why nothing is said."""
        if self.ratio is None or self.low is None or self.high is None:
            return f"{self.verdict}: {self.reason}"
        change, low, high = ((value - 1) * 100 for value in (self.ratio, self.low, self.high))
        return f"{change:+.1f} % ({low:+.1f} to {high:+.1f}): {self.verdict}"


def compare(results: Iterable[Result], baseline: Iterable[Result], figure: str) -> Comparison:
    """Compare two policies on the cells both have been through.

        per pair:  d = ln(figure of the policy / figure of the baseline)
        per seed:  v = m + mean over its pairs of (d - m_group)
                   m_group: mean of a group's d, m: mean of all m_group
        ratio = exp(median of v)        interval: median ± `half_width` of v, exponentiated

    The seed is what chance is made of, so seeds are resampled. Groups (fleet, workload, load) are what is
    asked about: they are held, and one that lacks a seed does not shift that seed's value. With one group v
    is d.

    Args:     results, baseline: each of one policy; void and failed ones are passed over.
    Returns:  `better` or `worse` when the whole interval lies to one side of 1 and the ratio is off it by
              `MATERIAL` at least, else `no difference`.
    """
    ours, theirs = _by_pair(results, figure), _by_pair(baseline, figure)
    both = [pair for pair in ours if pair in theirs]
    equal = {pair for pair in both if ours[pair][1] == theirs[pair][1]}  # 0 and 0 too
    no_ratio = [pair for pair in both if pair not in equal and min(ours[pair][1], theirs[pair][1]) <= 0]
    groups: dict[str, list[tuple[int, float]]] = {}
    for pair in both:
        if pair not in no_ratio:
            cell, value = ours[pair]
            ratio = 1.0 if pair in equal else value / theirs[pair][1]
            groups.setdefault(cell.question, []).append((cell.seed, math.log(ratio)))
    values = _by_seed(groups)
    pairs = sum(len(group) for group in groups.values())
    median = float(np.median(values)) if len(values) else None
    result = Comparison(
        figure=figure,
        ratio=None if median is None else math.exp(median),
        pairs=pairs,
        seeds=len(values),
    )
    if no_ratio:
        reason = f"{figure} is 0 on one side of {len(no_ratio)} of {len(both)} pairs"
        return msgspec.structs.replace(result, reason=reason)
    if median is None or len(values) < LEAST_SEEDS:
        reason = f"{len(values)} of at least {LEAST_SEEDS} paired seeds"
        return msgspec.structs.replace(result, reason=reason)
    half = half_width(values)
    low, high = math.exp(median - half), math.exp(median + half)
    verdict: Verdict = "no difference"
    if (low > 1 + ROUNDING or high < 1 - ROUNDING) and abs(math.exp(median) - 1) >= MATERIAL:
        more = figure.rpartition(".")[2] in MORE_IS_BETTER
        verdict = "better" if (low > 1) == more else "worse"
    return msgspec.structs.replace(result, low=low, high=high, verdict=verdict)


def typical(results: Iterable[Result], figure: str) -> Interval | None:
    """Return a figure's median over seeds, of results that differ in their seed alone; None of none."""
    values = [value for _, value in _by_pair(results, figure).values()]
    if not values:
        return None
    median = float(np.median(values))
    half = half_width(values) if len(values) >= LEAST_SEEDS else None
    low, high = (None, None) if half is None else (median - half, median + half)
    return Interval(median=median, low=low, high=high, seeds=len(values))


def half_width(values: Sequence[float]) -> float:
    """Return how far the median may be off, by a bootstrap over the values that is the same every time.

    quantile_95(|median of a resample - median|) * t_{n-1}(0.975) / z(0.975) * sqrt(n / (n - 1))
    """
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    off = np.abs(np.median(array[drawn], axis=1) - np.median(array))
    tail = (1 + CONFIDENCE) / 2
    widened = float(stats.t.ppf(tail, n - 1)) / float(stats.norm.ppf(tail)) * math.sqrt(n / (n - 1))
    return float(np.quantile(off, CONFIDENCE)) * widened


def _by_seed(groups: dict[str, list[tuple[int, float]]]) -> list[float]:
    if not groups:
        return []
    means = {name: sum(d for _, d in group) / len(group) for name, group in groups.items()}
    overall = sum(means.values()) / len(means)
    rest: dict[int, list[float]] = {}
    for name, group in groups.items():
        for seed, d in group:
            rest.setdefault(seed, []).append(d - means[name])
    return [overall + sum(of_seed) / len(of_seed) for _, of_seed in sorted(rest.items())]


def _by_pair(results: Iterable[Result], figure: str) -> dict[str, tuple[Cell, float]]:
    return {
        result.cell.pair: (result.cell, result.figures[figure])
        for result in results
        if result.state == "done" and figure in result.figures
    }
