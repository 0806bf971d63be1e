"""Which prefixes to hold where, so that most is saved within every worker's capacity.

Owns: the exact search and its proof, the fast one with its guarantee, the bound on what could be saved.
Does not own: what is saved (caching.py).
Invariant: what is returned fits. The bound holds for every placement that fits.
Source: theory.md, Γ_KV: HiGHS through scipy.optimize.milp. The guarantee: Fisher, Nemhauser and Wolsey 1978
        (locally greedy, one choice a part); Goundan and Schulz 2007 (with approximate choices).
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.games.placing_program import Savings, relaxed, saved, search

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Holds = NDArray[np.bool_]

MOST_CELLS = 20_000  # groups x workers beyond which no proof is tried
GAP_FRAC = 1e-3  # of the cost: what is proven to be no further from the optimum counts as it
_MOST_ROUNDS = 30
_MOST_STATES = 2_000_000  # of a nested knapsack: 16 MB, 5 ms
_ROUNDING = 1e-12


class Found(NamedTuple):
    """A placement that fits, `(G, W)`; no other saves more than `most_saved`; whether that proves it."""

    holds: Holds
    most_saved: float
    exact: bool


def place(game: Savings, exact_s: float, now_s: Callable[[], float]) -> Found:
    """Return the best placement, or a greedy one where none is proven within `exact_s`."""
    held = greedy(game)
    if not game.own.size:
        return Found(held, 0.0, True)
    exact = exact_s > 0 and game.own.size <= MOST_CELLS
    until_s, loose = now_s() + exact_s, relaxed(game)
    searched = search(game, loose, GAP_FRAC, until_s, now_s) if exact else loose
    held = max(held, improve(game, searched.holds), key=lambda holds: saved(game, holds))
    if exact and not _proven(game, held, searched.least):
        # What a search that was given up has found need not be better than where it began.
        held = max(held, improve(game, loose.holds), key=lambda holds: saved(game, holds))
    return Found(held, game.most - searched.least, exact and _proven(game, held, searched.least))


def _proven(game: Savings, held: Holds, least: float) -> bool:
    left = game.most - saved(game, held)
    return left - least <= GAP_FRAC * left + _ROUNDING * game.most


def greedy(game: Savings) -> Holds:
    """Give each worker in turn what saves most on top of what those before it hold, then improve that.

    A worker's choice is a knapsack, as groups add up there. This saves at least half of what the best
    placement does where each choice is the best: when every size divides the next larger one (powers of two
    do), and with parents (`nested_knapsack`, up to _MOST_STATES); with other sizes at least a third. The
    1 - 1/e of greedy choices is for a limit on their number (Nemhauser, Wolsey and Fisher 1978), or for one
    knapsack with all triples tried first (Sviridenko 2004), not for a capacity at every worker.
    """
    return improve(game, np.zeros(game.own.shape, dtype=np.bool_))


def improve(game: Savings, held: Holds) -> Holds:
    """Let each worker in turn choose anew, given what the others hold, until that saves no more."""
    best, most = held, saved(game, held)
    forest = _Forest(game.parent) if (game.parent >= 0).any() else None
    for _ in range(_MOST_ROUNDS):
        held = held.copy()
        for worker, node in enumerate(game.node.tolist()):
            held[:, worker] = False
            in_node, anywhere = held[:, game.node == node].any(axis=1), held.any(axis=1)
            gain = game.own[:, worker] + np.where(in_node, 0.0, game.same_node[:, node])
            gain += np.where(anywhere, 0.0, game.anyone)
            room = int(game.capacity[worker])
            chosen = (
                knapsack(game.size, gain, room)
                if forest is None
                else nested_knapsack(game.size, gain, room, forest)
            )
            held[chosen, worker] = True
        now = saved(game, held)
        if now <= most * (1 + _ROUNDING):
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
    wanted = np.flatnonzero((gain > 0) & (size <= capacity)).tolist()
    sizes = sorted({int(size[item]) for item in wanted})
    if any(larger % smaller for smaller, larger in itertools.pairwise(sizes)):
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


class _Forest:
    """Groups in an order in which each is followed by all that begin with it.

    order:   `(G,)` groups
    behind:  `(G,)` for each place of that order the first place that does not begin with the group there
    """

    def __init__(self, parent: Indices) -> None:
        children: dict[int, list[int]] = {}
        for group, above in enumerate(parent.tolist()):
            children.setdefault(above, []).append(group)
        below = [1] * len(parent)
        for group in reversed(range(len(parent))):
            if parent[group] >= 0:
                below[parent[group]] += below[group]
        self.order: list[int] = []
        open_ = children.get(-1, [])[::-1]
        while open_:
            group = open_.pop()
            self.order.append(group)
            open_ += children.get(group, [])[::-1]
        self.behind = [place + below[group] for place, group in enumerate(self.order)]
        self.parent = parent


def nested_knapsack(size: Indices, gain: Floats, capacity: int, forest: _Forest) -> list[int]:
    """Return which items gain most within a capacity when each is of use only with its parent.

        most[place, room] = the larger of most[behind[place], room]
                            and gain + most[place + 1, room - size] of the group at the place

    This is the optimum. Beyond _MOST_STATES places x rooms sizes are rounded up to a coarser unit, and what
    that leaves is filled by what fits.

    Source:  Johnson and Niemi 1983 (left-right dynamic programming on trees).
    """
    order, behind = forest.order, forest.behind
    count, fine = len(order), min(capacity, int(size.sum()))
    unit = -(-count * fine // _MOST_STATES) if fine else 1
    coarse, rooms = -(-size // unit), fine // unit
    most = np.zeros((count + 1, rooms + 1))
    for place in reversed(range(count)):
        takes, gains = int(coarse[order[place]]), gain[order[place]]
        most[place] = most[behind[place]]
        if takes <= rooms:
            with_it = most[place + 1, : rooms + 1 - takes] + gains
            np.maximum(most[place, takes:], with_it, out=most[place, takes:])
    taken, place, room = list[int](), 0, rooms
    while place < count:
        if most[place, room] > most[behind[place], room]:
            taken.append(order[place])
            room -= int(coarse[order[place]])
            place += 1
        else:
            place = behind[place]
    if unit == 1:
        return taken
    has, left = set(taken), capacity - int(size[taken].sum())
    for item in sorted(order, key=lambda item: (-gain[item] / size[item], item)):
        above = int(forest.parent[item])
        if item not in has and gain[item] > 0 and size[item] <= left and (above < 0 or above in has):
            has.add(item)
            left -= int(size[item])
    return list(has)


def _densest(size: Indices, gain: Floats, capacity: int, wanted: list[int]) -> list[int]:
    taken, room = list[int](), capacity
    for item in sorted(wanted, key=lambda item: -gain[item] / size[item]):
        if size[item] <= room:
            taken.append(item)
            room -= int(size[item])
    single = max(wanted, key=lambda item: float(gain[item]))
    return taken if gain[taken].sum() >= gain[single] else [single]
