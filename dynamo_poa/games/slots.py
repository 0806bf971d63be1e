"""Which assignment of requests to workers costs least, where every further request makes a worker dearer.

Owns: the exact matching of requests to the slots (worker, position) of a leg, and how few slots it takes.
Does not own: what a slot costs (routing.py).
Invariant: the matching is optimal over all n slots of every worker. The start, its improvement and the prices
           decide how long that takes and never what comes out.
Source: theory.md, Γ_R; shortest augmenting paths (scipy's linear_sum_assignment); duality of assignments.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# Chosen on the instances of bench/snapshot.py: what the slowest of them take least time with.
_MOVING_ROUNDS = 64
_SWAPPING_ROUNDS = 4
_START_PRICE_ROUNDS = 2
_SPARE_SLOTS = 2
_PROOF_PRICE_ROUNDS = 100
_ROUNDING = 1e-12  # of the cost of a request, on average: a gain below it is noise


class Leg(Protocol):
    """What a leg costs, as far as its best assignment depends on it: n requests, m workers.

    A request in slot (w, k), k >= 1, costs `slot_cost`, and never less in (w, k + 1) than in (w, k).
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n, m)."""

    def start(self) -> Indices:
        """Return a plausible assignment, `(n,)` workers, at little expense."""

    def positions(self, workers: Indices) -> Indices:
        """Return each request's best position on its worker, `(n,)` from 1, without gaps."""

    def slot_cost(self, worker: Indices, position: Indices) -> Floats:
        """Return what each request costs in each of N slots, `(n, N)` s."""

    def joining(self, workers: Indices, changed: Iterable[int], cost_s: Floats) -> None:
        """Write into `cost_s[:, changed]` by how much the whole gets dearer when a request joins a worker.

        For the worker it is on: by how much the whole would get cheaper if it left.
        """


def best_assignment(leg: Leg) -> Indices:
    """Return the `(n,)` workers of an assignment that no other undercuts.

    Not every worker needs n slots. An optimal matching of the requests to K[w] slots of each worker w comes
    with values u[r] and prices v[s] >= 0 such that u[r] - v[s] <= cost[r, s] throughout, v[s] = 0 in free
    slots, and sum(u) - sum(v) is what the matching costs. If every worker has a free slot s, any slot t of it
    beyond K[w] costs at least as much: u[r] <= cost[r, s] <= cost[r, t]. So with v[t] = 0 the same u and v
    are feasible with all n slots, their sum still bounds every matching from below, and this one attains it.
    A worker without a free slot is given more, unless nobody wants its next one (`_wanting`).
    """
    requests, count = leg.shape
    workers = _move(leg, leg.start())
    positions = leg.positions(workers)
    room = np.minimum(np.bincount(workers, minlength=count) + _SPARE_SLOTS, requests)
    while True:
        first = np.cumsum(room) - room
        worker_of = np.repeat(np.arange(count), room)
        position_of = np.arange(len(worker_of)) - first[worker_of] + 1
        cost = leg.slot_cost(worker_of, position_of)
        slots = _match(cost, _swap(cost, first[workers] + positions - 1))
        workers, positions = worker_of[slots], position_of[slots]
        full = np.flatnonzero((np.bincount(workers, minlength=count) == room) & (room < requests))
        if full.size:
            full = full[_wanting(cost, slots, leg.slot_cost(full, room[full] + 1))]
        if not full.size:
            return workers
        room[full] = np.minimum(2 * room[full], requests)


def _wanting(cost: Floats, slots: Indices, further: Floats) -> NDArray[np.bool_]:
    """Tell which further slots, `(n, f)`, might make an optimal matching cheaper.

    With prices under which every request is content, u[r] = cost[r, slots[r]] + v[slots[r]]. A slot that
    costs every r at least u[r] leaves u and v feasible at a price of zero, as in `best_assignment`. Without
    such prices, as after too few rounds, any might.
    """
    own = cost[np.arange(len(cost)), slots]
    prices, settled = _prices(cost, slots, _PROOF_PRICE_ROUNDS)
    if not settled:
        return np.ones(further.shape[1], dtype=np.bool_)
    wanting: NDArray[np.bool_] = (further < (own + prices[slots] - _ROUNDING * own.mean())[:, None]).any(
        axis=0
    )
    return wanting


