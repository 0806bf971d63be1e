"""What a window would have cost under another setting: Dynamo's draw, the cost of marginal.py, absences."""

import math

import numpy as np
import pytest

from dynamo_poa.counterfactual import Model, predict
from dynamo_poa.frozen import price
from dynamo_poa.marginal import COST, Ask, Loads, Room
from dynamo_poa.values import (
    Candidate,
    Curve,
    Decision,
    Role,
    Selection,
    Setting,
    WorkerCard,
    WorkerKey,
    WorkerLatency,
)

FAST = Curve(
    prefill_base_s=0.01,
    prefill_token_s=1e-4,
    decode_base_s=0.005,
    decode_request_s=1e-4,
    decode_kv_token_s=1e-7,
    pressure_s=1e-3,
)
SLOW = Curve(prefill_base_s=0.05, prefill_token_s=5e-4, decode_base_s=0.025, decode_request_s=5e-4)
KV = Setting(0.0, 1.0)
MARGINAL = Setting(0.0, 1.0, selection=Selection.MARGINAL)


def decision(candidates, role=Role.AGGREGATED, prompt_tokens=160):
    priced = price(
        Decision(
            request_id="r",
            role=role,
            decided_at_s=0.0,
            worker=WorkerKey(candidates[0].worker_id, candidates[0].dp_rank),
            prompt_tokens=prompt_tokens,
            revision=1,
            candidates=tuple(candidates),
        ),
        block_size=16,
    )
    assert priced is not None
    return priced


def model(*curves, role=Role.AGGREGATED, max_num_seqs=8, total_kv_blocks=200, **fields):
    """Return a model of workers 0, 1, ... with these curves."""
    keys = [WorkerKey(number, 0) for number in range(len(curves))]
    return Model(
        latencies={
            key: WorkerLatency(key=key, role=role, curve=curve)
            for key, curve in zip(keys, curves, strict=True)
        },
        cards={
            key.worker_id: WorkerCard(
                worker_id=key.worker_id,
                role=role,
                kv_block_size=16,
                max_num_seqs=max_num_seqs,
                total_kv_blocks=total_kv_blocks,
            )
            for key in keys
        },
        block_size=16,
        **fields,
    )


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("active", [0, 3, 7, 8, 20])
@pytest.mark.parametrize("blocks", [0, 40, 170, 300])
def test_a_request_costs_what_the_routers_own_arithmetic_says(role, active, blocks):
    """One formula, two forms: marginal.py for the request path, arrays here; one candidate, no choice."""
    queued = 100 if active else 0
    one = Candidate(0, 0, 96, queued, blocks, active, added_blocks=10)
    setting = model(FAST, role=role, output_tokens={role: 40.0}, arrivals_per_s=5.0)
    waiting = min(2, active)  # ceil(100 / 96)
    cost_s = COST[role](
        FAST,
        Loads(active - waiting, waiting, queued, blocks * 16 + active * 20.0),
        96,
        Ask(160, 40.0, 5.0),
        Room(8, 3200.0),
    )
    found = predict({role: [decision([one], role)] * 8}, [KV, MARGINAL], setting)
    assert found[KV] == pytest.approx(cost_s, rel=1e-12)
    assert found[MARGINAL] == found[KV]


def choices(candidates, setting, role=Role.AGGREGATED, **fields):
    """Return how likely each candidate is under a setting, read off costs of 1, 10, 100 s."""
    curves = [Curve(decode_base_s=float(10**number)) for number in range(len(candidates))]
    of = model(
        *curves, role=role, max_num_seqs=None, total_kv_blocks=None, output_tokens={role: 1.0}, **fields
    )
    found = predict({role: [decision(candidates, role)] * 8}, [setting], of)
    return found[setting]


