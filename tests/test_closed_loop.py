"""Whether users who wait make the load: what in flight tells, and that in doubt they do not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamo_poa.closed_loop import users_of

Floats = NDArray[np.float64]


def open_loop(rate_rps: float, takes_s: float, seed: int) -> Floats:
    """Return in flight, second by second of a minute, of Poisson arrivals that take exponential times."""
    rng = np.random.default_rng(seed)
    warm_s = 10 * takes_s + 5
    begins = np.sort(rng.uniform(0, warm_s + 60, rng.poisson(rate_rps * (warm_s + 60))))
    ends = np.sort(begins + rng.exponential(takes_s, len(begins)))
    at_s = warm_s + np.arange(60)
    counts: Floats = (np.searchsorted(begins, at_s) - np.searchsorted(ends, at_s)).astype(np.float64)
    return counts


def users(count: int, away_frac: float, seed: int = 0) -> Floats:
    """Return in flight of users each of whom is away so much of the time, independently each second."""
    return np.random.default_rng(seed).binomial(count, 1 - away_frac, 60).astype(float)


def test_a_constant_count_is_that_of_users() -> None:
    """Measured live: 28 closed-loop users, 28 in flight in each second of a recording."""
    assert users_of(np.full(60, 28.0), 4.0) == 28


@pytest.mark.parametrize(("away_frac", "found"), [(0.05, 95), (0.5, 0)])
def test_users_who_are_hardly_away_are_known_and_those_who_think_are_not(
    away_frac: float, found: int
) -> None:
    """Binomial: the variance is `away_frac` of the mean, here 0.05 and 0.5."""
    assert users_of(users(100, away_frac), 40.0) == pytest.approx(found, abs=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("rate_rps", "takes_s"), [(50.0, 0.3), (50.0, 3.0), (5.0, 3.0), (50.0, 60.0), (2.0, 120.0)]
)
def test_an_open_loop_is_none_however_long_its_requests_take(
    rate_rps: float, takes_s: float, seed: int
) -> None:
    """M/G/infinity: where they are short it varies, where long it changes by what comes and ends."""
    assert users_of(open_loop(rate_rps, takes_s, seed), rate_rps) == 0


def test_a_count_that_drifts_is_no_users() -> None:
    """A pool over its capacity to which a clock sends: steady from one second to the next, not over them."""
    drifting = 100 + np.arange(60.0)
    assert float((np.diff(drifting) ** 2).mean()) / 2 < 0.1 * 50
    assert users_of(drifting, 50.0) == 0


def test_what_is_known_too_little_of_is_an_open_loop() -> None:
    """Fewer seconds than tell, or a count in too few of them; a few silent ones do no harm."""
    assert users_of(np.full(19, 28.0), 4.0) == 0
    assert users_of(np.full(20, 28.0), 4.0) == 28
    gaps = np.full(60, 28.0)
    gaps[3:9] = np.nan
    assert users_of(gaps, 4.0) == 28
    gaps[9] = np.nan
    assert users_of(gaps, 4.0) == 0
    assert users_of(np.zeros(0), 4.0) == 0
    assert users_of(np.zeros(60), 4.0) == 0


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    counts=st.lists(st.one_of(st.integers(0, 10**6), st.just(float("nan"))), max_size=40),
    rate=st.floats(0, 1e6),
)
def test_users_are_never_more_than_the_most_in_flight(counts: list[float], rate: float) -> None:
    """Whatever comes."""
    found = users_of(np.array(counts, dtype=np.float64), rate)
    assert 0 <= found <= max([0.0, *(count for count in counts if count == count)])
