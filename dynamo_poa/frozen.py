"""What the paper's own PoA-hat says of a window of decisions, for comparison.

Owns: pricing one decision (once, when it arrives), the conditions under which there is an estimate, PoA-hat
      per leg and overall.
Does not own: the arithmetic of the optimum (games/frozen.py), the window itself (decisions.py), the
              calibrated estimate (estimator.py), which is never mixed with this one in a series.
Invariant: an estimate is a finite ratio of costs paid, or absent with a reason; never NaN, and never 1.0
           for want of data. It may fall under 1: see `frozen_cost`.
Source: theory.md, estimator `frozen`; arXiv 2606.17081.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.games.frozen import FrozenCost, block_cost, frozen_cost
from dynamo_poa.values import Decision, Estimate, Role, WorkerKey
from dynamo_poa.wire import MAX_CANDIDATES

METHOD = "frozen"
MIN_DECISIONS = 8  # theory.md; fewer say nothing of a router that breaks ties at random
MIN_WORKERS = 2


class PricedDecision(NamedTuple):
    """A decision reduced to what its price needs.

    A window of these is small: 64 candidates take 0.5 kB a column and 10 kB as records.

    workers:  the candidates in ascending order; decisions with the same candidates share one tuple
    costs:    `(m,)` blocks, in the order of `workers`
    chosen:   index into both
    uncached_tokens:  `(m,)` of this prompt
    loads:    `(4, m)` queued prefill tokens, decode blocks, active requests, blocks this request would add
    """

    workers: tuple[WorkerKey, ...]
    costs: NDArray[np.float64]
    chosen: int
    uncached_tokens: NDArray[np.float64]
    prompt_tokens: int = 0
    loads: NDArray[np.float64] = np.zeros((4, 0))


def price(
    decision: Decision,
    *,
    block_size: int,
    prefill_load_scale: float = 1.0,
    known_workers: tuple[WorkerKey, ...] = (),
) -> PricedDecision | None:
    """Price a decision for every candidate it had.

    Args:     block_size: tokens.  known_workers: of the decision before, to be shared when they are the same.
    Returns:  None when candidates were not recorded, the worker taken is not among them (it joined since), or
              a count is negative: such a decision has no price, which is not a price of zero.
    """
    rows = sorted(
        (
            (
                c.worker_id,
                c.dp_rank,
                c.uncached_tokens,
                c.queued_prefill_tokens,
                c.decode_blocks + c.added_blocks,
                c.decode_blocks,
                c.active_requests,
                c.added_blocks,
            )
            for c in decision.candidates
        ),
        key=itemgetter(0, 1),
    )
    workers = tuple([WorkerKey(row[0], row[1]) for row in rows])
    if workers == known_workers:
        workers = known_workers
    if decision.worker not in workers:
        return None
    counts = np.array([row[2:] for row in rows], dtype=np.float64)
    if counts.min() < 0:
        return None
    uncached_tokens, queued_prefill_tokens, decode_blocks = counts[:, :3].T
    costs = block_cost(
        uncached_tokens,
        queued_prefill_tokens,
        decode_blocks,  # with the request's own, as Dynamo scores; else an idle fleet would cost nothing
        block_size=block_size,
        prefill_load_scale=prefill_load_scale,
    )
    return PricedDecision(
        workers,
        costs,
        workers.index(decision.worker),
        uncached_tokens.copy(),
        decision.prompt_tokens,
        counts[:, [1, 3, 4, 5]].T.copy(),
    )


class LegPrice(NamedTuple):
    """What a leg's window cost, or what it lacks."""

    cost: FrozenCost | None
    lack: str
    samples: int


def frozen_estimate(windows: Mapping[Role, Sequence[PricedDecision]]) -> Estimate:
    """Estimate PoA-hat of each leg and of all legs together, at once."""
    return combine({role: price_window(window) for role, window in windows.items()})


def combine(legs: Mapping[Role, LegPrice]) -> Estimate:
    """Estimate PoA-hat from what each leg's window cost.

        poa_hat = sum over legs of observed cost / sum over legs of optimal cost

    Returns:  absent legs are named in `reason` with what they lack; poa_hat is None when every leg is absent.
    """
    each = {str(role): _leg_estimate(leg) for role, leg in legs.items()}
    absent = [f"{role}: {leg.reason}" for role, leg in each.items() if leg.poa_hat is None]
    priced = [leg for leg in legs.values() if leg.cost is not None]
    reason = "; ".join(absent) or ("" if priced else "no decisions")
    if not priced:
        return Estimate(reason=reason, method=METHOD, legs=each)
    costs = [leg.cost for leg in priced if leg.cost is not None]
    return Estimate(
        poa_hat=sum(cost.observed for cost in costs) / sum(cost.optimal for cost in costs),
        samples=sum(leg.samples for leg in priced),
        reason=reason,
        method=METHOD,
        legs=each,
    )


def _leg_estimate(leg: LegPrice) -> Estimate:
    if leg.cost is None:
        return Estimate(reason=leg.lack, method=METHOD)
    return Estimate(poa_hat=leg.cost.observed / leg.cost.optimal, samples=leg.samples, method=METHOD)


def price_window(window: Sequence[PricedDecision]) -> LegPrice:
    """Price one leg's decisions, oldest first, as made and at best."""
    if len(window) < MIN_DECISIONS:
        return LegPrice(None, f"{len(window)} decisions with candidates, {MIN_DECISIONS} needed", 0)
    columns: dict[WorkerKey, int] = {}
    # By identity: the tuples are shared, and hashing them is not free.
    places: dict[int, NDArray[np.intp]] = {}
    for decision in window:
        if id(decision.workers) not in places:
            place = [columns.setdefault(worker, len(columns)) for worker in decision.workers]
            places[id(decision.workers)] = np.array(place, dtype=np.intp)
    if len(columns) > MAX_CANDIDATES:
        return LegPrice(None, f"{len(columns)} workers, at most {MAX_CANDIDATES} are priced", 0)
    if len(columns) < MIN_WORKERS:
        return LegPrice(None, f"{len(columns)} worker, {MIN_WORKERS} needed", 0)
    cost = np.full((len(window), len(columns)), np.inf)
    chosen = np.empty(len(window), dtype=np.intp)
    for row, decision in enumerate(window):
        place_of = places[id(decision.workers)]
        cost[row, place_of] = decision.costs
        chosen[row] = place_of[decision.chosen]
    result = frozen_cost(cost, chosen)
    # Prompts shorter than a block on idle workers: a ratio of nothing is not an estimate.
    if result.optimal <= 0:
        return LegPrice(None, "zero cost", 0)
    return LegPrice(result, "", len(window))
