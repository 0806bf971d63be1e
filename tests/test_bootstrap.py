"""The interval of a figure by resampling: expanded percentiles (`interval` is tested with the estimator)."""

import numpy as np
import pytest

from dynamo_poa.bootstrap import moving_blocks


def test_blocks_are_in_a_row_and_make_up_the_series() -> None:
    """Ten entries, blocks of ceil(10^(1/3)) = 3: four of them, cut to ten, around the end to the start."""
    blocks = moving_blocks(10, 5, power=1 / 3)
    assert (blocks.length, blocks.starts.shape) == (3, (5, 4))
    rows = blocks.rows(slice(0, 5))
    assert rows.shape == (5, 10)
    for resample, starts in zip(rows.tolist(), blocks.starts.tolist(), strict=True):
        assert resample == [(start + step) % 10 for start in starts for step in range(3)][:10]


def test_expanded_percentiles_are_worked_numbers() -> None:
    """15 blocks: t(14) = 2.1448, times sqrt(15/14) = 2.2201, a tail of 0.013207."""
    blocks = moving_blocks(60, 1001, power=1 / 3)
    assert blocks.starts.shape == (1001, 15)
    assert blocks.percentiles(np.arange(1001.0)) == pytest.approx((13.207, 986.793), abs=0.001)


def test_a_skewed_figure_s_interval_stays_within_what_resamples_gave() -> None:
    """Where the symmetric one would reach below the least of them."""
    blocks = moving_blocks(60, 200, power=1 / 3)
    gains = np.geomspace(0.1, 100, 200)
    low, high = blocks.percentiles(gains)
    assert 0.1 < low < 0.13
    assert 80 < high < 100
    assert blocks.interval(4.0, gains)[0] < 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_series_of_a_few_gives_all_there_is(n: int) -> None:
    """One block says nothing of how sure it is; the widest there is, and no division by nothing."""
    blocks = moving_blocks(n, 50, power=1 / 3)
    assert blocks.percentiles(np.arange(50.0)) == pytest.approx((0.0, 49.0), abs=2.5)
