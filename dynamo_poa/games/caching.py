"""What a placement of prefixes in caches costs, the least it could cost, and what selfish caches would do.

Owns: the placement game, its cost and optimum, who rides free; the textbook game of caches that pay.
Does not own: the search (placing.py), equilibria (equilibria.py), where the numbers come from (placement.py).
Invariant: arrays in, numbers out. One model prices every placement, so an optimum never exceeds the cost of a
           placement that fits.
Source: theory.md, Γ_KV. Selfish caching: Chun, Chaudhuri, Wee, Barreno, Papadimitriou and Kubiatowicz, PODC
        2004. Placing objects in caches of bounded size: Baev and Rajaraman, SODA 2001.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import GameError
from dynamo_poa.games.equilibria import Game, Profile
from dynamo_poa.games.placing import place
from dynamo_poa.games.placing_program import Savings, members, usable

Floats = NDArray[np.float64]
Holds = NDArray[np.bool_]

EXACT_S = 2.0
_MACHINE = SystemClock()


class Placing(NamedTuple):
    """Prefix groups that are asked for at workers: G groups, W workers.

    A group that begins with another one is that group's child. Here it stands for its blocks beyond the
    parent's alone, and a request for it counts for its parent, its parent's parent and so on, too: times
    are per block, so they add up. A worker that lacks the parent has no use for the child, and nobody has
    it from there: a cache is searched from the beginning.

    size_blocks:      `(G,)` whole, >= 1: beyond the parent's
    capacity_blocks:  `(W,)` whole, >= 0
    rate:             `(G, W)` requests served at the worker that begin with the group, 1/s
    recompute_s:      `(G,)`, or `(G, W)` by each worker's own curve: computing the prefix again
    node:             `(W,)` whole: workers with one number share a node
    fetch_node_s, fetch_far_s:  `(G,)` fetching it from a worker of the node, from any; inf where it cannot be
    parent:           `(G,)` the longest other group it begins with, a row before its own; -1: none
    """

    size_blocks: ArrayLike
    capacity_blocks: ArrayLike
    rate: ArrayLike
    recompute_s: ArrayLike
    node: ArrayLike
    fetch_node_s: ArrayLike
    fetch_far_s: ArrayLike
    parent: ArrayLike | None = None  # no group has any


class Placement(NamedTuple):
    """A placement within the capacities, and how near the best it is.

    cost_s:   seconds a second spent on fetching and recomputing
    bound_s:  no placement costs less; `cost_s` itself when it is the optimum
    holds:    `(G, W)`
    method:   `exact`: proven to cost at most 0.1 % more than any other (`placing.GAP_FRAC`; small games no
              more at all); `greedy`: not proven, but saves at least half of what the best does
              (`placing.greedy`: when that holds)
    """

    cost_s: float
    bound_s: float
    holds: Holds
    method: str


def placement_cost(game: Placing, holds: ArrayLike) -> float:
    """Return what a placement costs: every request has the cheapest of what its worker can do.

        cost_s = sum over g, w of rate[g, w] * (0 where w holds g, else the least of recompute_s,
                 fetch_far_s where anyone holds g, fetch_node_s where a worker of its node does)

    Args:     holds: `(G, W)` bool. It need not fit: an observed one may hold more than it should. What is
                     held without its parent counts as not held.
    Returns:  seconds per second.
    Raises:   GameError.
    """
    checked = _Checked(game)
    return checked.cost_s(checked.usable(holds))


def optimum(
    game: Placing, *, exact_s: float = EXACT_S, now_s: Callable[[], float] = _MACHINE.monotonic_s
) -> Placement:
    """Return the placement that costs least, or a good one and how much better another could be.

    Args:     exact_s: the search for a proven optimum is given up after so long; 0: none.
    Raises:   GameError.
    """
    checked = _Checked(game)
    found = place(checked.savings(), exact_s, now_s)
    cost_s = checked.cost_s(found.holds)
    if found.exact:
        return Placement(cost_s, cost_s, found.holds, "exact")
    bound_s = max(checked.nothing_held_s - found.most_saved, 0.0)
    return Placement(cost_s, min(bound_s, cost_s), found.holds, "greedy")


def shared_hits(game: Placing, holds: ArrayLike) -> float | None:
    """Return the share of hits that another worker's copy serves: those requests ride free.

    Counted in blocks: of a long prefix a worker may hold the beginning, and another one the rest. A copy that
    is dearer to fetch than to compute again serves nobody.

    Returns:  in [0, 1]; None when no request finds any of its prefix.
    Raises:   GameError.
    """
    checked = _Checked(game)
    held = checked.usable(holds)
    near, anywhere = checked.reach(held)
    fetched = ~held & (
        (near & (checked.near_s < checked.recompute_s)) | (anywhere & (checked.far_s < checked.recompute_s))
    )
    blocks = checked.rate * checked.size[:, None]
    own, from_others = float(blocks[held].sum()), float(blocks[fetched].sum())
    return from_others / (own + from_others) if own + from_others else None


def caching_game(
    distance_s: ArrayLike, price_s: Sequence[float], demand: Sequence[float], recompute_s: float
) -> Game:
    """Return the game of workers who each hold one prefix at a price, or fetch it from the nearest who does.

        cost of w = price_s[w] when it holds, else
                    demand[w] * min(recompute_s, least distance_s[w, v] over v that hold)

    Strategy 1 holds, strategy 0 does not.

    Args:     distance_s: `(n, n)`.  recompute_s: what it costs while nobody holds it.
    Source:   Chun et al. 2004, the basic game, where somebody always has to hold (recompute_s infinite).
    """
    distance, price, wants = (np.asarray(given, dtype=np.float64) for given in (distance_s, price_s, demand))

    def costs(profile: Profile) -> Floats:
        holding = np.array(profile, dtype=np.bool_)
        nearest_s = np.minimum(distance[:, holding].min(axis=1, initial=np.inf), recompute_s)
        fetches_s = wants * np.where(wants > 0, nearest_s, 0.0)  # no demand, no cost, however far
        paid: Floats = np.where(holding, price, fetches_s)
        return paid

    return Game((2,) * len(price), costs)


class _Checked:
    """A game as arrays: far_s and near_s are what fetching costs where recomputing is not cheaper."""

    def __init__(self, game: Placing) -> None:
        self.rate = _numbers("rate", game.rate, 2)
        groups, workers = self.rate.shape
        self.size = _numbers("size_blocks", game.size_blocks, 1, (groups,), least=1, whole=True)
        self.capacity = _numbers("capacity_blocks", game.capacity_blocks, 1, (workers,), whole=True)
        _, self.node = np.unique(_array("node", game.node, "iu", (workers,)), return_inverse=True)
        recompute = _array("recompute_s", game.recompute_s, "iuf")
        by_worker = recompute.ndim == 2
        shape = (groups, workers) if by_worker else (groups,)
        recompute_s = _numbers("recompute_s", recompute, len(shape), shape)
        self.recompute_s: Floats = (
            recompute_s if by_worker else np.broadcast_to(recompute_s[:, None], self.rate.shape)
        )
        fetch_node_s = _numbers("fetch_node_s", game.fetch_node_s, 1, (groups,), endless=True)
        fetch_far_s = _numbers("fetch_far_s", game.fetch_far_s, 1, (groups,), endless=True)
        self.far_s: Floats = np.minimum(self.recompute_s, fetch_far_s[:, None])
        self.near_s: Floats = np.minimum(self.far_s, fetch_node_s[:, None])
        given = np.full(groups, -1) if game.parent is None else game.parent
        self.parent = _numbers("parent", given, 1, (groups,), least=-1, whole=True).astype(np.intp)
        for group in np.flatnonzero(self.parent >= np.arange(groups))[:1].tolist():
            raise GameError(f"parent[{group}]", int(self.parent[group]), f"< {group}, a row before")

    @property
    def nothing_held_s(self) -> float:
        return float((self.rate * self.recompute_s).sum())

    def usable(self, holds: ArrayLike) -> Holds:
        return usable(_array("holds", holds, "b", self.rate.shape), self.parent)

    def reach(self, held: Holds) -> tuple[Holds, Holds]:
        """Return where a worker of the node holds the group, and where anyone does, `(G, W)` both."""
        by_node = (held.astype(np.float64) @ self._members()) > 0
        anywhere = held.any(axis=1, keepdims=True)
        return np.take(by_node, self.node, axis=1), np.broadcast_to(anywhere, held.shape)

    def cost_s(self, held: Holds) -> float:
        near, anywhere = self.reach(held)
        paid_s = np.where(anywhere, self.far_s, self.recompute_s)
        paid_s = np.where(near, self.near_s, paid_s)
        return float((self.rate * np.where(held, 0.0, paid_s)).sum())

    def savings(self) -> Savings:
        return Savings(
            size=self.size.astype(np.intp),
            capacity=self.capacity.astype(np.intp),
            node=self.node,
            parent=self.parent,
            anyone=(self.rate * (self.recompute_s - self.far_s)).sum(axis=1),
            same_node=(self.rate * (self.far_s - self.near_s)) @ self._members(),
            own=self.rate * self.near_s,
            most=self.nothing_held_s,
        )

    def _members(self) -> Floats:
        return members(self.node, int(self.node.max(initial=-1)) + 1)


def _numbers(
    key: str,
    given: ArrayLike,
    dimensions: int,
    shape: tuple[int, ...] | None = None,
    *,
    least: float = 0.0,
    whole: bool = False,
    endless: bool = False,
) -> Floats:
    numbers: Floats = _array(key, given, "iu" if whole else "iuf", shape).astype(np.float64)
    if numbers.ndim != dimensions:
        raise GameError(f"{key}.ndim", numbers.ndim, f"{dimensions}")
    right = (numbers >= least) & (np.isfinite(numbers) | endless)
    for place_ in np.argwhere(~right)[:1].tolist():
        bound = f">= {least:g}" + ("" if endless else " and finite")
        raise GameError(f"{key}[{', '.join(map(str, place_))}]", float(numbers[tuple(place_)]), bound)
    return numbers


def _array(key: str, given: ArrayLike, kinds: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """Return an array of numbers of these kinds of dtype; an empty list is of any kind."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise GameError(key, "ragged", "rows of one length") from error
    if array.size and array.dtype.kind not in kinds:
        raise GameError(f"{key}.dtype", str(array.dtype), f"of a kind in {kinds!r}")
    if shape is not None and array.shape != shape:
        raise GameError(f"{key}.shape", array.shape, f"{shape}, as rate has it")
    return array
