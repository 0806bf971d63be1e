"""Where the prefixes lie that are asked for, what that costs, and what the best placement would.

Owns: which game is played on what caches hold and routers ask for; the looks of the last `demand_window_s`
      and the estimate over them; how much is stored again soon after its eviction.
Does not own: the game (games/caching.py), what a cache holds (residency.py), how often (copies.py), which
              prefixes are asked for (demand_groups.py), when it is priced (slow_games.py).
Invariant: the best placement never counts for more than the observed one, so PoA-hat is 1 or more; absent is
           None with a reason.
Source: theory.md, Γ_KV.

What is compared. Costs are averaged over looks, not contents over time: who arrives at random finds what lies
there at a random instant, and looks are not timed by requests, so a prefix that is stored and evicted between
two of its requests counts for as long as it lies there. One that a running request is still computing lies
nowhere yet.

Prefixes lie in one another: a group that begins with another is priced as its blocks beyond it, which are of
no use to a worker without the others, and its requests ask for all of them. So a block counts once, whoever
asks for it, and only what lies beyond the longest prefix at hand is fetched or computed, in the observed
placement as in the best one. Held, of a group, is all of it beyond its parent or nothing.

What the best placement may use of a cache: what prefix groups hold there now, and what is empty. All else is
taken as given: prompts' own ends, blocks that running requests hold, the part of a shared prefix beyond the
power of two it is known by. A cache that keeps less of those could hold more prefixes, so PoA-hat prices
placement alone, not what is cached at all, and is rather too low than too high. Where events were missed
nothing counts as empty.

One thing makes it too high: where several groups part between two powers of two, what they share beyond the
smaller one counts for each, as requests tell no more. A cache that holds several of those seems to hold more
than it does, and the best placement may use that for others; never more than all of the cache.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.cache_state import CacheSnapshot
from dynamo_poa.config import CachingConfig
from dynamo_poa.copies import Rank, copies_of
from dynamo_poa.coupling import CachingEstimate
from dynamo_poa.demand_groups import PrefixGroup
from dynamo_poa.games.caching import Placing, optimum, placement_cost, shared_hits
from dynamo_poa.games.placing_program import usable
from dynamo_poa.values import Role, WorkerKey, WorkerLatency

ONE_WORKER = "fewer than 2 workers that compute prompts"
NO_BLOCKS = "no worker says that it caches anything"
NO_DEMAND = "fewer than 2 prefixes that requests share"
NO_CURVE = "how fast prompts are computed is not known"
NONE_HELD = "no cache holds any of the prefixes that are asked for"
FREE = "the best placement costs nothing: all that is asked for fits"

_NO_LIMIT = 2**62

Hashes = NDArray[np.uint64]
Held = NDArray[np.bool_]
Groups = Callable[[float, int], Sequence[PrefixGroup]]


class _Priced(NamedTuple):
    """A look, priced. `any_held`: of the prefixes asked for; `shared_frac`: of hits, None where none was."""

    at_s: float
    observed_s: float
    optimal_s: float
    bound_s: float
    exact: bool
    any_held: bool
    shared_frac: float | None


class Placements:
    """Looks at caches and demand now and then, and keeps what each look cost."""

    def __init__(
        self,
        config: CachingConfig,
        *,
        caches: Callable[[], Iterable[Rank]],
        groups: Groups,
        latencies: Callable[[], Mapping[WorkerKey, WorkerLatency]],
    ) -> None:
        """Look through these; each is asked once a look, and gives what nobody changes afterwards.

        Args:  groups: of an instant, and at most so many.
        """
        self._config = config
        self._caches, self._groups, self._latencies = caches, groups, latencies
        self._priced: deque[_Priced] = deque()
        self._evictions: deque[tuple[float, dict[WorkerKey, tuple[int, int]]]] = deque()

    def note_caches(self, at_s: float) -> Callable[[], CachingEstimate]:
        """Note an instant; return what prices it, in any thread, one look after the other."""
        ranks = [(card, cache) for card, cache in self._caches() if card.role is not Role.DECODE]
        groups = self._groups(at_s, self._config.max_groups)
        latencies = self._latencies()
        return lambda: self._estimate(at_s, ranks, groups, latencies)

    def _estimate(
        self,
        at_s: float,
        ranks: Sequence[Rank],
        groups: Sequence[PrefixGroup],
        latencies: Mapping[WorkerKey, WorkerLatency],
    ) -> CachingEstimate:
        config = self._config
        since_s = at_s - config.demand_window_s
        while self._priced and self._priced[0].at_s < since_s:
            self._priced.popleft()
        copies = copies_of(ranks, nodes_of(ranks, config.topology))
        played = instance(ranks, groups, latencies, config)
        if not isinstance(played, str):
            self._priced.append(_price(at_s, *played))
            # Caches that never hold what is asked for may not be told of at all: no figure, case E6.
            reason = "" if any(look.any_held for look in self._priced) else NONE_HELD
        else:
            reason = played
        counted = CachingEstimate(
            reason=reason,
            groups=0 if isinstance(played, str) or reason else len(played[1]),
            workers=len(ranks),
            uncertain=any(cache.approximate for _, cache in ranks),
            duplication=copies.duplication,
            copies_frac=copies.copies_frac,
            sampled_frac=copies.sampled_frac,
            reload_frac=self._reload_frac(at_s, ranks),
        )
        return counted if reason else over(self._priced, counted)

    def _reload_frac(self, at_s: float, ranks: Sequence[Rank]) -> float | None:
        """Return the share of the window's evictions that were stored again soon; None without evictions.

        A rank that came meanwhile counts from its first event on.
        """
        now = {cache.key: (cache.evicted, cache.reloaded) for _, cache in ranks}
        self._evictions.append((at_s, now))
        while len(self._evictions) > 2 and self._evictions[1][0] <= at_s - self._config.demand_window_s:
            self._evictions.popleft()
        before = self._evictions[0][1] if len(self._evictions) > 1 else {}
        evicted = reloaded = 0
        for key, counts in now.items():
            was = before.get(key, (0, 0))
            was = was if was <= counts else (0, 0)  # its worker began anew
            evicted, reloaded = evicted + counts[0] - was[0], reloaded + counts[1] - was[1]
        return min(max(reloaded, 0) / evicted, 1.0) if evicted > 0 else None


def over(priced: Iterable[_Priced], counted: CachingEstimate) -> CachingEstimate:
    """Return the estimate over several looks, with what was counted at the last.

        poa_hat = sum of observed_s / sum of optimal_s

    Looks at which no game could be played are not among them; those at which nobody held anything are.
    """
    looks = list(priced)
    observed_s, optimal_s, bound_s = (
        math.fsum(getattr(look, key) for look in looks) / len(looks)
        for key in ("observed_s", "optimal_s", "bound_s")
    )
    shared = [look.shared_frac for look in looks if look.shared_frac is not None]
    free = optimal_s <= 1e-12
    return CachingEstimate(
        poa_hat=None if free else observed_s / optimal_s,
        reason=FREE if free else "",
        observed_s=observed_s,
        optimal_s=optimal_s,
        bound_s=bound_s,
        method="exact" if all(look.exact for look in looks) else "greedy",
        groups=counted.groups,
        workers=counted.workers,
        uncertain=counted.uncertain,
        duplication=counted.duplication,
        copies_frac=counted.copies_frac,
        shared_hits_frac=math.fsum(shared) / len(shared) if shared else None,
        reload_frac=counted.reload_frac,
        sampled_frac=counted.sampled_frac,
    )


def instance(
    ranks: Sequence[Rank],
    groups: Iterable[PrefixGroup],
    latencies: Mapping[WorkerKey, WorkerLatency],
    config: CachingConfig,
) -> tuple[Placing, Held] | str:
    """Return the game of an instant and the placement observed, or why none can be played.

        size               = blocks beyond the parent's
        rate               = of the group and of all that begin with it
        capacity of a rank = sizes of the groups it holds + its blocks - those resident (0 where approximate);
                             its blocks where that is less
        recompute_s        = its prefill_token_s * tokens; from a slower tier of its own as within its node,
                             wherever the parent is

    Demand at ranks that have left is left out: whose requests come again is not known. What a rank holds
    without what it begins with does not count as held.

    Args:  groups: the parents of all among them.
    """
    if len(ranks) < 2:
        return ONE_WORKER
    if not any(cache.resident_blocks or cache.lower for _, cache in ranks):
        return NO_BLOCKS
    column = {cache.key: number for number, (_, cache) in enumerate(ranks)}
    asked = _asked(groups, column)
    if sum(not column.keys().isdisjoint(group.rates) for group in asked) < 2:
        return NO_DEMAND
    token_s = _prefill_token_s(ranks, latencies)
    if not token_s.any():
        return NO_CURVE
    chains = np.array([group.chain for group in asked], dtype=np.uint64)
    row = {group.chain: number for number, group in enumerate(asked)}
    parent = np.array([row.get(group.parent, -1) for group in asked], dtype=np.intp)
    held = np.stack([_holds(chains, [cache.chains]) for _, cache in ranks], axis=1)
    held = usable(held, parent)
    rate = np.zeros(held.shape)
    for number, group in enumerate(asked):
        for key, group_rps in group.rates.items():
            if key in column:
                rate[number, column[key]] = group_rps
    size = np.array([group.blocks for group in asked], dtype=np.int64)
    for child in np.flatnonzero(parent >= 0)[::-1].tolist():
        rate[parent[child]] += rate[child]
        size[child] -= size[parent[child]]
    block_tokens = np.array([card.kv_block_size for card, _ in ranks], dtype=np.float64)
    recompute_s = size[:, None] * (block_tokens * token_s)
    tokens = size * block_tokens.max()
    near_s, far_s = tokens * config.transfer_node_token_s, tokens * config.transfer_far_token_s
    lower = np.stack([_holds(chains, cache.lower.values()) for _, cache in ranks], axis=1)
    empty = np.array([_empty_blocks(cache) for _, cache in ranks], dtype=np.int64)
    blocks = [_NO_LIMIT if cache.total_blocks is None else cache.total_blocks for _, cache in ranks]
    endless = np.full(len(asked), math.inf)
    game = Placing(
        size_blocks=size,
        capacity_blocks=np.minimum(size @ held.astype(np.int64) + empty, blocks),
        rate=rate,
        recompute_s=np.where(lower, np.minimum(recompute_s, near_s[:, None]), recompute_s),
        node=np.array(nodes_of(ranks, config.topology), dtype=np.int64),
        fetch_node_s=endless if config.transfer == "none" else near_s,
        fetch_far_s=far_s if config.transfer == "all" else endless,
        parent=parent,
    )
    return game, held


def _asked(groups: Iterable[PrefixGroup], ranks: Container[WorkerKey]) -> list[PrefixGroup]:
    """Return the groups that are asked for at these ranks and those they begin with, shortest first."""
    shortest_first = sorted(groups, key=lambda group: group.blocks)
    asked, begun = list[PrefixGroup](), set[int]()
    for group in reversed(shortest_first):
        if group.chain in begun or any(key in ranks for key in group.rates):
            asked.append(group)
            begun.add(group.parent)
    return asked[::-1]


def nodes_of(ranks: Iterable[Rank], topology: str) -> list[int]:
    """Return a number for each rank's node; a worker whose host is not known is alone on one."""
    numbers: dict[str | WorkerKey, int] = {}
    found = []
    for card, cache in ranks:
        name: str | WorkerKey = cache.key
        if topology == "one":
            name = ""
        elif topology == "host":
            name = card.host or f"worker {card.worker_id}"
        found.append(numbers.setdefault(name, len(numbers)))
    return found


