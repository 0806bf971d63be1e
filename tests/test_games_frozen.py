"""What a window of decisions cost and could have cost: worked numbers, brute force, properties."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.games.frozen import block_cost, frozen_cost, slots_per_worker


def brute_force(cost, slots):
    """Return the least cost over every assignment within the slots, by trying them all."""
    n, m = cost.shape
    best = math.inf
    for assignment in itertools.product(range(m), repeat=n):
        if all(assignment.count(worker) <= slots[worker] for worker in range(m)):
            best = min(best, sum(cost[row, worker] for row, worker in enumerate(assignment)))
    return best


@st.composite
def windows(draw):
    """Small windows in which workers may be absent from some decisions."""
    n, m = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    cost = np.array(draw(st.lists(st.floats(0, 1000), min_size=n * m, max_size=n * m))).reshape(n, m)
    for row in range(n):
        absent = draw(st.sets(st.integers(0, m - 1), max_size=m - 1))
        cost[row, list(absent)] = np.inf
    chosen = np.array([draw(st.sampled_from(list(np.flatnonzero(np.isfinite(line))))) for line in cost])
    return cost, chosen


def test_a_candidate_costs_its_prefill_blocks_and_its_decode_blocks():
    """Dynamo's cost: scale x (queued + uncached) / block size + decode blocks."""
    cost = block_cost(
        np.array([100.0, 36.0]),
        np.array([60.0, 0.0]),
        np.array([7.0, 20.0]),
        block_size=16,
        prefill_load_scale=2.0,
    )
    assert cost.tolist() == [2 * 160 / 16 + 7, 2 * 36 / 16 + 20]


def test_herding_on_one_worker_is_priced_against_the_spread():
    """Two requests both sent to the worker at 10 and then 30 blocks, the other at 12: 40 against 22."""
    priced = frozen_cost(np.array([[10.0, 12.0], [30.0, 12.0]]), np.array([0, 0]))
    assert priced == (40.0, 22.0)


def test_the_observed_cost_can_be_under_the_optimum():
    """The optimum must spread evenly and the router need not: 2 blocks against 1 + 9 (paper: PoA-hat < 1)."""
    priced = frozen_cost(np.array([[1.0, 9.0], [1.0, 9.0]]), np.array([0, 0]))
    assert priced == (2.0, 10.0)


def test_slots_are_the_rounded_up_share_when_all_workers_stay():
    """theory.md: each worker offers ceil(n / m) slots."""
    assert slots_per_worker(np.ones((256, 3), dtype=bool)).tolist() == [86, 86, 86]
    assert slots_per_worker(np.ones((9, 3), dtype=bool)).tolist() == [3, 3, 3]


def test_a_worker_that_joined_at_the_last_decision_offers_one_slot():
    """Its fair share of one decision among three; the other two keep room for all the rest."""
    feasible = np.ones((10, 3), dtype=bool)
    feasible[:9, 2] = False
    assert slots_per_worker(feasible).tolist() == [5, 5, 1]


def test_a_fleet_replaced_half_way_is_priced_within_each_half():
    """Decisions before the change can only have gone to the old workers, and after it to the new ones."""
    inf = np.inf
    cost = np.array([[1.0, 5.0, inf, inf], [1.0, 2.0, inf, inf], [inf, inf, 8.0, 3.0], [inf, inf, 4.0, 3.0]])
    assert frozen_cost(cost, np.array([1, 0, 2, 3])) == (5.0 + 1.0 + 8.0 + 3.0, 1.0 + 2.0 + 3.0 + 4.0)


@given(windows())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_optimum_is_what_trying_every_assignment_finds(window):
    """Exactness, 1e-9, workers absent from some decisions included."""
    cost, chosen = window
    priced = frozen_cost(cost, chosen)
    assert priced.optimal == pytest.approx(
        brute_force(cost, slots_per_worker(np.isfinite(cost))), rel=1e-9, abs=1e-9
    )
    assert math.isfinite(priced.observed)


@given(windows(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_price_does_not_depend_on_the_order_of_workers(window, random):
    """Columns are labels: permuting them changes nothing."""
    cost, chosen = window
    order = list(range(cost.shape[1]))
    random.shuffle(order)
    permuted = frozen_cost(cost[:, order], np.array([order.index(worker) for worker in chosen]))
    assert permuted == pytest.approx(frozen_cost(cost, chosen), rel=1e-12, abs=1e-9)
