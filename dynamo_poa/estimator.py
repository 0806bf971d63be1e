"""Whether PoA-hat can be told from the snapshots of late, what it is, how sure that is, where the cost lies.

Owns: the window of priced snapshots; the conditions under which there is an estimate; PoA-hat per leg and
      overall with its 95 % interval; the shares of the excess.
Does not own: what a snapshot costs (snapshot.py), when one is taken (pricing.py), the paper's own estimate
              (frozen.py), which is never mixed with this one in a series.
Invariant: an estimate is finite and at least 1, or absent with a reason; never NaN, and never 1.0 for want of
           data. The same snapshots give the same estimate on every run.
Source: theory.md, Gamma_R: `marginal` and Uncertainty.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.bootstrap import moving_blocks
from dynamo_poa.snapshot import SnapshotPrice
from dynamo_poa.values import Estimate, Role, Shares

MIN_SNAPSHOTS = 8  # theory.md, with at least MIN_REQUESTS in each
MIN_REQUESTS = 2  # one alone plays no game
RESAMPLES = 400
MOST_ROWS = 1_000_000  # of resamples at once: those of a day's recording would take a gigabyte

Floats = NDArray[np.float64]


class MarginalEstimator:
    """The snapshots of the last `window_s` seconds, and what they say."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._prices: dict[Role, deque[SnapshotPrice]] = {}

    def add(self, prices: Iterable[SnapshotPrice]) -> None:
        """Take in the snapshots of one instant, one of each leg."""
        for priced in prices:
            self._prices.setdefault(priced.role, deque()).append(priced)

    def estimate(self, at_s: float) -> Estimate:
        """Return PoA-hat of the window that ends now; a leg without snapshots in it is forgotten."""
        for role, window in list(self._prices.items()):
            while window and at_s - window[0].at_s > self._window_s:
                window.popleft()
            if not window:
                del self._prices[role]
        return estimate_of(self._prices)


def estimate_of(windows: dict[Role, deque[SnapshotPrice]]) -> Estimate:
    """Estimate PoA-hat of each leg and of all legs together.

        poa_hat = sum over snapshots of observed / sum over snapshots of optimal

    Returns:  legs without an estimate are named in `reason` with what they lack.
    """
    legs = {str(role): _leg(window) for role, window in windows.items()}
    absent = [f"{role}: {leg.reason}" for role, leg in legs.items() if leg.poa_hat is None]
    reason = "; ".join(absent) or ("" if legs else "no decisions")
    priced = [_usable(window) for role, window in windows.items() if legs[str(role)].poa_hat is not None]
    if not priced:
        return Estimate(reason=reason, legs=legs)
    instants: dict[float, list[SnapshotPrice]] = {}  # legs looked at together are resampled together
    for price in sorted((price for window in priced for price in window), key=lambda price: price.at_s):
        instants.setdefault(price.at_s, []).append(price)
    return _estimate(list(instants.values()), reason, legs)


def _leg(window: Sequence[SnapshotPrice]) -> Estimate:
    usable = _usable(window)
    if len(usable) < MIN_SNAPSHOTS:
        lacks = window[-1].lack
        few = f"{len(usable)} snapshots with {MIN_REQUESTS} requests or more, {MIN_SNAPSHOTS} needed"
        return Estimate(reason=lacks or few)
    return _estimate([[price] for price in usable], "", {})


def _usable(window: Iterable[SnapshotPrice]) -> list[SnapshotPrice]:
    return [
        price for price in window if not price.lack and price.requests >= MIN_REQUESTS and price.optimal_s > 0
    ]


def _estimate(
    instants: Sequence[Sequence[SnapshotPrice]], reason: str, legs: dict[str, Estimate]
) -> Estimate:
    observed_s = np.array([sum(price.observed_s for price in prices) for prices in instants])
    optimal_s = np.array([sum(price.optimal_s for price in prices) for prices in instants])
    low, high = interval(observed_s, optimal_s)
    every = [price for prices in instants for price in prices]
    return Estimate(
        poa_hat=float(observed_s.sum() / optimal_s.sum()),
        low=low,
        high=high,
        samples=len(instants),
        requests=sum(price.requests for price in every) / len(instants),
        observed_s=float(observed_s.mean()),
        optimal_s=float(optimal_s.mean()),
        shares=shares(every),
        reason=reason,
        legs=legs,
    )


def shares(prices: Iterable[SnapshotPrice]) -> Shares | None:
    """Return where the cost beyond the unloaded comes from.

        miss + congestion = observed - optimal        capacity = optimal - unloaded

    Returns:  shares of observed - unloaded, summing to 1; None when there is no such cost.
    """
    every = list(prices)
    miss_s = sum(price.miss_s for price in every)
    congestion_s = sum(price.observed_s - price.optimal_s - price.miss_s for price in every)
    capacity_s = sum(price.optimal_s - price.unloaded_s for price in every)
    congestion_s = max(congestion_s, 0.0)  # rounding
    total_s = miss_s + congestion_s + capacity_s
    if total_s <= 0:
        return None
    return Shares(miss=miss_s / total_s, congestion=congestion_s / total_s, capacity=capacity_s / total_s)


def interval(observed_s: Floats, optimal_s: Floats, *, most_rows: int = MOST_ROWS) -> tuple[float, float]:
    """Return the 95 % interval of sum(observed) / sum(optimal) by a moving-block bootstrap.

    A request is in several snapshots in a row, which are therefore alike; one by one they would make the
    interval too narrow. It is never under 1.

    Args:    `(n,)` each, oldest first, n >= 1, 0 < optimal <= observed.  most_rows: held at once.
    Source:  bootstrap.py.
    """
    n = len(observed_s)
    blocks = moving_blocks(n, RESAMPLES)
    at_once = max(most_rows // n, 1)
    ratios = np.empty(RESAMPLES)
    for first in range(0, RESAMPLES, at_once):
        which = slice(first, first + at_once)
        rows = blocks.rows(which)
        ratios[which] = observed_s[rows].sum(axis=1) / optimal_s[rows].sum(axis=1)
    low, high = blocks.interval(float(observed_s.sum() / optimal_s.sum()), ratios)
    return max(low, 1.0), max(high, 1.0)
