"""What the recent requests would have cost under another setting, by the calibrated model.

Owns: which worker a setting would have sent each recorded decision to, with what probability; the price of
      that: the request's own predicted latency and the delay it brings to others there.
Does not own: the window of decisions (decisions.py), the cost of one request on one worker (marginal.py,
              which has it in plain arithmetic for requests), what becomes of a prediction (policies/).
Invariant: pure. Each decision is priced with the loads it met, which another setting would have changed: a
           prediction compares settings on one step and says nothing of queues that build up. A window that
           cannot be priced whole has no prediction, never one of zero.
Source: theory.md, Marginal-cost routing; Dynamo's cost and draw (host: KvRouter's selector, 1.4.2): softmax
        of the negated cost over its range and τ; at τ = 0 the least, ties at random.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.fitting import pressure
from dynamo_poa.frozen import PricedDecision
from dynamo_poa.games.frozen import block_cost
from dynamo_poa.marginal import NEAR_FRAC, OUTPUT_TOKENS, TTFT_WEIGHT
from dynamo_poa.values import Role, Selection, Setting, WorkerCard, WorkerKey, WorkerLatency

Floats = NDArray[np.float64]

MIN_DECISIONS = 8  # of a leg, all of whose candidates have a curve


class Model(NamedTuple):
    """What decisions are priced with.

    output_tokens:   decode iterations of a request, mean, where known
    arrivals_per_s:  requests at all routers together; 0 while unknown
    scale_is_weight: ω is Dynamo's prefill_load_scale (PoaRouter.overlap_key) and not its overlap credit
    """

    latencies: Mapping[WorkerKey, WorkerLatency]
    cards: Mapping[int, WorkerCard]
    block_size: int
    output_tokens: Mapping[Role, float] = {}
    arrivals_per_s: float = 0.0
    scale_is_weight: bool = False


class _Leg(NamedTuple):
    """A leg's decisions, `(n, m)`, and its workers, `(m,)`; `there`: the worker was a candidate."""

    role: Role
    there: NDArray[np.bool_]
    uncached: Floats
    queued: Floats
    blocks: Floats
    active: Floats
    added: Floats
    prompt: Floats  # (n, 1)
    curves: Floats  # (6, m), rows in Curve's order
    max_requests: Floats
    max_kv_tokens: Floats


def predict(
    windows: Mapping[Role, Sequence[PricedDecision]], settings: Iterable[Setting], model: Model
) -> dict[Setting, float]:
    """Return the mean cost of a request under each setting, in seconds, summed over its model.

        cost = mean over decisions of sum over candidates of P(candidate | setting) * cost(candidate)

    Returns:  empty while a leg that has decisions cannot be priced.
    """
    found = [_leg(role, window, model) for role, window in windows.items() if window]
    known = [leg for leg in found if leg is not None]
    if not known or len(known) < len(found):
        return {}
    costs = [(leg, social_cost_s(leg, model)) for leg in known]
    return {
        setting: float(
            sum((chances(leg, setting, cost_s, model) * cost_s).sum() / len(cost_s) for leg, cost_s in costs)
        )
        for setting in settings
    }


def chances(leg: _Leg, setting: Setting, cost_s: Floats, model: Model) -> Floats:
    """Return `(n, m)`: the probability that each candidate is chosen under a setting."""
    if setting.selection is Selection.MARGINAL:
        costs = np.where(leg.there, cost_s, np.inf)
        return _even(costs <= costs.min(axis=1, keepdims=True) * (1 + NEAR_FRAC))
    costs = np.where(leg.there, _dynamo_cost(leg, setting, model), np.inf)
    low = costs.min(axis=1, keepdims=True)
    if setting.router_temperature == 0:
        return _even(costs <= low)
    spread = np.where(leg.there, costs, -np.inf).max(axis=1, keepdims=True) - low
    logits = -(costs - low) / np.where(spread > 0, spread, 1.0) / setting.router_temperature
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def social_cost_s(leg: _Leg, model: Model) -> Floats:
    """Return `(n, m)`: what each decision's request would have cost on each candidate; 0 where there is none.

    The formulas of marginal.py, of arrays. How many of a worker's requests still wait for their first token
    is not recorded: as many as make up what is queued at the window's mean prompt, at least one. Nor is how
    far their passes are: the next pass is this prompt's alone.
    """
    base_s, token_s, decode_base_s, request_s, kv_token_s, pressure_s = leg.curves
    output_tokens = model.output_tokens.get(leg.role, OUTPUT_TOKENS)
    arrivals_per_s = model.arrivals_per_s / leg.there.shape[1]
    mean_prompt = max(float(leg.uncached[leg.there].mean()), 1.0)
    waiting = np.where(leg.queued > 0, np.clip(np.ceil(leg.queued / mean_prompt), 1, None), 0.0)
    waiting = np.minimum(waiting, leg.active)
    own_prefill_s = base_s + token_s * leg.uncached
    there_s = np.where(leg.queued > 0, base_s + token_s * leg.queued, 0.0) + own_prefill_s
    cost_s = np.zeros(leg.there.shape)
    if leg.role is not Role.DECODE:
        cost_s = there_s + arrivals_per_s * there_s * token_s * leg.uncached
    if leg.role is Role.AGGREGATED:
        cost_s = TTFT_WEIGHT * cost_s + (leg.active - waiting) * own_prefill_s
    if leg.role is not Role.PREFILL:

        def pass_s(requests: Floats, kv_tokens: Floats) -> Floats:
            pressed = pressure_s * pressure(kv_tokens / leg.max_kv_tokens)
            taken_s = decode_base_s + request_s * requests + kv_token_s * kv_tokens + pressed
            return np.where(requests > 0, taken_s, 0.0)

        kv_before = leg.blocks * model.block_size + leg.active * output_tokens / 2
        kv_tokens, requests = kv_before + leg.prompt + output_tokens / 2, leg.active + 1
        over_frac = np.maximum(requests / leg.max_requests, kv_tokens / leg.max_kv_tokens) - 1
        others = np.minimum(leg.active, leg.max_requests)
        after_s = pass_s(np.minimum(requests, leg.max_requests), np.minimum(kv_tokens, leg.max_kv_tokens))
        before_s = pass_s(others, np.minimum(kv_before, leg.max_kv_tokens))
        own_s = output_tokens * after_s
        cost_s = cost_s + own_s + others * output_tokens * (after_s - before_s)
        cost_s = cost_s + 2 * np.maximum(over_frac, 0.0) * own_s
    return np.where(leg.there, cost_s, 0.0)


