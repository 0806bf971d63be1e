"""Which placement saves most, as a mixed-integer program that HiGHS proves within seconds.

Owns: the program, the order in which it is decided, the bound on what any placement costs.
Does not own: what is saved (caching.py), the fast search beside it (placing.py).
Invariant: the bound holds for every placement that fits, however early the search is given up.
Source: theory.md, Γ_KV: HiGHS through scipy.optimize.milp. Rounded capacities: Chvátal 1973; knapsacks whose
        sizes divide one another: Pochet and Wolsey 1995. Deciding in stages (relax-and-fix): Pochet and
        Wolsey, Production Planning by Mixed Integer Programming, 2006.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Holds = NDArray[np.bool_]

_SMALL = 256  # groups x workers up to which everything is decided at once, and without a gap
_MOST_STAGES = 8
_BOUND_GAP_FRAC = 5e-5  # of the first stage, whose bound is the proof
_WHOLE = 1e-5
_STAGE_GAP_FRAC = 2e-4
_RELAXED_S = 10.0  # measured: 1 s for 1,000 groups on 32 workers, 74 s for 5,000 on 64
_LEAST_SCALE = 1e-6  # of what there is to save: HiGHS should not see larger ratios


class Savings(NamedTuple):
    """What holding saves, all >= 0: G groups, W workers, K nodes.

    anyone:     `(G,)` once anyone holds the group
    same_node:  `(G, K)` beyond that, once a worker of the node does
    own:        `(G, W)` beyond that, where the worker does itself
    most:       what there is to save: the cost when nobody holds anything
    size, capacity:  `(G,)` from 1, `(W,)` from 0
    node:       `(W,)` of each worker, in [0, K)
    parent:     `(G,)` a row before the group's own, without which a worker has no use for the group; -1: none
    """

    size: Indices
    capacity: Indices
    node: Indices
    parent: Indices
    anyone: Floats
    same_node: Floats
    own: Floats
    most: float


class Searched(NamedTuple):
    """The best placement that was found, `(G, W)`, and what no placement costs less than."""

    holds: Holds
    least: float


def saved(game: Savings, holds: Holds) -> float:
    """Return what a placement saves."""
    by_node = (holds.astype(np.float64) @ members(game.node, game.same_node.shape[1])) > 0
    shared = float(game.anyone @ holds.any(axis=1)) + float((game.same_node * by_node).sum())
    return shared + float((game.own * holds).sum())


def members(node: Indices, nodes: int) -> Floats:
    """Return which workers are in which of so many nodes, `(W, K)`, 1 or 0."""
    inside: Floats = (node[:, None] == np.arange(nodes)).astype(np.float64)
    return inside


def usable(holds: Holds, parent: Indices) -> Holds:
    """Return what of a placement is of use: what a worker holds of a group and of all that it begins with."""
    held = holds.copy()
    for group in np.flatnonzero(parent >= 0).tolist():
        held[group] &= held[parent[group]]
    return held


def relaxed(game: Savings, limit_s: float = _RELAXED_S) -> Searched:
    """Return what is held whole when groups may be held in part, and what that costs: a bound for all.

    Nothing is held, and the bound is 0, where that takes too long to solve.
    """
    program = _Program(game, game.most)
    found = program.solve([], program.low, program.high, 0.0, limit_s)
    if found is None or not found.success:
        return Searched(np.zeros(game.own.shape, dtype=np.bool_), 0.0)
    return Searched(program.holds(found), float(found.fun) * program.scale)


def search(
    game: Savings, loose: Searched, gap_frac: float, until_s: float, now_s: Callable[[], float]
) -> Searched:
    """Look for a placement until it is proven to be within `gap_frac` of the least cost, or until an instant.

    How many groups of a size each worker holds is decided from the largest size down, in stages, in which the
    smaller ones may still be held in part: they fill what larger ones leave, so little is lost by it, and
    the first stage's bound tells how little. Where that is too much, and where groups have parents,
    everything is decided at once.

    Args:     loose: what `relaxed` returned of the game.
    """
    best = loose
    program = _Program(game, max(best.least, _LEAST_SCALE * game.most))
    small = game.own.size <= _SMALL
    if not small and program.whole == program.counts:
        best = _in_stages(program, best, until_s, now_s)
        if _proven(game, best, gap_frac):
            return best
    gap_frac = 0.0 if small else gap_frac
    found = program.solve(program.whole, program.low, program.high, gap_frac, until_s - now_s())
    bound = max(best.least, program.bound_s(found))
    if found is None or found.x is None:
        return Searched(best.holds, bound)
    return Searched(min(best.holds, program.holds(found), key=lambda holds: _cost(game, holds)), bound)


def _in_stages(program: "_Program", best: Searched, until_s: float, now_s: Callable[[], float]) -> Searched:
    low, high, bound = program.low.copy(), program.high.copy(), best.least
    for stage, whole in enumerate(program.stages()):
        gap_frac = _STAGE_GAP_FRAC if stage else _BOUND_GAP_FRAC
        found = program.solve(whole, low, high, gap_frac, (until_s - now_s()) / 2)
        if found is None or found.x is None:
            break
        bound = max(bound, program.bound_s(found)) if stage == 0 else bound
        best = Searched(program.holds(found), bound)
        low[whole] = high[whole] = np.round(found.x[whole])
    return best


def _proven(game: Savings, best: Searched, gap_frac: float) -> bool:
    cost = _cost(game, best.holds)
    return cost - best.least <= gap_frac * cost


def _cost(game: Savings, holds: Holds) -> float:
    return game.most - saved(game, holds)


class _Program:
    """The program; columns are x[g, w], u[g, k], v[g], count[s, w] for each size s, and a constant one.

        least most - sum of anyone[g] v[g] + same_node[g, k] u[g, k] + own[g, w] x[g, w]
        with  v[g] <= sum over k of u[g, k]      u[g, k] <= sum of x[g, w], w in k      all in [0, 1]
              sum of x[g, w], g of size s <= count[s, w]                                whole
              sum over s of floor(s / d) count[s, w] <= floor(capacity[w] / d)          d = 1, 2, 4, ...
              x[g, w] <= x[parent[g], w]

    Only the counts are declared whole: what is left once they are given is a flow from groups over nodes to
    the places for each size at each worker, with gains that fall, and a flow has whole vertices. Not so
    where groups have parents: there x is declared whole, too, and the proof takes longer. A node of one
    worker needs no u, its saving is the worker's own.
    """

    def __init__(self, game: Savings, scale: float) -> None:
        """Have costs counted in units of `scale`, as HiGHS has absolute tolerances."""
        self.game, self.scale = game, scale if scale > 0 else 1.0
        groups, workers = game.own.shape
        inside = members(game.node, game.same_node.shape[1])
        many = inside.sum(axis=0) > 1
        alone = ~many[game.node]
        own = game.own + np.where(alone, game.same_node[:, game.node], 0.0)
        nodes = int(many.sum())
        sizes = np.unique(game.size)
        of_size = (sizes[:, None] == game.size).astype(np.float64)
        self.x, shared, self.count = groups * workers, groups * (nodes + 1), len(sizes) * workers
        first = self.x + shared
        self.counts = list(range(first, first + self.count))
        each_group, each_worker = sparse.eye_array(groups), sparse.eye_array(workers)
        units = [1 << power for power in range(int(sizes[-1]).bit_length())]
        rows = [[sparse.kron(of_size, each_worker), None, None, -sparse.eye_array(self.count)]]
        rows += [[None, None, None, sparse.kron((sizes // unit)[None, :], each_worker)] for unit in units]
        nested = np.flatnonzero(game.parent >= 0)
        if nested.size:
            each = sparse.eye_array(groups, format="csr")
            beyond = sparse.kron(each[nested] - each[game.parent[nested]], each_worker)
            rows.append([beyond, None, None, None])
        self.whole = self.counts + (list(range(self.x)) if nested.size else [])
        anyone = [sparse.kron(each_group, -alone[None, :].astype(np.float64)), None, each_group, None]
        if nodes:
            u = sparse.eye_array(groups * nodes)
            rows.append([sparse.kron(each_group, -inside[:, many].T), u, None, None])
            anyone[1] = sparse.kron(each_group, -np.ones((1, nodes)))
        else:
            rows = [[row[0], *row[2:]] for row in rows]
            anyone.pop(1)
        matrix = sparse.block_array([*rows, anyone])
        limits = [np.zeros(self.count), *(game.capacity // unit for unit in units)]
        limits += [np.zeros(nested.size * workers), np.zeros(shared)]
        self.limits = np.concatenate(limits)
        self.matrix = sparse.hstack([matrix, sparse.csr_array((len(self.limits), 1))], format="csc")
        gains: list[Floats] = [
            own.ravel(),
            game.same_node[:, many].ravel(),
            game.anyone,
            np.zeros(self.count),
            np.array([-game.most]),
        ]
        self.costs = -np.concatenate(gains) / self.scale
        most = np.minimum(of_size.sum(axis=1)[:, None], game.capacity // sizes[:, None])
        with_parents = game.size.copy()
        gainful = own + game.anyone[:, None] + game.same_node[:, game.node] > 0
        for group in nested.tolist():
            with_parents[group] += with_parents[game.parent[group]]
        for group in nested[::-1].tolist():
            gainful[game.parent[group]] |= gainful[group]
        fits = (with_parents[:, None] <= game.capacity) & gainful
        self.high = np.concatenate([fits.ravel(), np.ones(shared), most.ravel(), [1.0]])
        self.low = np.zeros(len(self.high))
        self.low[-1] = 1.0
        self._workers = workers

    def stages(self) -> list[list[int]]:
        """Return the counts of the largest sizes, of smaller ones, and so on."""
        sizes = np.array(self.counts).reshape(-1, self._workers)[::-1]
        return [part.ravel().tolist() for part in np.array_split(sizes, min(len(sizes), _MOST_STAGES))]

    def solve(
        self, whole: list[int], low: Floats, high: Floats, gap_frac: float, limit_s: float = math.inf
    ) -> Any:
        """Return HiGHS's result, None when no time is left."""
        if limit_s <= 0:
            return None
        integrality = np.zeros(len(self.costs), dtype=np.intp)
        integrality[whole] = 1
        return milp(
            self.costs,
            integrality=integrality,
            bounds=Bounds(low, high),
            constraints=LinearConstraint(self.matrix, -np.inf, self.limits),
            options={"mip_rel_gap": gap_frac, "time_limit": limit_s},
        )

    def bound_s(self, found: Any) -> float:
        """Return what no solution costs less than; 0 when HiGHS was given up before it knew."""
        bound = None if found is None else found.mip_dual_bound
        return float(bound) * self.scale if bound is not None and np.isfinite(bound) else 0.0

    def holds(self, found: Any) -> Holds:
        """Return what is held whole and of use, as all of it is once what has to be whole is."""
        held: Holds = found.x[: self.x].reshape(self.game.own.shape) > 1 - _WHOLE
        return usable(held, self.game.parent)
