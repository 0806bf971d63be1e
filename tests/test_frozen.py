"""When there is an estimate and what it says: worked numbers, absences with reasons."""

import numpy as np
import pytest

from dynamo_poa.frozen import PricedDecision, frozen_estimate, price
from dynamo_poa.values import Candidate, Decision, Role, WorkerKey

W2, W3 = 14370722098883561847, 14370722098883561846  # equal as doubles, case E4


def decision(worker, candidates, role=Role.PREFILL):
    return Decision(
        request_id="r",
        role=role,
        decided_at_s=0.0,
        worker=WorkerKey(*worker),
        prompt_tokens=64,
        revision=1,
        candidates=tuple(Candidate(*c, 0, added_blocks=4) for c in candidates),
    )


def window(costs, chosen, workers=None):
    """Build a priced window from plain lists: one row per decision, one column per worker."""
    workers = workers or tuple(WorkerKey(w, 0) for w in range(len(costs[0])))
    return [
        PricedDecision(workers, np.array(row, dtype=float), c, np.zeros(len(row)))
        for row, c in zip(costs, chosen, strict=True)
    ]


def test_a_decision_is_priced_per_candidate_in_ascending_order_of_worker():
    """Dynamo's block cost, own 4 blocks included; ids equal as doubles stay two workers (E4)."""
    priced = price(decision((W2, 0), [(W2, 0, 32, 16, 5), (W3, 0, 64, 0, 0)]), block_size=16)
    assert priced is not None
    assert priced.workers == (WorkerKey(W3, 0), WorkerKey(W2, 0))
    assert priced.costs.tolist() == [4.0 + 4, 8.0 + 4]
    assert priced.chosen == 1


def test_prefill_load_scale_weighs_prompt_tokens_against_decode_blocks():
    """Dynamo's prefill_load_scale multiplies the prefill part alone."""
    priced = price(decision((1, 0), [(1, 0, 32, 16, 5)]), block_size=16, prefill_load_scale=4.0)
    assert priced is not None
    assert priced.costs.tolist() == [4 * 3 + 5 + 4]


def test_ranks_of_one_worker_are_candidates_of_their_own():
    """A worker is its id and its data-parallel rank (E7)."""
    priced = price(decision((1, 3), [(1, 3, 16, 0, 0), (1, 0, 16, 0, 9)]), block_size=16)
    assert priced is not None
    assert priced.workers == (WorkerKey(1, 0), WorkerKey(1, 3))
    assert priced.chosen == 1


def test_decisions_with_the_same_candidates_share_their_tuple():
    """Memory of a window stays flat however many workers there are."""
    first = price(decision((1, 0), [(1, 0, 16, 0, 0), (2, 0, 16, 0, 0)]), block_size=16)
    assert first is not None
    second = price(
        decision((2, 0), [(2, 0, 16, 0, 0), (1, 0, 0, 0, 0)]), block_size=16, known_workers=first.workers
    )
    assert second is not None
    assert second.workers is first.workers


@pytest.mark.parametrize(
    "candidates", [[], [(2, 0, 16, 0, 0), (3, 0, 16, 0, 0)], [(1, 0, -16, 0, 0), (2, 0, 16, 0, 0)]]
)
def test_a_decision_that_cannot_be_priced_has_no_price(candidates):
    """No candidates recorded, worker taken not among them, negative count: absent, not zero."""
    assert price(decision((1, 0), candidates), block_size=16) is None


def test_poa_hat_is_observed_over_optimal_over_both_legs():
    """Prefill 8 x 3 against 4 x 3 + 4 x 1, decode 8 x 2 against 8 x 2: (24 + 16) / (16 + 16)."""
    estimate = frozen_estimate(
        {
            Role.PREFILL: window([[3, 1]] * 8, [0] * 8),
            Role.DECODE: window([[2, 2]] * 8, [0, 1] * 4),
        }
    )
    assert (estimate.poa_hat, estimate.samples, estimate.method) == (1.25, 16, "frozen")
    assert estimate.by_role == {"prefill": 1.5, "decode": 1.0}


def test_poa_hat_may_fall_under_one():
    """All eight on the cheap worker; the reference must spread: 8 against 4 + 4 x 3 (paper)."""
    estimate = frozen_estimate({Role.AGGREGATED: window([[1, 3]] * 8, [0] * 8)})
    assert estimate.poa_hat == 0.5


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ({}, "no decisions"),
        ({Role.PREFILL: []}, "prefill: 0 decisions with candidates, 8 needed"),
        ({Role.DECODE: window([[3, 1]] * 7, [0] * 7)}, "decode: 7 decisions with candidates, 8 needed"),
        ({Role.DECODE: window([[3]] * 8, [0] * 8)}, "decode: 1 worker, 2 needed"),
        ({Role.DECODE: window([[0, 0]] * 8, [0] * 8)}, "decode: zero cost"),
        ({Role.DECODE: window([[5, 0]] * 4 + [[0, 5]] * 4, [0] * 8)}, "decode: zero cost"),
    ],
)
def test_without_enough_to_go_by_the_estimate_is_absent_with_a_reason(windows, reason):
    """theory.md: absent, never 1.0 and never NaN; sample count 0 (S4)."""
    estimate = frozen_estimate(windows)
    assert (estimate.poa_hat, estimate.samples, estimate.reason) == (None, 0, reason)


def test_one_absent_leg_leaves_the_other_its_estimate_and_says_so():
    """I7: prefill estimate absent, decode estimate goes on."""
    estimate = frozen_estimate({Role.PREFILL: [], Role.DECODE: window([[3, 1]] * 8, [0] * 8)})
    assert estimate.poa_hat == 1.5
    assert estimate.samples == 8
    assert estimate.by_role == {"decode": 1.5}
    assert estimate.reason == "prefill: 0 decisions with candidates, 8 needed"


def test_a_worker_that_left_is_no_candidate_of_later_decisions():
    """I5(b): four decisions with workers a and b, four with b and c, each at its cheapest: ratio 1."""
    a, b, c = (WorkerKey(w, 0) for w in (1, 2, 3))
    before, after = window([[1, 9]] * 4, [0] * 4, (a, b)), window([[9, 1]] * 4, [1] * 4, (b, c))
    estimate = frozen_estimate({Role.DECODE: before + after})
    # Fair shares are 2, 4 and 2 slots: the reference puts two of each four on the dear worker.
    assert estimate.poa_hat == 8 / (4 * 1 + 4 * 9)
