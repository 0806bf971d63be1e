"""PoA-hat of a window of priced snapshots: when there is one, how sure it is, where the cost lies."""

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.estimator import MarginalEstimator, estimate_of, interval, shares
from dynamo_poa.snapshot import SnapshotPrice
from dynamo_poa.values import Role, Shares


def snap(at_s, observed=3.0, optimal=2.0, *, role=Role.DECODE, requests=4, unloaded=1.0, miss=0.25, lack=""):
    return SnapshotPrice(at_s, role, requests, observed, optimal, unloaded, miss, lack)


def fed(prices, window_s=60.0):
    estimator = MarginalEstimator(window_s)
    for price in prices:
        estimator.add([price])
    return estimator


def test_poa_hat_is_the_ratio_of_the_sums_and_not_the_mean_of_ratios():
    """theory.md: sum of observed over sum of optimal: a snapshot counts by what is at stake in it."""
    prices = [snap(t, 3.0, 1.0, unloaded=1.0) for t in range(4)] + [snap(4 + t, 10.0, 10.0) for t in range(4)]
    estimate = fed(prices).estimate(8.0)
    assert estimate.poa_hat == pytest.approx(52 / 44)
    assert (estimate.samples, estimate.requests, estimate.method) == (8, 4.0, "marginal")
    assert estimate.observed_s == pytest.approx(6.5)
    assert estimate.optimal_s == pytest.approx(5.5)


def test_legs_have_estimates_of_their_own_and_share_the_overall_one():
    """R2: prefill and decode are separate series; overall is of both, both costs being seconds."""
    prices = [snap(t, 4.0, 2.0, role=Role.PREFILL) for t in range(8)] + [snap(t, 3.0, 3.0) for t in range(8)]
    estimate = fed(prices).estimate(8.0)
    assert estimate.by_role == {"prefill": 2.0, "decode": 1.0}
    assert estimate.poa_hat == pytest.approx(7 / 5)
    assert estimate.samples == 8
    assert estimate.reason == ""


@pytest.mark.parametrize(
    ("prices", "reason"),
    [
        ([], "no decisions"),
        ([snap(t) for t in range(7)], "decode: 7 snapshots with 2 requests or more, 8 needed"),
        (
            [snap(t, requests=1) for t in range(20)],
            "decode: 0 snapshots with 2 requests or more, 8 needed",
        ),
        ([snap(t, lack="1 worker, 2 needed") for t in range(20)], "decode: 1 worker, 2 needed"),
        (
            [snap(t, 0.0, 0.0, requests=0) for t in range(20)],
            "decode: 0 snapshots with 2 requests or more, 8 needed",
        ),
    ],
)
def test_with_too_little_there_is_no_estimate_but_a_reason(prices, reason):
    """theory.md: absent, never 1.0 and never NaN (S4)."""
    estimate = fed(prices).estimate(20.0)
    assert (estimate.poa_hat, estimate.low, estimate.high, estimate.shares) == (None, None, None, None)
    assert estimate.samples == 0
    assert estimate.reason == reason


def test_one_absent_leg_leaves_the_other_its_estimate_and_says_so():
    """I7: prefill absent, decode goes on."""
    prices = [snap(0.0, role=Role.PREFILL)] + [snap(t) for t in range(8)]
    estimate = fed(prices).estimate(8.0)
    assert estimate.by_role == {"decode": 1.5}
    assert estimate.poa_hat == 1.5
    assert estimate.reason == "prefill: 1 snapshots with 2 requests or more, 8 needed"
    assert estimate.legs["prefill"].poa_hat is None


def test_snapshots_leave_the_window_and_a_leg_without_any_is_forgotten():
    """Sliding: what was before the window counts no more."""
    estimator = fed([snap(t, 9.0, 1.0) for t in range(10)] + [snap(100 + t, 2.0, 1.0) for t in range(10)])
    assert estimator.estimate(110.0).poa_hat == 2.0
    assert estimator.estimate(500.0).reason == "no decisions"


