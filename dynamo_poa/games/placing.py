"""Which prefixes to hold where, so that most is saved within every worker's capacity.

Owns: the exact search and its proof, the fast one with its guarantee, the bound on what could be saved.
Does not own: what is saved (caching.py).
Invariant: what is returned fits. The bound holds for every placement that fits.
Source: theory.md, Γ_KV: HiGHS through scipy.optimize.milp. The guarantee: Fisher, Nemhauser and Wolsey 1978
        (locally greedy, one choice a part); Goundan and Schulz 2007 (with approximate choices).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Holds = NDArray[np.bool_]

MOST_CELLS = 8_192  # groups x workers that are searched exactly
GAP_FRAC = 1e-4  # of the cost: what is proven to be no further from the optimum counts as it
_GREEDY_ROUNDS = 30
_ROUNDING = 1e-12
_BOUND_S = 10.0  # for the relaxation, where it alone is solved


class Savings(NamedTuple):
    """What holding saves, all >= 0: G groups, W workers, K nodes.

    anyone:     `(G,)` once anyone holds the group
    same_node:  `(G, K)` beyond that, once a worker of the node does
    own:        `(G, W)` beyond that, where the worker does itself
    most:       what is to be saved at all
    size, capacity:  `(G,)`, `(W,)` whole numbers
    node:       `(W,)` of each worker, in [0, K)
    """

    size: Indices
    capacity: Indices
    node: Indices
    anyone: Floats
    same_node: Floats
    own: Floats
    most: float


class Found(NamedTuple):
    """A placement that fits, `(G, W)`; no other saves more than `most_saved`; whether it is proven the best."""

    holds: Holds
    most_saved: float
    exact: bool


def saved(game: Savings, holds: Holds) -> float:
    """Return what a placement saves."""
    by_node = (holds.astype(np.float64) @ _members(game)) > 0
    return float(
        game.anyone @ holds.any(axis=1) + (game.same_node * by_node).sum() + (game.own * holds).sum()
    )


def place(game: Savings, exact_s: float) -> Found:
    """Return the best placement, or the greedy one where it takes longer than `exact_s` to prove one."""
    held = greedy(game)
    if not game.own.size:
        return Found(held, 0.0, True)
    exact = exact_s > 0 and game.own.size <= MOST_CELLS
    holds, most_saved = _solve(game, exact, exact_s if exact else _BOUND_S)
    if exact and holds is not None and saved(game, holds) > saved(game, held):
        held = holds
    left, least = game.most - saved(game, held), game.most - most_saved
    return Found(held, most_saved, exact and left - least <= GAP_FRAC * left + _ROUNDING * game.most)


def greedy(game: Savings) -> Holds:
    """Give each worker in turn what saves most on top of what the others hold, until nobody changes.

    A worker's choice is a knapsack, as groups add up there. The first round saves at least half of what the
    best placement does when every size divides the next larger one (powers of two do), as each choice is then
    the best; with other sizes a third. Further rounds only add. The (1 - 1/e) of greedy choices is for one
    limit on their number (Nemhauser, Wolsey and Fisher 1978), not for a capacity at every worker.
    """
    held = np.zeros(game.own.shape, dtype=np.bool_)
    best, most = held, 0.0
    for _ in range(_GREEDY_ROUNDS):
        held = held.copy()
        for worker, node in enumerate(game.node.tolist()):
            held[:, worker] = False
            in_node, anywhere = held[:, game.node == node].any(axis=1), held.any(axis=1)
            gain = game.own[:, worker] + np.where(in_node, 0.0, game.same_node[:, node])
            gain += np.where(anywhere, 0.0, game.anyone)
            held[knapsack(game.size, gain, int(game.capacity[worker])), worker] = True
        now = saved(game, held)
        if now <= most * (1 + 1e-12):
            break
        best, most = held, now
    return best


def knapsack(size: Indices, gain: Floats, capacity: int) -> list[int]:
    """Return which items gain most within a capacity.

    When every size divides the next larger one this is the optimum: what is left of the capacity beyond
    multiples of the next size can only be used by items of this one, so the best of them have it; the others
    are bundled to the next size, best first. Otherwise at least half of the optimum: the densest items that
    fit, or the one that gains most.

    Source:  Verhaegh and Aarts 1997 (divisible sizes).
    """
    wanted = [item for item in np.flatnonzero((gain > 0) & (size <= capacity)).tolist()]
    sizes = sorted({int(size[item]) for item in wanted})
    if any(larger % smaller for smaller, larger in zip(sizes, sizes[1:], strict=False)):
        return _densest(size, gain, capacity, wanted)
    taken: list[int] = []
    bundles: list[tuple[float, list[int]]] = []
    for own, larger in zip(sizes, [*sizes[1:], 0], strict=False):
        bundles += [(float(gain[item]), [item]) for item in wanted if size[item] == own]
        bundles.sort(key=lambda bundle: -bundle[0])
        room = (capacity % larger if larger else capacity) // own
        taken += [item for _, items in bundles[:room] for item in items]
        if larger:
            capacity -= capacity % larger
            rest, many = bundles[room:], larger // own
            together = [rest[at : at + many] for at in range(0, len(rest), many)]
            bundles = [
                (sum(g for g, _ in some), [i for _, items in some for i in items]) for some in together
            ]
    return taken


def _densest(size: Indices, gain: Floats, capacity: int, wanted: list[int]) -> list[int]:
    taken, room = list[int](), capacity
    for item in sorted(wanted, key=lambda item: -gain[item] / size[item]):
        if size[item] <= room:
            taken.append(item)
            room -= int(size[item])
    single = max(wanted, key=lambda item: float(gain[item]))
    return taken if gain[taken].sum() >= gain[single] else [single]


def _solve(game: Savings, exact: bool, limit_s: float) -> tuple[Holds | None, float]:
    """Return a placement, None without one, and the most that any saves: by HiGHS, or its relaxation only.

        most  sum anyone[g] v[g] + same_node[g, k] u[g, k] + own[g, w] x[g, w]
        with  v[g] <= sum_k u[g, k]    u[g, k] <= sum of x[g, w], w in k    x binary, u and v in [0, 1]
              sum_g floor(size[g] / d) x[g, w] <= floor(capacity[w] / d)    d = 1, and powers of two

    u and v come out whole by themselves. A capacity is said again in units of every power of two (Chvátal and
    Gomory's rounding): with sizes that divide one another that takes most of the slack out of the relaxation.
    """
    groups, workers = game.own.shape
    nodes = game.same_node.shape[1]
    of_group, of_worker = sparse.eye_array(groups), sparse.eye_array(workers)
    fits = (game.size[:, None] <= game.capacity).ravel()
    units = [1 << power for power in range(max(int(game.size.max()).bit_length(), 1))]
    rows = [[sparse.kron((game.size // unit)[None, :], of_worker), None, None] for unit in units]
    rows.append([sparse.kron(of_group, -_members(game).T), sparse.eye_array(groups * nodes), None])
    rows.append([None, sparse.kron(of_group, -np.ones((1, nodes))), of_group])
    limits = np.concatenate([*(game.capacity // unit for unit in units), np.zeros(groups * (nodes + 1))])
    # The last column stands for what is to be saved: gaps are then shares of the cost.
    matrix = sparse.hstack([sparse.block_array(rows), sparse.csr_array((len(limits), 1))], format="csc")
    gains = np.concatenate([game.own.ravel(), game.same_node.ravel(), game.anyone, [-game.most]])
    scale = game.most if game.most > 0 else 1.0
    whole = np.concatenate([np.full(fits.size, exact), np.zeros(groups * (nodes + 1) + 1)])
    low = np.zeros(len(gains))
    low[-1] = 1.0
    found = milp(
        -gains / scale,
        integrality=whole,
        bounds=Bounds(low, np.concatenate([fits, np.ones(groups * (nodes + 1) + 1)])),
        constraints=LinearConstraint(matrix, -np.inf, limits),
        options={"time_limit": limit_s, "mip_rel_gap": GAP_FRAC},
    )
    least = found.mip_dual_bound if exact else (found.fun if found.status == 0 else None)
    most_saved = game.most if least is None else game.most - max(float(least), 0.0) * scale
    holds = None if found.x is None else np.round(found.x[: fits.size]).reshape(groups, workers) > 0
    return holds, min(most_saved, game.most)


def _members(game: Savings) -> Floats:
    members: Floats = (game.node[:, None] == np.arange(game.same_node.shape[1])).astype(np.float64)
    return members
