"""What the snapshot benchmark draws, and what it makes of its times."""

import numpy as np
import pytest

from dynamo_poa.bench.snapshot import KINDS, SIZES, figure, instance
from dynamo_poa.games.routing import decode_cost, decode_optimum, prefill_cost, prefill_optimum


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_is_a_game_and_the_same_in_every_run(kind):
    """A figure can only be repeated on the same instances."""
    drawn, again, other = instance(kind, 12, 4, 0), instance(kind, 12, 4, 0), instance(kind, 12, 4, 1)
    for array, same in zip(drawn.prefill + drawn.decode, again.prefill + again.decode, strict=True):
        assert np.array_equal(array, same)
    assert np.array_equal(drawn.prefill[0], other.prefill[0]) is (kind == "identical")
    for optimum, cost, game in (
        (prefill_optimum, prefill_cost, drawn.prefill),
        (decode_optimum, decode_cost, drawn.decode),
    ):
        least_s, workers = optimum(*game)
        assert 0 < least_s == cost(*game, workers)


def test_times_become_median_and_worst_per_leg_and_size():
    """Goals: 256 requests on 16 workers <= 10 ms, 512 on 64 <= 60 ms."""
    assert SIZES == {(256, 16): 10.0, (512, 64): 60.0}
    made = figure(
        {
            ("prefill", 256, 16): {"straggler": [1.0, 4.0], "random": [2.0, 11.0]},
            ("decode", 512, 64): {"random": [59.0]},
        }
    )
    assert [(measure.key, measure.value, measure.reached) for measure in made.measures] == [
        ("prefill_256_16_median_ms", 3.0, True),
        ("prefill_256_16_worst_ms", 11.0, False),
        ("decode_512_64_median_ms", 59.0, True),
        ("decode_512_64_worst_ms", 59.0, True),
    ]
    assert made.conditions == (
        "prefill, 256 requests, 16 workers, median (worst) ms: straggler 2.5 (4.0), random 6.5 (11.0)",
        "decode, 512 requests, 64 workers, median (worst) ms: random 59.0 (59.0)",
    )
