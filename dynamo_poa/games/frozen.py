"""What a window of routing decisions cost, and the least it could have cost.

Owns: the `frozen` price of a decision window (the paper's): Dynamo's own block cost per candidate, held at
      what it was when each decision was made, against the best assignment.
Does not own: which decisions make a window, or when there are too few of them (dynamo_poa/frozen.py); the
              calibrated price of a snapshot (routing.py).
Invariant: arrays in, numbers out; the optimum never exceeds the cost of any assignment within the slots.
Source: arXiv 2606.17081, the PoA-hat estimator; the cost is Dynamo's KvRouter's (host: kv_router selector).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# A share of 4 decisions summed from thirds arrives as 4.0000000000000009 and is still four slots.
_ROUNDING = 1e-9
_PRICE_ROUNDS = 60
_PRICE_DECAY = 0.93


class FrozenCost(NamedTuple):
    """Cost of the assignment that was made and of the best one, in Dynamo's block units."""

    observed: float
    optimal: float


def block_cost(
    uncached_tokens: Floats,
    queued_prefill_tokens: Floats,
    decode_blocks: Floats,
    *,
    block_size: int,
    prefill_load_scale: float = 1.0,
) -> Floats:
    """Return what Dynamo's router charges a request for each candidate worker.

        cost = prefill_load_scale * (queued_prefill_tokens + uncached_tokens) / block_size + decode_blocks

    `uncached_tokens` already carries the overlap credit: what is cached on the worker is not in it. So there
    is no separate credit term, and the cost means the same whatever ω was in force.

    Args:     arrays of one shape, usually `(m,)` candidates.  block_size: tokens.
              decode_blocks: with the request's own, as Dynamo's potential loads have them.
    Returns:  the same shape, in blocks.
    Source:   host: KvRouter's cost function, Dynamo 1.4.2.
    """
    prefill_tokens = queued_prefill_tokens + uncached_tokens
    return prefill_load_scale * prefill_tokens / block_size + decode_blocks


def slots_per_worker(feasible: NDArray[np.bool_]) -> Indices:
    """Return how many decisions each worker may take in the best assignment: its fair share, rounded up.

        slots[w] = ceil( sum over decisions r that w was a candidate of: 1 / candidates(r) )

    This is ceil(n / m) when all m workers are candidates throughout. When workers come and go it still leaves
    room for every decision: the even split is a fractional assignment within them, so a whole one exists.

    Args:     feasible: `(n, m)`; every row has at least one candidate.
    Returns:  `(m,)` whole numbers summing to at least n.
    """
    shares: Floats = feasible / feasible.sum(axis=1, keepdims=True)
    slots: Indices = np.ceil(shares.sum(axis=0) - _ROUNDING).astype(np.intp)
    return slots


def frozen_cost(cost: Floats, chosen: Indices) -> FrozenCost:
    """Price a window of decisions as made, and at best, with every cost held at what it was when decided.

        observed = sum over r of cost[r, chosen[r]]
        optimal  = least sum over r of cost[r, w(r)] each worker at most slots_per_worker times

    The observed side is not bound by the slots, so herding on cheap workers can cost less than the "optimum":
    observed / optimal may fall under 1, as the paper says of its own estimator.

    Args:     cost: `(n, m)`, blocks, `inf` where a worker was no candidate of that decision; n >= 1.
              chosen: `(n,)` column of the worker taken, finite in its row.
    Returns:  both sums, in blocks.
    Source:   paper, PoA-hat; exactness of slots: a transportation problem, solved by the Hungarian method.
    """
    observed = float(cost[np.arange(len(chosen)), chosen].sum())
    slots = slots_per_worker(np.isfinite(cost))
    column_of = np.repeat(np.arange(len(slots)), slots)
    # One column per slot, padded to a square with decisions that cost nothing. A price on a worker adds the
    # same to every assignment, so the best one stays the best, and with fair prices the solver finds most of
    # it at once. Measured: 64 workers, 512 decisions, 4-9 ms in all against 3-35 ms without.
    by_slot = np.zeros((len(column_of), len(column_of)))
    by_slot[: len(cost)] = cost[:, column_of]
    rows, columns = linear_sum_assignment(by_slot + _fair_prices(cost, slots)[column_of])
    return FrozenCost(observed, float(by_slot[rows, columns].sum()))


def _fair_prices(cost: Floats, slots: Indices) -> Floats:
    """Return a price per worker under which decisions that choose freely fill about the slots there are.

    A worker that is chosen too often gets dearer, one that is chosen too rarely cheaper, by ever less. How
    close this comes decides how fast the optimum is found and not what it is.
    """
    prices = np.zeros(cost.shape[1])
    step = float(cost[np.isfinite(cost)].std()) / 4
    for _ in range(_PRICE_ROUNDS):
        chosen = np.bincount((cost + prices).argmin(axis=1), minlength=len(slots))
        prices += step * np.clip(chosen / np.maximum(slots, 1) - 1, -1, 1)
        step *= _PRICE_DECAY
    return prices