def test_shares_are_of_the_excess_over_the_unloaded_and_sum_to_one():
    """Observed 3, optimal 2, unloaded 1, miss 0.25: 0.25, 0.75 and 1 of 2."""
    assert shares([snap(0.0)]) == Shares(miss=0.125, congestion=0.375, capacity=0.5)
    assert shares([snap(0.0, 1.0, 1.0, unloaded=1.0, miss=0.0)]) is None


def test_the_interval_is_the_same_on_every_run_and_holds_the_estimate():
    """Seeded bootstrap; the point estimate lies inside for a stationary window."""
    rng = np.random.default_rng(5)
    prices = [snap(t, 2.0 + x, 1.0 + x / 3) for t, x in enumerate(rng.uniform(0, 1, 60))]
    first, second = fed(prices, 100.0).estimate(60.0), fed(prices, 100.0).estimate(60.0)
    assert first == second
    assert first.low < first.poa_hat < first.high


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 185), (0.7, 175), (0.9, 145)])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(correlation, least):
    """95 % nominal, of 200 windows of 60; snapshots like their neighbours say less than they seem."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        noise = np.empty(60)
        noise[0] = rng.normal()
        for i in range(1, 60):
            noise[i] = correlation * noise[i - 1] + math.sqrt(1 - correlation**2) * rng.normal()
        low, high = interval(1.5 + 0.1 * noise, np.ones(60))
        covered += low <= 1.5 <= high
    assert least <= covered <= 200


def test_the_interval_does_not_depend_on_how_many_resamples_are_drawn_at_once():
    """Of long recordings they are drawn in parts, to bound memory."""
    observed_s = np.random.default_rng(3).uniform(1.0, 2.0, 50)
    assert interval(observed_s, np.ones(50), most_rows=7 * 50) == interval(observed_s, np.ones(50))


def test_a_constant_window_has_an_interval_without_width():
    """Nothing varies, nothing is uncertain."""
    assert interval(np.full(8, 3.0), np.full(8, 2.0)) == (1.5, 1.5)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.floats(0, 50), st.floats(0, 1), st.floats(0, 1)),
        min_size=8,
        max_size=40,
    )
)
def test_poa_hat_is_at_least_one_and_its_interval_too(rows):
    """By construction: observed is never under optimal; shares are within [0, 1] and sum to 1."""
    window = deque(
        snap(float(t), optimal + excess, optimal, unloaded=unloaded * optimal, miss=miss * excess)
        for t, (optimal, excess, unloaded, miss) in enumerate(rows)
    )
    estimate = estimate_of({Role.DECODE: window})
    assert estimate.poa_hat >= 1 - 1e-12
    assert 1 - 1e-12 <= estimate.low <= estimate.high
    if estimate.shares is not None:
        parts = (estimate.shares.miss, estimate.shares.congestion, estimate.shares.capacity)
        assert sum(parts) == pytest.approx(1.0)
        assert all(-1e-12 <= part <= 1 + 1e-12 for part in parts)


@given(st.floats(1e-3, 1e3))
def test_scaling_all_costs_leaves_the_estimate_alone(scale):
    """PoA-hat and shares are ratios."""
    rng = np.random.default_rng(2)
    rows = [(t, 2 + x, 1 + x / 2) for t, x in enumerate(rng.uniform(0, 1, 20))]
    plain = fed([snap(t, o, p) for t, o, p in rows]).estimate(20.0)
    scaled = fed(
        [snap(t, scale * o, scale * p, unloaded=scale * 1.0, miss=scale * 0.25) for t, o, p in rows]
    ).estimate(20.0)
    assert scaled.poa_hat == pytest.approx(plain.poa_hat)
    assert (scaled.low, scaled.high) == pytest.approx((plain.low, plain.high))
    assert scaled.shares.miss == pytest.approx(plain.shares.miss)
