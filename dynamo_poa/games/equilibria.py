"""How bad selfish routing can be, and must be, in a small game: its pure Nash equilibria against its optimum.

Owns: the games (congestion, and both legs as games of their requests), all pure equilibria of a small one,
      the equilibrium a start leads to by best responses.
Does not own: the optimum of snapshots of any size (routing.py). Nothing here runs online.
Invariant: what a profile costs is the sum of its players' costs, and of a leg's game what routing.py says.
Source: theory.md, Γ_R, "offline only". Congestion games have pure equilibria: Rosenthal 1973; so has
        shortest-first service on unrelated machines: Immorlica, Li, Mirrokni and Schulz 2009.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamo_poa.errors import GameError

Floats = NDArray[np.float64]
Profile = tuple[int, ...]

MOST_PROFILES = 200_000
_ROUNDING = 1e-9  # a gain below this share of the cost is no reason to move


class Game(NamedTuple):
    """A finite game: how many strategies each player has, and what each pays when all have chosen.

    costs: of a profile (one strategy index per player), `(n,)`, >= 0
    """

    strategies: tuple[int, ...]
    costs: Callable[[Profile], Floats]


class Outcome(NamedTuple):
    """A profile and what it costs all players together."""

    cost: float
    profile: Profile


class Equilibria(NamedTuple):
    """The optimum of a game, its cheapest and dearest pure equilibrium, and how many pure ones there are."""

    optimum: Outcome
    best: Outcome
    worst: Outcome
    pure: int

    @property
    def price_of_anarchy(self) -> float:
        """Return the worst equilibrium's cost over the optimum's, >= 1; 1 when all cost nothing."""
        return _ratio(self.worst.cost, self.optimum.cost)

    @property
    def price_of_stability(self) -> float:
        """Return the best equilibrium's cost over the optimum's, >= 1; 1 when all cost nothing."""
        return _ratio(self.best.cost, self.optimum.cost)


def congestion_game(delays: Sequence[Sequence[float]], strategies: Sequence[Sequence[Sequence[int]]]) -> Game:
    """Return the game of players who each use a set of resources, dearer the more share them.

        cost of player i = sum over resources e of its strategy: delays[e][users of e - 1]

    Args:     delays: of each resource with 1, 2, ... users.
              strategies: per player, each strategy as the resources it uses.
    Raises:   GameError when a resource is unknown, or has no delay for as many users as it can get.
    """
    for player, own in enumerate(strategies):
        for strategy, resources in enumerate(own):
            for resource in resources:
                if not 0 <= resource < len(delays):
                    raise GameError(f"strategies[{player}][{strategy}]", resource, f"in [0, {len(delays)})")
    for resource, delay in enumerate(delays):
        users = sum(any(resource in strategy for strategy in own) for own in strategies)
        if len(delay) < users:
            raise GameError(f"len(delays[{resource}])", len(delay), f">= {users}, the users it can get")

    def costs(profile: Profile) -> Floats:
        chosen = [own[strategy] for own, strategy in zip(strategies, profile, strict=True)]
        users = np.bincount([e for resources in chosen for e in resources], minlength=len(delays))
        return np.array([math.fsum(delays[e][users[e] - 1] for e in resources) for resources in chosen])

    return Game(tuple(len(own) for own in strategies), costs)


def prefill_game(processing_s: ArrayLike, backlog_s: ArrayLike) -> Game:
    """Return the game of prompts that each want to be done soonest, on workers that serve the shortest first.

        cost of r = backlog_s[w] + sum over r' on w, not after r, of processing_s[r', w]

    Equal prompts are served in their own order. The sum over all is `prefill_cost`.

    Args:     processing_s: `(n, m)`.  backlog_s: `(m,)`.
    """
    processing, backlog = np.asarray(processing_s, dtype=np.float64), np.asarray(backlog_s, dtype=np.float64)
    requests, count = processing.shape

    def costs(profile: Profile) -> Floats:
        done_at_s, free_at_s = np.empty(requests), backlog.copy()
        own_s = processing[np.arange(requests), list(profile)]
        for request in np.argsort(own_s, kind="stable").tolist():
            free_at_s[profile[request]] += own_s[request]
            done_at_s[request] = free_at_s[profile[request]]
        return done_at_s

    return Game((count,) * requests, costs)


def decode_game(iteration_s: ArrayLike, extra_s: ArrayLike) -> Game:
    """Return the game of requests that each want the fastest iterations.

        cost of r = iteration_s[w, x[w]] + extra_s[r, w]        x[w]: how many are on w

    A congestion game but for the extra, which is a player's own. The sum over all is `decode_cost`.

    Args:     iteration_s: `(m, n + 1)`.  extra_s: `(n, m)`.
    """
    iteration, extra = np.asarray(iteration_s, dtype=np.float64), np.asarray(extra_s, dtype=np.float64)
    requests, count = extra.shape

    def costs(profile: Profile) -> Floats:
        workers = np.array(profile, dtype=np.intp)
        on = np.bincount(workers, minlength=count)
        cost_s: Floats = iteration[workers, on[workers]] + extra[np.arange(requests), workers]
        return cost_s

    return Game((count,) * requests, costs)


def find_equilibria(game: Game) -> Equilibria | None:
    """Try every profile: no player of an equilibrium pays less by changing alone.

    Returns:  None when there is no pure equilibrium, which congestion games and both legs' always have.
    Raises:   GameError when there are no profiles, or more than MOST_PROFILES.
    """
    profiles = math.prod(game.strategies)
    if not 1 <= profiles <= MOST_PROFILES:
        raise GameError("profiles", profiles, f"in [1, {MOST_PROFILES}]")
    costs = np.empty((*game.strategies, len(game.strategies)))
    for profile in np.ndindex(*game.strategies):
        costs[profile] = game.costs(profile)
    stable = np.ones(game.strategies, dtype=np.bool_)
    for player in range(len(game.strategies)):
        own = costs[..., player]
        stable &= own <= own.min(axis=player, keepdims=True) * (1 + _ROUNDING)
    if not stable.any():
        return None
    total = costs.sum(axis=-1)
    return Equilibria(
        optimum=_outcome(total, int(total.argmin())),
        best=_outcome(total, int(np.where(stable, total, np.inf).argmin())),
        worst=_outcome(total, int(np.where(stable, total, -np.inf).argmax())),
        pure=int(stable.sum()),
    )


def best_response(game: Game, start: Profile, *, most_moves: int = 10_000) -> Outcome | None:
    """Let one player at a time change to its best, until none wants to; for games too big to enumerate.

    Returns:  the equilibrium it ends in; None when it has not ended after so many moves.
    """
    profile = tuple(start)
    for _ in range(most_moves + 1):
        changed = _first_change(game, profile)
        if changed is None:
            return Outcome(float(game.costs(profile).sum()), profile)
        profile = changed
    return None


def _first_change(game: Game, profile: Profile) -> Profile | None:
    paid = game.costs(profile)
    for player, count in enumerate(game.strategies):
        options = [(*profile[:player], strategy, *profile[player + 1 :]) for strategy in range(count)]
        pays = np.array([game.costs(option)[player] for option in options])
        if paid[player] > pays.min() * (1 + _ROUNDING):
            return options[int(pays.argmin())]
    return None


def _outcome(total: Floats, index: int) -> Outcome:
    profile = np.unravel_index(index, total.shape)
    return Outcome(float(total.flat[index]), tuple(int(strategy) for strategy in profile))


def _ratio(cost: float, least: float) -> float:
    if cost <= least:
        return 1.0
    return cost / least if least else math.inf