def _price(at_s: float, game: Placing, held: Held) -> _Priced:
    observed_s = placement_cost(game, held)
    best = optimum(game)
    return _Priced(
        at_s=at_s,
        observed_s=observed_s,
        optimal_s=min(best.cost_s, observed_s),  # the greedy one need not find what is there already
        bound_s=min(best.bound_s, observed_s),
        exact=best.method == "exact",
        any_held=bool(held.any()),
        shared_frac=shared_hits(game, held),
    )


def _prefill_token_s(
    ranks: Iterable[Rank], latencies: Mapping[WorkerKey, WorkerLatency]
) -> NDArray[np.float64]:
    """Return each rank's time for a prompt token: the others' median where it has none, 0 of nobody."""
    known = [latencies.get(cache.key) for _, cache in ranks]
    token_s = np.array([0.0 if one is None else one.curve.prefill_token_s for one in known])
    return np.where(token_s > 0, token_s, np.median(token_s[token_s > 0])) if token_s.any() else token_s


def _holds(chains: Hashes, caches: Iterable[Hashes]) -> Held:
    """Return which of a few hashes are in any of a rank's tiers."""
    order = np.argsort(chains)
    wanted = chains[order]
    held = np.zeros(len(chains), dtype=np.bool_)
    for cached in caches:
        place = np.minimum(np.searchsorted(wanted, cached), len(wanted) - 1)
        held[order[place[wanted[place] == cached]]] = True
    return held


def _empty_blocks(cache: CacheSnapshot) -> int:
    if cache.approximate or cache.total_blocks is None or cache.resident_blocks is None:
        return 0
    return max(cache.total_blocks - cache.resident_blocks, 0)