def _move(leg: Leg, workers: Indices) -> Indices:
    """Move requests to where they help most, at most one in or out of a worker at a time."""
    requests, count = leg.shape
    workers, rows, cost_s = workers.copy(), np.arange(requests), np.empty((requests, count))
    changed = set(range(count))
    for _ in range(_MOVING_ROUNDS):
        leg.joining(workers, changed, cost_s)
        staying_s, to = cost_s[rows, workers], cost_s.argmin(axis=1)
        gain_s = staying_s - cost_s[rows, to]
        changed = set()
        for request in _most_first(gain_s, staying_s.mean()):
            here, there = int(workers[request]), int(to[request])
            if here not in changed and there not in changed:
                changed |= {here, there}
                workers[request] = there
        if not changed:
            break
    return workers


def _swap(cost: Floats, slots: Indices) -> Indices:
    """Let pairs of requests exchange their slots where both together gain."""
    slots, rows = slots.copy(), np.arange(len(slots))
    for _ in range(_SWAPPING_ROUNDS):
        taken = cost[:, slots]
        own = taken[rows, rows]
        taken -= own[:, None]
        together = taken + taken.T
        other = together.argmin(axis=1)
        swapped = set[int]()
        for request in _most_first(-together[rows, other], own.mean()):
            pair = (request, int(other[request]))
            if swapped.isdisjoint(pair):
                swapped.update(pair)
                slots[[*pair]] = slots[[*reversed(pair)]]
        if not swapped:
            break
    return slots


def _most_first(gain: Floats, scale: float) -> list[int]:
    gaining = np.flatnonzero(gain > _ROUNDING * scale)
    ordered: list[int] = gaining[np.argsort(-gain[gaining], kind="stable")].tolist()
    return ordered


def _match(cost: Floats, near: Indices) -> Indices:
    """Return the `(n,)` slots of the cheapest matching, given one that should be near it.

    Padded to a square with requests that cost nothing, every slot is taken once, so that a price on a slot
    adds the same to every matching: the best one stays the best, and the better the prices the sooner it is
    found. Those who are content with what they have go first, and mostly get it.
    Measured (512 requests, 64 workers, one of them 5x slower): 4 ms, against 70 ms without prices.
    """
    requests, slots = cost.shape
    prices, _ = _prices(cost, near, _START_PRICE_ROUNDS)
    priced = cost + prices
    order = np.argsort(priced[np.arange(requests), near] - priced.min(axis=1), kind="stable")
    square = np.empty((slots, slots))
    square[:requests] = priced[order]
    square[requests:] = prices
    _, columns = linear_sum_assignment(square)
    matched = np.empty(requests, dtype=np.intp)
    matched[order] = columns[:requests]
    return matched


def _prices(cost: Floats, slots: Indices, rounds: int) -> tuple[Floats, bool]:
    """Return the least prices, `(N,)`, under which no request would rather have another slot than its own.

        price[s] >= price[slots[r]] + cost[r, slots[r]] - cost[r, s]        zero where nobody is drawn to

    Raised round by round (Bellman and Ford). They settle when `slots` is an optimal matching.

    Returns:  the prices, and whether they settled within the rounds.
    """
    own = cost[np.arange(len(cost)), slots]
    drawn = own[:, None] - cost
    prices, least_rise = np.zeros(cost.shape[1]), _ROUNDING * own.mean()
    for _ in range(rounds):
        wanted = (drawn + prices[slots][:, None]).max(axis=0)
        rising = wanted > prices + least_rise
        if not rising.any():
            return prices, True
        prices[rising] = wanted[rising]
    return prices, False
