"""What the placement benchmark draws, and what it makes of what it measured."""

import numpy as np
import pytest

from dynamo_poa.bench.placement import GOAL_S, GROUPS, KINDS, ROOM_FRACS, WORKERS, Spent, figure, instance
from dynamo_poa.games.caching import optimum, placement_cost


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_is_a_game_and_the_same_in_every_run(kind):
    """A figure can only be repeated on the same instances."""
    drawn, again, other = (instance(kind, seed, groups=12, workers=4) for seed in (0, 0, 1))
    for array, same in zip(drawn, again, strict=True):
        assert np.array_equal(array, same)
    assert not np.array_equal(drawn.rate, other.rate)
    found = optimum(drawn)
    assert found.method == "exact"
    assert 0 < found.cost_s == placement_cost(drawn, found.holds)


def test_the_instances_are_of_the_size_that_the_goal_names():
    """Issue 7: 200 prefix groups on 16 workers in 2 s; sizes of powers of two, room for less than all."""
    assert (GROUPS, WORKERS, GOAL_S) == (200, 16, 2.0)
    for seed, room_frac in enumerate(ROOM_FRACS):
        game = instance("4 nodes", seed)
        assert game.rate.shape == (200, 16)
        assert set(game.size_blocks.tolist()) == {2**power for power in range(1, 9)}
        assert game.capacity_blocks.tolist() == [int(room_frac * game.size_blocks.sum())] * 16
        assert np.bincount(game.node).tolist() == [4] * 4


def test_what_was_measured_becomes_median_worst_and_the_share_in_time():
    """One of four is proven too late and one not at all: 50 %."""
    made = figure(
        {
            "one node": [Spent(True, 0.5, 0.1, 0.0), Spent(True, 1.5, 0.3, 0.25)],
            "4 nodes": [Spent(True, 3.0, 0.1, 0.5), Spent(False, 1.0, 0.1, 0.125)],
        }
    )
    assert [(measure.key, measure.value, measure.reached) for measure in made.measures] == [
        ("exact_median_s", 1.25, True),
        ("exact_worst_s", 3.0, False),
        ("in_time_percent", 50.0, False),
        ("greedy_median_s", 0.1, None),
        ("greedy_excess_median_percent", 18.75, None),
        ("greedy_excess_worst_percent", 50.0, None),
    ]
    assert made.conditions[1] == "median (worst) s: one node 1.00 (1.50), 4 nodes 2.00 (3.00)"