def test_at_temperature_0_the_least_block_cost_is_taken_and_ties_are_even():
    """KvRouter: (queued + uncached) / 16 + blocks; workers 0 and 1 tie at 10 + 10, worker 2 has 21."""
    tied = [Candidate(number, 0, 160, 0, number // 2, 0, added_blocks=10) for number in range(3)]
    assert choices(tied, KV) == pytest.approx((1 + 10) / 2)


def test_at_a_temperature_dynamo_draws_by_softmax_over_the_range_of_costs():
    """exp(-(cost - least) / range / τ): costs 10, 12, 20 at τ = 0.5 weigh 1, e^-0.4, e^-2."""
    loaded = [Candidate(number, 0, 0, 0, blocks, 0) for number, blocks in enumerate((10, 12, 20))]
    weights = np.exp([0.0, -0.4, -2.0])
    assert choices(loaded, Setting(0.5, 1.0)) == pytest.approx(weights @ [1, 10, 100] / weights.sum())


@pytest.mark.parametrize(
    ("setting", "taken"),
    [(KV, 0), (Setting(0.0, 0.5), 1), (Setting(0.0, 0.5, 4.0), 0), (Setting(0.0, 0.0), 1)],
)
def test_overlap_weight_and_prefill_scale_weigh_the_cache_against_load(setting, taken):
    """Worker 0 holds 8 of 10 blocks and carries 6: 2 + 6 < 10; ω = 0.5: 6 + 6 > 10; scale 4: 30 < 40."""
    both = [Candidate(0, 0, 32, 0, 6, 0), Candidate(1, 0, 160, 0, 0, 0)]
    assert choices(both, setting) == pytest.approx(10**taken)


def test_where_the_weight_is_dynamos_scale_it_acts_as_that():
    """PoaRouter.overlap_key = prefill_load_scale: 0.5 x 2 + 6 > 0.5 x 10; at 1: 2 + 6 < 10."""
    both = [Candidate(0, 0, 32, 0, 6, 0), Candidate(1, 0, 160, 0, 0, 0)]
    assert choices(both, Setting(0.0, 0.5), scale_is_weight=True) == pytest.approx(10)
    assert choices(both, Setting(0.0, 1.0), scale_is_weight=True) == pytest.approx(1)


def test_on_the_decode_leg_neither_weight_nor_scale_acts():
    """Dynamo's own preset: prompts are not tracked there; worker 1 has fewer blocks."""
    both = [Candidate(0, 0, 0, 0, 6, 0, added_blocks=10), Candidate(1, 0, 0, 0, 5, 0, added_blocks=10)]
    for setting in (KV, Setting(0.0, 0.0, 4.0)):
        assert choices(both, setting, role=Role.DECODE) == pytest.approx(10)


def test_marginal_leaves_a_slow_worker_that_dynamo_takes_for_an_equal():
    """The straggler of the issue: same loads, 5x slower; Dynamo's draw is even, the rule avoids it."""
    equal = [Candidate(number, 0, 160, 0, 0, 0, added_blocks=10) for number in range(2)]
    found = predict({Role.AGGREGATED: [decision(equal)] * 8}, [KV, MARGINAL], model(FAST, SLOW))
    alone = {
        curve: COST[Role.AGGREGATED](curve, Loads(), 160, Ask(160), Room(8, 3200.0)) for curve in (FAST, SLOW)
    }
    assert found[MARGINAL] == pytest.approx(alone[FAST])
    assert found[KV] == pytest.approx((alone[FAST] + alone[SLOW]) / 2)


def test_both_legs_of_a_request_are_summed():
    """A request passes through both pools."""
    one = Candidate(0, 0, 160, 0, 0, 0, added_blocks=10)
    prefill, decode = decision([one], Role.PREFILL), decision([one], Role.DECODE)
    legs = [model(FAST, role=role) for role in (Role.PREFILL, Role.DECODE)]
    other = WorkerKey(1, 0)
    both = legs[0]._replace(
        latencies={**legs[0].latencies, other: WorkerLatency(key=other, role=Role.DECODE, curve=FAST)},
        cards={**legs[0].cards, 1: legs[1].cards[0]},
    )
    moved = decision([Candidate(1, 0, 160, 0, 0, 0, added_blocks=10)], Role.DECODE)
    alone = [
        predict({role: [one_leg] * 8}, [KV], leg)[KV]
        for role, one_leg, leg in zip((Role.PREFILL, Role.DECODE), (prefill, decode), legs, strict=True)
    ]
    found = predict({Role.PREFILL: [prefill] * 8, Role.DECODE: [moved] * 8}, [KV], both)
    assert found[KV] == pytest.approx(sum(alone))


def test_what_cannot_be_priced_whole_has_no_prediction():
    """No decisions, too few, a candidate without a curve, one leg of two: absent, never zero."""
    one = decision([Candidate(0, 0, 160, 0, 0, 0)])
    known = model(FAST)
    assert predict({}, [KV], known) == {}
    assert predict({Role.AGGREGATED: []}, [KV], known) == {}
    assert predict({Role.AGGREGATED: [one] * 7}, [KV], known) == {}
    assert predict({Role.AGGREGATED: [one] * 8, Role.DECODE: [one] * 8}, [KV], known) == {}
    strange = decision([Candidate(0, 0, 160, 0, 0, 0), Candidate(9, 0, 160, 0, 0, 0)])
    assert predict({Role.AGGREGATED: [one] * 7 + [strange] * 9}, [KV], known) == {}


def test_a_worker_that_was_no_candidate_is_not_chosen_for_it():
    """I5: workers come and go within a window; the dear one was never asked by the first half."""
    first, second = Candidate(0, 0, 160, 0, 0, 0), Candidate(1, 0, 160, 0, 0, 0)
    window = [decision([first])] * 8 + [decision([second])] * 8
    alone = [
        predict({Role.AGGREGATED: [decision([Candidate(0, 0, 160, 0, 0, 0)])] * 8}, [KV], model(curve))[KV]
        for curve in (FAST, SLOW)
    ]
    for setting in (KV, MARGINAL, Setting(0.7, 1.0)):
        found = predict({Role.AGGREGATED: window}, [setting], model(FAST, SLOW))[setting]
        assert found == pytest.approx(sum(alone) / 2)


def test_absurd_loads_give_a_finite_prediction_or_none():
    """Counts no engine has: still numbers."""
    huge = [Candidate(number, 0, 2**53, 2**53, 2**53, 2**53, added_blocks=2**53) for number in range(2)]
    found = predict(
        {Role.AGGREGATED: [decision(huge)] * 8}, [KV, Setting(0.7, 1.0), MARGINAL], model(FAST, SLOW)
    )
    assert len(found) == 3
    assert all(math.isfinite(cost_s) for cost_s in found.values())
