"""Arrival instants: rates, bursts and waves as asked for, a trace's times, bounds."""

import math
import random
from itertools import islice, takewhile

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import (
    Closed,
    Load,
    OnOff,
    Poisson,
    TraceTimes,
    Waves,
    instants,
    respaced,
)
from dynamo_poa.workloads.statistics import counts_in_windows, dispersion

LOADS = {
    "3 users": Closed(users=3),
    "3 users who think 0.5 s": Closed(users=3, think_s=0.5),
    "2.5 requests/s": Poisson(rate_rps=2.5),
    "20 requests/s for 5 s, 2 for 15 s": OnOff(on_rps=20, off_rps=2, on_s=5, off_s=15),
    "10 ± 80% requests/s every 60 s": Waves(mean_rps=10, swing_frac=0.8, period_s=60),
    "trace x 2": TraceTimes(speedup=2),
    "trace x 1, spread over 3 s": TraceTimes(spread_s=3),
}


def until(end_s, load, seed=1):
    return list(takewhile(lambda at_s: at_s < end_s, instants(load, random.Random(seed))))


@pytest.mark.parametrize(("text", "load"), LOADS.items())
def test_a_load_says_what_it_is_and_comes_back_from_json(text, load):
    """cells.py: pairs are found by the text, results are read back from JSON."""
    assert load.text == text
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load


@pytest.mark.parametrize("seed", range(4))
def test_poisson_arrivals_have_their_rate_and_are_no_burstier_than_chance(seed):
    """20 a second for 1000 s: rate within 3 % (4 sigma), dispersion within 0.15 of 1 (3.4 sigma)."""
    times_s = until(1000, Poisson(rate_rps=20), seed)
    assert len(times_s) / 1000 == pytest.approx(20, rel=0.03)
    assert dispersion(times_s, 1.0) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_on_and_off_have_each_its_own_rate(seed):
    """50 periods of 5 s at 20 and 15 s at 2 a second: within 6 % and 11 % (4 sigma)."""
    times_s = until(1000, OnOff(on_rps=20, off_rps=2, on_s=5, off_s=15), seed)
    on = sum(at_s % 20 < 5 for at_s in times_s)
    assert on / 250 == pytest.approx(20, rel=0.06)
    assert (len(times_s) - on) / 750 == pytest.approx(2, rel=0.11)


def test_nothing_comes_while_it_is_off_at_rate_zero_and_bursts_go_on():
    """A burst, silence, the next burst: at 0 no arrival can carry the stream over."""
    times_s = until(400, OnOff(on_rps=10, off_rps=0, on_s=2, off_s=6))
    assert {int(at_s // 8) for at_s in times_s} == set(range(50))
    assert max(at_s % 8 for at_s in times_s) < 2


@pytest.mark.parametrize("seed", range(4))
def test_waves_swing_about_their_mean(seed):
    """rate(t) = 10 * (1 + 0.8 sin): over 50 periods the halves have 10 * (1 +- 1.6 / pi), within 4 sigma."""
    times_s = until(1000, Waves(mean_rps=10, swing_frac=0.8, period_s=20), seed)
    up = sum(at_s % 20 < 10 for at_s in times_s)
    assert up / 500 == pytest.approx(10 * (1 + 1.6 / math.pi), rel=0.05)
    assert (len(times_s) - up) / 500 == pytest.approx(10 * (1 - 1.6 / math.pi), rel=0.09)


@pytest.mark.parametrize(
    "load",
    [
        OnOff(on_rps=20, off_rps=2, on_s=5, off_s=15),
        Waves(mean_rps=6.5, swing_frac=1, period_s=20),
    ],
)
def test_bursts_and_waves_are_burstier_than_poisson(load):
    """Index of dispersion in windows of a second; on-off by theory 1 + var/mean of the rates = 10.3."""
    assert dispersion(until(2000, load), 1.0) > 3


@settings(derandomize=True, max_examples=50)
@given(
    st.one_of(
        st.builds(Poisson, rate_rps=st.floats(0.01, 1000)),
        st.builds(
            OnOff,
            on_rps=st.floats(0.1, 1000),
            off_rps=st.just(0.0) | st.floats(0.01, 1000),
            on_s=st.floats(0.1, 100),
            off_s=st.floats(0.1, 100),
        ),
        st.builds(
            Waves,
            mean_rps=st.floats(0.1, 1000),
            swing_frac=st.floats(0, 1),
            period_s=st.floats(0.1, 1000),
        ),
    ),
    st.integers(0, 100),
)
def test_instants_never_go_back_and_come_again_with_the_seed(load, seed):
    """arrivals.py's invariant; the generator is the only source of chance."""
    times_s = list(islice(instants(load, random.Random(seed)), 200))
    assert times_s == sorted(times_s)
    assert times_s[0] > 0
    assert times_s == list(islice(instants(load, random.Random(seed)), 200))


def test_a_traces_times_begin_at_zero_and_are_sped_up():
    """Half of a file does not begin at 0; x 2 is twice as fast."""
    assert list(respaced([3, 3, 6, 11], TraceTimes(speedup=2), random.Random(1))) == [0, 0, 1.5, 4]


def test_requests_of_one_instant_are_spread_over_the_time_it_was_rounded_to():
    """Mooncake: one instant in 3 s. None goes past the next instant, none before its own."""
    times_s = [0.0] * 50 + [3.0] * 50 + [4.0] * 50
    spread = list(respaced(times_s, TraceTimes(spread_s=3), random.Random(1)))
    assert spread == sorted(spread)
    counts = [int(count) for count in counts_in_windows([*spread, 7.0], 1.0)]
    assert (sum(counts[:3]), counts[3], sum(counts[4:])) == (50, 50, 50)
    assert all(4 <= count <= 30 for count in (*counts[:3], *counts[4:]))  # 50 / 3, within 4 sigma


@pytest.mark.parametrize("spread_s", [0, 3])
def test_no_times_are_none(spread_s):
    """An empty part of a trace is no error here."""
    assert list(respaced([], TraceTimes(spread_s=spread_s), random.Random(1))) == []


@pytest.mark.parametrize(
    ("build", "problems"),
    [
        (lambda: Closed(users=0), ["Closed.users = 0: must be in [1, 100000]"]),
        (lambda: Poisson(rate_rps=0), ["Poisson.rate_rps = 0: must be > 0"]),
        (lambda: Poisson(rate_rps=math.nan), ["Poisson.rate_rps = nan: must be finite and > 0"]),
        (
            lambda: OnOff(on_rps=0, off_rps=-1, on_s=0, off_s=math.inf),
            [
                "OnOff.on_rps = 0: must be > 0",
                "OnOff.off_rps = -1: must be >= 0",
                "OnOff.on_s = 0: must be > 0",
                "OnOff.off_s = inf: must be finite and > 0",
            ],
        ),
        (
            lambda: Waves(mean_rps=1, swing_frac=1.1, period_s=1),
            ["Waves.swing_frac = 1.1: must be in [0, 1]"],
        ),
        (lambda: TraceTimes(speedup=0), ["TraceTimes.speedup = 0: must be > 0"]),
        (
            lambda: msgspec.json.decode(b'{"type":"poisson","rate_rps":-2}', type=Load),
            ["Poisson.rate_rps = -2.0: must be > 0"],
        ),
    ],
)
def test_a_load_out_of_bounds_is_refused_with_every_problem(build, problems):
    """Key, value, bound; from JSON too."""
    with pytest.raises(ConfigError) as refused:
        build()
    assert list(refused.value.problems) == problems
