"""What a snapshot of a leg's requests costs where they are, and the least it could cost.

Owns: the cost of an assignment and its exact optimum, on the prefill and on the decode leg; what is refused.
Does not own: the search (slots.py), the measured seconds that come in (latency.py), which requests make a
              snapshot, the price of decision windows (frozen.py).
Invariant: arrays in, numbers out. Both sides are priced by the same model, so an optimum never exceeds the
           cost of any assignment.
Source: theory.md, Γ_R. Prefill: Horn 1973; Bruno, Coffman and Sethi 1974. Decode: marginal costs of a convex
        congestion game.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamo_poa.errors import GameError, NotConvexError
from dynamo_poa.games.slots import best_assignment

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MOST_S = 1e12  # far beyond any queue, and sums of squares of it are still finite
_CONVEX_ROUNDING = 1e-9  # k * (a + b * k) is linear or convex on paper and rounded in floats


class Assignment(NamedTuple):
    """What an assignment costs, and the worker of each request, `(n,)`."""

    cost_s: float
    workers: Indices


def prefill_cost(processing_s: ArrayLike, backlog_s: ArrayLike, workers: ArrayLike) -> float:
    """Return the sum of completion times, each worker serving the shortest first.

        cost_s = sum over r of backlog_s[w] + k * processing_s[r, w]     w = workers[r], r k-th from last on w

    which is the least sum any order gives: r delays itself and the k - 1 behind it.

    Args:     processing_s: `(n, m)`.  backlog_s: `(m,)`, before any of them starts.  workers: `(n,)`.
    Raises:   GameError.
    """
    leg = _prefill_leg(processing_s, backlog_s)
    return leg.cost_s(_chosen(workers, leg.shape))


def prefill_optimum(processing_s: ArrayLike, backlog_s: ArrayLike) -> Assignment:
    """Return the assignment with the least prefill cost: `prefill_cost` of it, and the workers.

    Slot (w, k), k-th from last on w, costs k * processing_s[r, w] + backlog_s[w], and the least sum of
    completion times on unrelated machines is the cheapest matching of requests to slots.

    Args:     processing_s: `(n, m)`.  backlog_s: `(m,)`.
    Returns:  (0.0, empty) without requests.
    Raises:   GameError.
    """
    leg = _prefill_leg(processing_s, backlog_s)
    return _optimum(leg)


def decode_cost(iteration_s: ArrayLike, extra_s: ArrayLike, workers: ArrayLike) -> float:
    """Return what a decode assignment costs: every request bears its worker's iteration and its own extra.

        cost_s = sum over w of x[w] * iteration_s[w, x[w]] + sum over r of extra_s[r, workers[r]]

    Args:     iteration_s: `(m, n + 1)`; [w, k] is what each of k requests on w bears, [w, 0] = 0.
              extra_s: `(n, m)`.  workers: `(n,)`; x[w] of them are w.
    Raises:   GameError; NotConvexError when k * iteration_s[w, k] is not convex in k.
    """
    leg = _decode_leg(iteration_s, extra_s)
    return leg.cost_s(_chosen(workers, leg.shape))


def decode_optimum(iteration_s: ArrayLike, extra_s: ArrayLike) -> Assignment:
    """Return the assignment with the least decode cost: `decode_cost` of it, and the workers.

    The k-th request on w adds k * iteration_s[w, k] - (k - 1) * iteration_s[w, k - 1]: what slot (w, k) costs
    on top of extra_s[r, w]. By convexity it grows with k, so a matching fills slots from the first on.

    Args:     iteration_s: `(m, n + 1)`.  extra_s: `(n, m)`.
    Returns:  (0.0, empty) without requests.
    Raises:   GameError; NotConvexError when k * iteration_s[w, k] is not convex in k.
    """
    leg = _decode_leg(iteration_s, extra_s)
    return _optimum(leg)


class _PrefillLeg:
    def __init__(self, processing_s: Floats, backlog_s: Floats) -> None:
        self.processing_s, self.backlog_s = processing_s, backlog_s
        self.shape: tuple[int, int] = (processing_s.shape[0], processing_s.shape[1])
        self._by_worker = np.ascontiguousarray(processing_s.T)

    def cost_s(self, workers: Indices) -> float:
        own_s = self.processing_s[np.arange(len(workers)), workers]
        return float((self.positions(workers) * own_s).sum() + self.backlog_s[workers].sum())

    def start(self) -> Indices:
        """Shortest first, each to where it is done soonest: optimal when the workers are equally fast."""
        workers, free_at_s = np.empty(len(self.processing_s), dtype=np.intp), self.backlog_s.copy()
        for request in np.argsort(self.processing_s.min(axis=1), kind="stable").tolist():
            done_at_s = free_at_s + self.processing_s[request]
            worker = done_at_s.argmin()
            free_at_s[worker], workers[request] = done_at_s[worker], worker
        return workers

    def positions(self, workers: Indices) -> Indices:
        return _ranks(workers, -self.processing_s[np.arange(len(workers)), workers])

    def slot_cost(self, worker: Indices, position: Indices) -> Floats:
        cost_s: Floats = self.processing_s[:, worker] * position + self.backlog_s[worker]
        return cost_s

    def joining(self, workers: Indices, changed: Iterable[int], cost_s: Floats) -> None:
        # Beside another request, the shorter of the two delays the longer: together that costs min(p, p').
        for worker in changed:
            joins_s, there = self._by_worker[worker], np.flatnonzero(workers == worker)
            beside_s = np.minimum.outer(joins_s[there], joins_s).sum(axis=0)
            cost_s[:, worker] = self.backlog_s[worker] + joins_s + beside_s
            cost_s[there, worker] -= joins_s[there]  # beside itself


class _DecodeLeg:
    def __init__(self, iteration_s: Floats, extra_s: Floats) -> None:
        self.iteration_s, self.extra_s = iteration_s, extra_s
        self.shape: tuple[int, int] = (extra_s.shape[0], extra_s.shape[1])
        self.added_s = _marginal(iteration_s)  # (m, n): by the k-th request, at [w, k - 1]

    def cost_s(self, workers: Indices) -> float:
        on = np.bincount(workers, minlength=self.shape[1])
        shared_s = on * self.iteration_s[np.arange(len(on)), on]
        return float(shared_s.sum() + self.extra_s[np.arange(len(workers)), workers].sum())

    def start(self) -> Indices:
        """One after another, each to where it adds least."""
        requests, count = self.shape
        workers, on = np.empty(requests, dtype=np.intp), np.zeros(count, dtype=np.intp)
        next_s = self.added_s[:, 0].copy()
        for request in range(requests):
            worker = (next_s + self.extra_s[request]).argmin()
            workers[request] = worker
            on[worker] += 1
            if on[worker] < requests:
                next_s[worker] = self.added_s[worker, on[worker]]
        return workers

    def positions(self, workers: Indices) -> Indices:
        return _ranks(workers, np.zeros(len(workers)))

    def slot_cost(self, worker: Indices, position: Indices) -> Floats:
        cost_s: Floats = self.extra_s[:, worker] + self.added_s[worker, position - 1]
        return cost_s

    def joining(self, workers: Indices, changed: Iterable[int], cost_s: Floats) -> None:
        requests, count = self.shape
        on, every = np.bincount(workers, minlength=count), np.arange(count)
        # With all n on one worker nobody is left to join it; the column then is its own members' alone.
        cost_s[:] = self.extra_s + self.added_s[every, np.minimum(on, requests - 1)]
        rows = np.arange(requests)
        cost_s[rows, workers] = self.extra_s[rows, workers] + self.added_s[workers, on[workers] - 1]


def _optimum(leg: _PrefillLeg | _DecodeLeg) -> Assignment:
    if not leg.shape[0]:
        return Assignment(0.0, np.empty(0, dtype=np.intp))
    workers = best_assignment(leg)
    return Assignment(leg.cost_s(workers), workers)


def _ranks(workers: Indices, key: Floats) -> Indices:
    """Number the requests of each worker from 1, in ascending order of `key`."""
    order = np.lexsort((key, workers))
    before = np.searchsorted(workers[order], workers[order])
    ranks = np.empty(len(workers), dtype=np.intp)
    ranks[order] = np.arange(len(workers)) - before + 1
    return ranks


def _marginal(iteration_s: Floats) -> Floats:
    """Return what the k-th request adds to k * iteration_s[w, k], `(m, n)`, never falling in k.

    Raises:  NotConvexError when it falls by more than rounding.
    """
    together_s = np.arange(iteration_s.shape[1]) * iteration_s
    added_s = np.diff(together_s, axis=1)
    most_s = np.maximum.accumulate(added_s, axis=1)
    falls = added_s < most_s * (1 - _CONVEX_ROUNDING)
    if falls.any():
        worker, index = (int(place) for place in np.argwhere(falls)[0])
        added, least = float(added_s[worker, index]), float(most_s[worker, index])
        raise NotConvexError("iteration_s", worker, index + 1, added, least)
    return most_s


def _prefill_leg(processing_s: ArrayLike, backlog_s: ArrayLike) -> _PrefillLeg:
    processing = _seconds("processing_s", processing_s, 2)
    requests, count = processing.shape
    backlog = _seconds("backlog_s", backlog_s, 1)
    _shape("backlog_s", backlog, (count,))
    if requests and not count:
        raise GameError(
            "processing_s.shape", processing.shape, "(n, m) with m >= 1 workers for n >= 1 requests"
        )
    return _PrefillLeg(processing, backlog)


def _decode_leg(iteration_s: ArrayLike, extra_s: ArrayLike) -> _DecodeLeg:
    extra = _seconds("extra_s", extra_s, 2)
    requests, count = extra.shape
    iteration = _seconds("iteration_s", iteration_s, 2)
    _shape("iteration_s", iteration, (count, requests + 1))
    if requests and not count:
        raise GameError("extra_s.shape", extra.shape, "(n, m) with m >= 1 workers for n >= 1 requests")
    for worker in np.flatnonzero(iteration[:, 0]).tolist():
        raise GameError(f"iteration_s[{worker}, 0]", float(iteration[worker, 0]), "0: nobody bears it")
    return _DecodeLeg(iteration, extra)


def _seconds(key: str, given: ArrayLike, dimensions: int) -> Floats:
    seconds: Floats = _array(key, given, "iuf").astype(np.float64)
    if seconds.ndim != dimensions:
        raise GameError(f"{key}.ndim", seconds.ndim, f"{dimensions}")
    wrong = np.argwhere(~((seconds >= 0) & (seconds <= MOST_S)))
    if wrong.size:
        place = tuple(wrong[0].tolist())
        raise GameError(
            f"{key}[{', '.join(map(str, place))}]", float(seconds[place]), f"in [0, {MOST_S:g}] s"
        )
    return seconds


def _array(key: str, given: ArrayLike, kinds: str) -> NDArray[Any]:
    """Return an array of numbers of these kinds of dtype; an empty list is of any kind."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise GameError(key, "ragged", "rows of one length") from error
    if array.size and array.dtype.kind not in kinds:
        bound = "a whole-number type" if "f" not in kinds else "a type of real numbers"
        raise GameError(f"{key}.dtype", str(array.dtype), bound)
    return array


def _shape(key: str, array: Floats, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise GameError(f"{key}.shape", array.shape, f"{expected}, as the other argument has it")


def _chosen(workers: ArrayLike, shape: tuple[int, int]) -> Indices:
    requests, count = shape
    chosen = _array("workers", workers, "iu")
    if chosen.shape != (requests,):
        raise GameError("workers.shape", chosen.shape, f"({requests},)")
    if not requests:
        return np.empty(0, dtype=np.intp)
    for request in np.flatnonzero((chosen < 0) | (chosen >= count)).tolist():
        raise GameError(f"workers[{request}]", int(chosen[request]), f"in [0, {count})")
    return chosen.astype(np.intp)
