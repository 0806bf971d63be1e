"""Whether PoA-hat rises and latency bends upwards: worked numbers, and when there is no figure."""

import pytest

from dynamo_poa.trend import Trend, TrendState, curvature, next_trend, slope


def fed(loads, latency_s, state=None):
    state = state or TrendState()
    trend = Trend()
    for tick, load in enumerate(loads):
        state, trend = next_trend(state, 1000.0 + tick, poa_hat=None, p50_s=latency_s(load), load=load)
    return trend


def test_the_slope_is_that_of_least_squares():
    """1.0, 1.1, ... a second apart: 0.1 a second; fewer than five readings have none."""
    points = tuple((float(at), 1.0 + 0.1 * at) for at in range(10))
    assert slope(points) == pytest.approx(0.1)
    assert slope(points[:4]) is None


def test_readings_are_taken_once_a_second_and_forgotten_after_thirty():
    """The estimate changes once a second; ticks come four times as often."""
    state = TrendState()
    for tick in range(400):
        state, trend = next_trend(state, tick / 4, poa_hat=1.0 + tick / 200, p50_s=None, load=None)
    assert len(state.points) == 30
    assert trend.poa_slope == pytest.approx(0.02)
    assert trend.rising == "PoA-hat rises by 0.020 a second"


def test_a_quadratic_latency_is_recognised_by_its_share():
    """0.1 + 0.001 x^2 at x = 10: half of it is quadratic."""
    trend = fed([5.0, 10.0, 20.0] * 20 + [10.0], lambda x: 0.1 + 0.001 * x**2)
    assert trend.curvature == pytest.approx(0.5, abs=0.01)


def test_a_straight_line_has_no_curvature():
    """0.1 + 0.01 x."""
    assert fed([5.0, 10.0, 20.0] * 20, lambda x: 0.1 + 0.01 * x).curvature == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "loads", [[10.0, 10.1] * 30, [5.0, 20.0] * 5, [0.0] * 60], ids=["all alike", "too few", "no load"]
)
def test_with_too_little_to_fit_there_is_no_figure(loads):
    """Absent is not zero."""
    assert fed(loads, lambda x: 0.1).curvature is None


def test_nothing_is_fitted_without_readings():
    """The first tick."""
    assert curvature(TrendState().moments, 10.0) is None
    assert Trend().rising == ""