def _dynamo_cost(leg: _Leg, setting: Setting, model: Model) -> Floats:
    """Return what Dynamo's router charges for each candidate, in blocks.

        scale * (queued + prompt - ω * cached) / block size + decode blocks, with the request's own

    On the decode leg neither ω nor the scale acts: Dynamo's own preset takes the prompt out of the cost.
    """
    blocks = leg.blocks + leg.added
    if leg.role is Role.DECODE:
        return blocks
    credit, scale = setting.overlap_weight, setting.prefill_load_scale
    if model.scale_is_weight:
        credit, scale = 1.0, setting.overlap_weight
    uncached = np.maximum(leg.prompt - credit * (leg.prompt - leg.uncached), 0.0)
    return block_cost(
        uncached,
        leg.queued,
        blocks,
        block_size=model.block_size,
        prefill_load_scale=1.0 if scale is None else scale,
    )


def _even(taken: NDArray[np.bool_]) -> Floats:
    return np.asarray(taken / taken.sum(axis=1, keepdims=True))


def _leg(role: Role, window: Sequence[PricedDecision], model: Model) -> _Leg | None:
    """Return a leg's window as arrays, of the decisions all of whose candidates have a curve."""
    known = {key for key, latency in model.latencies.items() if latency.role is role}
    known_tuples: dict[int, bool] = {}  # by identity: tuples of workers are shared
    usable = []
    for decision in window:
        whole = known_tuples.get(id(decision.workers))
        if whole is None:
            whole = known_tuples[id(decision.workers)] = known.issuperset(decision.workers)
        if whole and decision.loads.shape[1] == len(decision.workers):
            usable.append(decision)
    if len(usable) < MIN_DECISIONS:
        return None
    columns: dict[WorkerKey, int] = {}
    places: dict[int, NDArray[np.intp]] = {}
    for decision in usable:
        if id(decision.workers) not in places:
            place = [columns.setdefault(worker, len(columns)) for worker in decision.workers]
            places[id(decision.workers)] = np.array(place, dtype=np.intp)
    there = np.zeros((len(usable), len(columns)), dtype=np.bool_)
    values = np.zeros((5, len(usable), len(columns)))
    for row, decision in enumerate(usable):
        place_of = places[id(decision.workers)]
        there[row, place_of] = True
        values[0, row, place_of] = decision.uncached_tokens
        values[1:, row, place_of] = decision.loads
    prompt = np.array([[decision.prompt_tokens] for decision in usable], dtype=np.float64)
    uncached, queued, blocks, active, added = values
    cards = [model.cards.get(key.worker_id) for key in columns]
    slots = [card.max_num_seqs if card is not None else None for card in cards]
    kv = [
        card.total_kv_blocks * card.kv_block_size if card is not None and card.total_kv_blocks else None
        for card in cards
    ]
    curves = [
        (
            of.prefill_base_s,
            of.prefill_token_s,
            of.decode_base_s,
            of.decode_request_s,
            of.decode_kv_token_s,
            of.pressure_s,
        )
        for of in (model.latencies[key].curve for key in columns)
    ]
    return _Leg(
        role,
        there,
        np.minimum(uncached, prompt),
        queued,
        blocks,
        active,
        added,
        prompt,
        np.array(curves).T,
        np.array([slot or np.inf for slot in slots], dtype=np.float64),
        np.array([tokens or np.inf for tokens in kv], dtype=np.float64),
    )
