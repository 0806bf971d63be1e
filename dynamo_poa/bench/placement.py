"""How long the best placement of prefixes takes to find and to prove.

Owns: the instances, timing their optima, the figure.
Does not own: the optimum (games/caching.py); that it is one is what the tests show. Prefixes that begin with
              one another, whose proof takes longer: here none does.
Invariant: instances are drawn anew for each round from a fixed seed, and every run prices the same ones. The
           time is CPU of the one thread that a call takes: a search is not given up when others are busy.
Source: goal: 200 prefix groups on 16 workers exact in 2 s, in a thread beside the tick.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dynamo_poa.bench.report import Figure, Measure, at_least, at_most, plain
from dynamo_poa.games.caching import Placing, optimum

GROUPS, WORKERS, GOAL_S = 200, 16, 2.0
LIMIT_S = 10.0  # beyond the goal, so that a miss is told with how long it takes
ROOM_FRACS = (0.02, 0.05, 0.125)  # of all groups' blocks that a worker has room for, in turns
DEEPEST = 8  # prefixes have 2, 4, ... 2**8 blocks
REQUESTS, WINDOW_S = 3000, 60.0
BLOCK_S, NODE_S, FAR_S = 1.6e-3, 1.12e-5, 1.04e-4  # a block of 16 tokens: computed, from the node, from far
EVERYWHERE, ANYWHERE, SOMEWHERE = 50.0, 0.5, 0.05  # how evenly requests of a group spread over workers


class Kind(NamedTuple):
    """What differs between instances: how many nodes there are, who is asked, whether caches are moved."""

    nodes: int
    evenness: float = ANYWHERE
    fetching: bool = True


KINDS = {
    "one node": Kind(1),
    "4 nodes": Kind(4),
    "4 nodes, demand even": Kind(4, EVERYWHERE),
    "4 nodes, demand at few": Kind(4, SOMEWHERE),
    "16 nodes": Kind(16),
    "nothing fetched": Kind(4, ANYWHERE, False),
}


class Spent(NamedTuple):
    """What one instance took: CPU of the search and of the greedy one, and how good that is."""

    exact: bool
    search_s: float
    greedy_s: float
    greedy_excess_frac: float  # of the greedy placement's cost over the best one's


def measure(rounds: int, say: Callable[[str], None]) -> Figure:
    """Place so many instances of each kind."""
    optimum(instance("one node", 0, groups=8, workers=2))  # the first call pays for imports
    spent: dict[str, list[Spent]] = {}
    for kind in KINDS:
        spent[kind] = [_placed(instance(kind, seed)) for seed in range(rounds)]
        times_s = [each.search_s for each in spent[kind]]
        say(f"{kind}: median {statistics.median(times_s):.2f} s, worst {max(times_s):.2f} s")
    return figure(spent)


def figure(spent: dict[str, list[Spent]]) -> Figure:
    """Turn what the instances of each kind took into the figure."""
    every = [each for kind in spent.values() for each in kind]
    times_s = [each.search_s for each in every]
    greedy_s = statistics.median(each.greedy_s for each in every)
    in_time = sum(each.exact and each.search_s <= GOAL_S for each in every) / len(every)
    excess = [each.greedy_excess_frac * 100 for each in every]
    measures: tuple[Measure, ...] = (
        at_most("exact_median_s", "proven optimum, median", statistics.median(times_s), "s", GOAL_S),
        at_most("exact_worst_s", "proven optimum, worst", max(times_s), "s", GOAL_S),
        at_least("in_time_percent", f"proven within {GOAL_S:g} s", in_time * 100, "%", 100.0),
        plain("greedy_median_s", "greedy with bound, median", greedy_s, "s"),
        plain(
            "greedy_excess_median_percent",
            "greedy, above the best, median",
            statistics.median(excess),
            "%",
        ),
        plain("greedy_excess_worst_percent", "greedy, above the best, worst", max(excess), "%"),
    )
    each = [
        f"{kind} {statistics.median(e.search_s for e in some):.2f} ({max(e.search_s for e in some):.2f})"
        for kind, some in spent.items()
    ]
    return Figure(
        name="placement",
        title=f"best placement of {GROUPS} prefix groups on {WORKERS} workers, CPU of the one thread",
        measures=measures,
        conditions=(
            f"proven to 0.1 % of the cost; {len(next(iter(spent.values())))} instances a kind, Zipf demand, "
            f"2 to {2**DEEPEST} blocks, room for {', '.join(f'{frac:.1%}' for frac in ROOM_FRACS)} of all "
            "blocks at each worker, in turns",
            f"median (worst) s: {', '.join(each)}",
        ),
    )


def instance(kind: str, seed: int, *, groups: int = GROUPS, workers: int = WORKERS) -> Placing:
    """Draw prefix groups of one kind and the room there is for them."""
    nodes, evenness, fetching = KINDS[kind]
    random = np.random.default_rng((seed, list(KINDS).index(kind)))
    size = 2 ** random.integers(1, DEEPEST + 1, groups)
    share = 1.0 / random.permutation(np.arange(1, groups + 1))
    by_worker = random.dirichlet(np.full(workers, evenness), groups)
    room = int(ROOM_FRACS[seed % len(ROOM_FRACS)] * size.sum())
    never = np.full(groups, np.inf)
    return Placing(
        size_blocks=size,
        capacity_blocks=np.full(workers, room),
        rate=random.poisson(REQUESTS * (share / share.sum())[:, None] * by_worker) / WINDOW_S,
        recompute_s=size * BLOCK_S,
        node=np.arange(workers) * nodes // workers,
        fetch_node_s=size * NODE_S if fetching else never,
        fetch_far_s=size * FAR_S if fetching else never,
    )


def _placed(game: Placing) -> Spent:
    before_s = time.thread_time()
    best = optimum(game, exact_s=LIMIT_S)
    between_s = time.thread_time()
    fast = optimum(game, exact_s=0.0)
    greedy_s = time.thread_time() - between_s
    excess = fast.cost_s / best.cost_s - 1 if best.cost_s else 0.0
    return Spent(best.method == "exact", between_s - before_s, greedy_s, excess)
