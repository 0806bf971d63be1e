"""When the regime changes and when it does not: worked sequences, D1's plants, properties."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.config import RegimeConfig
from dynamo_poa.demand import Load
from dynamo_poa.regime import BASELINE_READINGS, next_regime, unseen
from dynamo_poa.regime_state import RegimeSignal, RegimeState, thresholds_s
from dynamo_poa.ttft import sample_of
from dynamo_poa.values import Applied, PoolRegime, Regime, Role

BELOW, TRANSITION, SATURATED = Regime.BELOW, Regime.TRANSITION, Regime.SATURATED
IDLE = {Role.PREFILL: PoolRegime(role=Role.PREFILL, known=True, idle=True)}
SECONDS = RegimeConfig(unit="seconds", theta1=1.0, theta2=10.0)


class Plant:
    """Feeds the machine tick by tick and keeps what it did."""

    def __init__(self, limits=SECONDS, state=None, tick_s=1.0, at_s=1000.0):
        self.limits, self.tick_s, self.at_s = limits, tick_s, at_s
        self.state = state or RegimeState()
        self.changes = []
        self.verdict = None

    def tick(self, p99_s=None, *, samples=100, in_flight=50, rate=None, fresh=True, **fields):
        self.at_s += self.tick_s
        before = self.state.regime
        signal = RegimeSignal(
            at_s=self.at_s,
            p99_s=p99_s,
            samples=samples if p99_s is not None else 0,
            fresh=fresh and p99_s is not None,
            load=Load(in_flight, rate),
            **fields,
        )
        self.state, self.verdict = next_regime(self.state, signal, self.limits)
        if self.state.regime is not before:
            self.changes.append((self.at_s, before, self.state.regime))
        return self.state.regime

    def ticks(self, count, p99_s=None, **fields):
        for _ in range(count):
            self.tick(p99_s, **fields)
        return self.state.regime

    @property
    def path(self):
        return [after for _, _, after in self.changes]


def test_load_over_both_thresholds_climbs_one_step_at_a_time():
    """D1: never a jump from below to saturated without the middle state."""
    plant = Plant()
    plant.ticks(12, 50.0)
    # Over at 1001, confirmed for 4 s at 1005; from there 5 s, by dwell and confirmation alike.
    assert plant.changes == [(1005.0, BELOW, TRANSITION), (1010.0, TRANSITION, SATURATED)]


def test_the_reason_of_a_change_names_value_threshold_and_dwell():
    """D1: every change with value, threshold and dwell left."""
    plant = Plant()
    plant.ticks(5, 2.0)
    assert plant.verdict.reason == "TTFT P99 2.000 s at or over θ1 1.000 s"
    assert plant.verdict.value_s == pytest.approx(2.0)
    assert plant.verdict.threshold_s == 1.0
    assert plant.verdict.dwell_left_s == 5.0
    plant.tick(2.0)
    assert plant.verdict.dwell_left_s == 4.0
    assert plant.verdict.hold is Applied.UNCHANGED


def test_a_wanted_step_waits_for_the_dwell_and_says_so():
    """TTFT is healthy and the load fell, but the last change was 1 s ago."""
    plant = Plant(msgspec.structs.replace(SECONDS, half_life_s=0.01))
    plant.ticks(5, 2.0)
    plant.tick(0.1, in_flight=5)
    assert plant.state.regime is TRANSITION
    assert plant.verdict.hold is Applied.HELD_DWELL
    assert plant.verdict.dwell_left_s == 4.0
    plant.ticks(4, 0.1, in_flight=5)
    assert plant.changes[-1] == (1010.0, TRANSITION, BELOW)
    assert plant.verdict.reason == (
        "TTFT P99 0.100 s under 1.000 s and the load fell: 5 in flight, needed at 50"
    )


def test_a_signal_alternating_around_the_threshold_changes_little():
    """D1a: 0.9 and 1.1 x θ1 every 3 ticks, 120 ticks: at most 4 changes, none closer than the dwell."""
    plant = Plant()
    for tick in range(120):
        plant.tick(0.9 if (tick // 3) % 2 else 1.1)
    assert plant.path == []


def test_an_alternation_longer_than_the_confirmation_steps_up_once_and_stays():
    """D1a with a slower swing: hysteresis keeps 0.9 x θ1 from ending the transition."""
    plant = Plant()
    for tick in range(240):
        plant.tick(0.9 if (tick // 12) % 2 else 1.1)
    assert plant.path == [TRANSITION]


def test_parameters_that_keep_ttft_up_at_low_load_are_given_up():
    """Measured: at τ = 0.7 four requests collide on two workers: P99 is 2 x baseline, never under 1.75 x."""
    plant = Plant()
    plant.ticks(10, 3.0, in_flight=20)
    plant.ticks(10, 0.8, in_flight=4)
    assert plant.path == [TRANSITION, BELOW]


def test_less_load_with_ttft_over_the_threshold_is_probed_after_a_while():
    """The parameters themselves may be what keeps it up: a probe after probe_s of less load."""
    plant = Plant(msgspec.structs.replace(SECONDS, probe_s=60.0))
    plant.ticks(10, 3.0, in_flight=20)
    started_s = plant.at_s
    for _ in range(100):
        plant.tick(0.2 if plant.state.regime is BELOW else 1.5, in_flight=4)
    assert plant.path == [TRANSITION, BELOW]
    assert plant.changes[-1][0] - started_s == 61.0


def test_the_controllers_own_effect_does_not_undo_itself():
    """D1b: constant load; 30 s at ω = 1, 8 s at ω = 0.1, thresholds 10 and 20 between; 200 ticks."""
    plant = Plant(RegimeConfig(unit="seconds", theta1=10.0, theta2=20.0))
    for _ in range(200):
        plant.tick(8.0 if plant.state.regime is SATURATED else 30.0, in_flight=64, rate=5.0)
    assert plant.path == [TRANSITION, SATURATED]
    assert "but the load did not fall: 64 in flight, needed at 64" in plant.verdict.reason


def test_a_probe_that_relapses_waits_twice_as_long_for_the_next():
    """D1b for ever: probe after 60 s, relapse, 120 s, relapse, 240 s."""
    plant = Plant(RegimeConfig(unit="seconds", theta1=10.0, theta2=20.0, probe_s=60.0))
    for _ in range(500):
        plant.tick(8.0 if plant.state.regime is SATURATED else 30.0, in_flight=64, rate=5.0)
    down = [at_s for at_s, before, _ in plant.changes if before is SATURATED]
    up = [at_s for at_s, _, after in plant.changes if after is SATURATED]
    assert [at_s - since_s for at_s, since_s in zip(down, up, strict=False)] == [60.0, 120.0, 240.0]


def test_when_fewer_wait_because_it_got_faster_it_is_let_go_wrongly_only_once():
    """Open loop, 10 requests/s: TTFT of 30 s holds 300 in flight, of 8 s holds 80; that is not less load."""
    plant = Plant(RegimeConfig(unit="seconds", theta1=10.0, theta2=20.0, probe_s=3600.0))
    for _ in range(600):
        ttft_s = 8.0 if plant.state.regime is SATURATED else 30.0
        plant.tick(ttft_s, in_flight=int(10 * ttft_s), rate=10.0)
    assert plant.path == [TRANSITION, SATURATED, TRANSITION, SATURATED]
    assert plant.state.needed[1] == Load(80, 10.0)


def test_load_that_really_comes_and_goes_is_followed_each_time():
    """A minute at 64, a minute at 10: no relapse, so no ever longer waits."""
    plant = Plant()
    for _ in range(4):
        plant.ticks(60, 3.0, in_flight=64, rate=20.0)
        plant.ticks(60, 0.2, in_flight=10, rate=12.0)
    assert plant.path == [TRANSITION, BELOW] * 4
    assert plant.state.probe_s is None


def test_a_ramp_that_goes_on_after_the_step_up_is_released_from_its_height():
    """Stepped up at 30 in flight, still needed at 120: 60 is less load although it is more than 30."""
    plant = Plant()
    plant.ticks(5, 3.0, in_flight=30)
    assert plant.state.regime is TRANSITION
    plant.ticks(10, 3.0, in_flight=120)
    plant.ticks(10, 0.2, in_flight=60)
    assert plant.path == [TRANSITION, BELOW]


@pytest.mark.parametrize("tick_s", [0.25, 1.0])
def test_a_spike_of_one_tick_changes_nothing(tick_s):
    """D1d: 100 x the threshold for a single tick."""
    plant = Plant(tick_s=tick_s)
    plant.ticks(20, 0.5)
    plant.tick(100.0)
    plant.ticks(60, 0.5)
    assert plant.path == []


def test_a_hiccup_that_stays_in_the_window_for_all_of_it_changes_nothing():
    """D1d by request: everything in flight stalls for 1 s, and the window of 3 s shows it for 3 s."""
    plant = Plant(RegimeConfig(baseline_s=0.1), tick_s=0.25)
    plant.ticks(40, 0.1)
    plant.ticks(12, 1.1)
    plant.ticks(60, 0.1)
    assert plant.path == []


@pytest.mark.parametrize("seed", range(5))
def test_after_overload_slow_outliers_do_not_keep_the_regime_up(seed):
    """D1c: overload 60 s, then healthy with 0.5 % at 30 x; `below` within 3 x dwell and there to stay."""
    chance = random.Random(seed)
    limits = RegimeConfig(baseline_s=0.1)
    plant = Plant(limits, tick_s=0.25, at_s=0.0)
    window: list[tuple[float, float]] = []
    for tick in range(4 * 260):
        overloaded = tick < 4 * 60
        for _ in range(10):  # 40 requests/s
            slow = overloaded or chance.random() < 0.005
            window.append((plant.at_s, 3.0 if slow else 0.1 * chance.uniform(0.7, 1.2)))
        window = [(at_s, ttft_s) for at_s, ttft_s in window if plant.at_s - at_s <= limits.window_s]
        sample = sample_of((ttft_s for _, ttft_s in window), fresh=True, source="decisions")
        plant.tick(sample.p99_s, samples=sample.samples, in_flight=120 if overloaded else 20, rate=40.0)
    assert plant.path == [TRANSITION, SATURATED, TRANSITION, BELOW]
    assert plant.changes[-1][0] - 60.0 <= 3 * limits.dwell_s


def test_idle_returns_to_below_step_by_step():
    """S4(a): no request for 5 s, then one step per dwell; the average is forgotten."""
    plant = Plant()
    plant.ticks(10, 50.0)
    assert plant.state.regime is SATURATED
    plant.ticks(20, None, in_flight=0)
    assert plant.changes[-2:] == [(1015.0, SATURATED, TRANSITION), (1020.0, TRANSITION, BELOW)]
    assert plant.state.average_s is None
    assert plant.verdict.reason == "idle: no request for 20.0 s"


def test_the_first_request_after_idle_changes_nothing():
    """S4(a): one sample is no signal, however slow."""
    plant = Plant()
    plant.ticks(30, None, in_flight=0)
    plant.ticks(30, 100.0, samples=1, in_flight=1)
    assert plant.path == []
    assert plant.verdict.hold is Applied.HELD_NOT_READY
    assert plant.verdict.reason == "1 TTFT samples, 20 needed"


def test_a_system_that_never_saw_traffic_is_below_with_a_reason():
    """No worker, no traffic, no TTFT yet: `below` with a reason."""
    plant = Plant()
    plant.tick(None, in_flight=None)
    assert (plant.state.regime, plant.verdict.reason) == (BELOW, "no TTFT yet")
    plant.ticks(5, None, in_flight=None)
    assert (plant.state.regime, plant.verdict.reason) == (BELOW, "no traffic yet")
    plant.tick(None, in_flight=None, workers=0)
    assert plant.verdict.reason == "no worker and no traffic"


def test_silence_of_ttft_with_requests_in_flight_holds():
    """Nothing gets a first token: that is no reason to step down."""
    plant = Plant()
    plant.ticks(10, 50.0)
    assert plant.ticks(100, None, in_flight=50) is SATURATED
    assert plant.verdict.reason == "no TTFT in the last 3 s"


def test_too_little_traffic_to_judge_still_ends_a_regime_when_the_load_fell():
    """One request a second never makes 20 samples; 2 in flight against 50 says enough, for 5 s."""
    plant = Plant()
    plant.ticks(5, 2.0)
    plant.ticks(30, 0.2, samples=3, in_flight=2)
    assert plant.changes[-1] == (1011.0, TRANSITION, BELOW)


def test_refusals_keep_the_regime_from_below_however_good_ttft_looks():
    """S8: more than 1 % refused; back once they stop."""
    plant = Plant()
    plant.ticks(10, 0.1, shed_frac=0.15, in_flight=50)
    assert plant.path == [TRANSITION]
    plant.ticks(60, 0.1, shed_frac=0.15, in_flight=20)
    assert plant.path == [TRANSITION]
    assert plant.verdict.reason == "15.0% of requests refused, more than 1%"
    plant.ticks(5, 0.1, in_flight=20)
    assert plant.path == [TRANSITION, BELOW]


def test_refusing_everything_is_not_below():
    """S8: there is no TTFT at all when all are refused."""
    plant = Plant()
    assert plant.ticks(10, None, shed_frac=1.0, in_flight=0, rate=30.0) is TRANSITION


def test_a_short_gap_in_the_samples_does_not_start_the_confirmation_anew():
    """An overloaded slow model gives 17 to 22 samples a window; 20 are needed to judge."""
    plant = Plant()
    for tick in range(5):
        plant.tick(2.0, samples=18 if tick % 2 else 22)
    assert plant.path == [TRANSITION]


def test_a_long_gap_in_the_samples_does_start_it_anew():
    """What was over a threshold before it says nothing of now."""
    plant = Plant()
    plant.ticks(3, 2.0)
    plant.ticks(4, 2.0, samples=5)
    plant.tick(2.0)
    assert plant.path == []


def test_the_baseline_is_the_median_of_the_first_readings():
    """One slow first window does not set it; thresholds are multiples of it."""
    plant = Plant(RegimeConfig())
    plant.tick(5.0)
    plant.ticks(BASELINE_READINGS - 2, 0.1)
    assert plant.state.baseline_s is None
    assert plant.verdict.reason == "learning the baseline: 9 of 10 readings"
    assert plant.verdict.hold is Applied.HELD_NOT_READY
    plant.tick(0.1)
    assert plant.state.baseline_s == 0.1
    assert thresholds_s(0.1, plant.limits) == (pytest.approx(0.25), pytest.approx(0.8))


def test_the_baseline_follows_down_quickly_and_up_slowly():
    """Half lives 10 s and 600 s, on a logarithmic scale."""
    plant = Plant(RegimeConfig(half_life_s=0.001))
    plant.ticks(BASELINE_READINGS, 0.4)
    plant.ticks(10, 0.1)
    assert plant.state.baseline_s == pytest.approx(0.2, rel=1e-3)  # the distance falls to 0.4 ** a half
    plant = Plant(RegimeConfig(half_life_s=0.001))
    plant.ticks(BASELINE_READINGS, 0.1)
    plant.ticks(600, 0.14, pools=IDLE)
    # ... and above half the way up, because the remaining ratio was below 1.5 all along.
    assert plant.state.baseline_s == pytest.approx(0.1 * 1.4**0.5, rel=1e-3)


@pytest.mark.parametrize("pools", [{}, {Role.PREFILL: PoolRegime(role=Role.PREFILL, known=True)}])
def test_the_baseline_does_not_follow_up_unless_the_system_is_evidently_calm(pools):
    """Slow growth, 1 % a minute, stays under 1.5 x all along and is load; unknown is not calm."""
    plant = Plant(RegimeConfig(half_life_s=0.001))
    plant.ticks(BASELINE_READINGS, 0.1)
    for minute in range(40):
        plant.ticks(60, 0.1 * 1.01**minute, pools=pools)
    assert plant.state.baseline_s == 0.1


def test_load_does_not_teach_the_baseline():
    """Above 1.5 x the baseline it is load, and in another regime than below nothing is learned."""
    plant = Plant(RegimeConfig(half_life_s=0.001))
    plant.ticks(BASELINE_READINGS, 0.1)
    plant.ticks(300, 0.16)
    assert plant.state.baseline_s == 0.1
    plant.ticks(300, 0.5)
    assert plant.state.regime is TRANSITION
    plant.ticks(200, 0.12)
    assert plant.state.regime is TRANSITION
    assert plant.state.baseline_s == 0.1


def test_a_fixed_baseline_is_not_learned_over():
    """regime.baseline_s."""
    assert thresholds_s(7.0, RegimeConfig(baseline_s=2.0)) == (5.0, 16.0)
    assert thresholds_s(None, RegimeConfig(unit="seconds", theta1=1, theta2=10)) == (1, 10)
    assert thresholds_s(None, RegimeConfig()) is None


def test_a_regime_taken_over_is_held_until_there_is_evidence():
    """I6: a restarted controller does not jump to below; it dwells from now and is held against this load."""
    plant = Plant(state=RegimeState(regime=SATURATED, baseline_s=0.1))
    assert plant.ticks(3, None, in_flight=80) is SATURATED
    assert plant.ticks(60, 0.5, in_flight=80) is SATURATED
    assert plant.ticks(2, 0.5, in_flight=50) is TRANSITION


def test_a_time_without_eyes_is_neither_confirmation_nor_idleness():
    """After a dead bus the first tick must not find `idle for 150 s`."""
    plant = Plant()
    plant.ticks(10, 50.0)
    plant.at_s += 150.0
    plant.state = unseen(plant.state, plant.at_s)
    plant.tick(None, in_flight=None)
    assert plant.state.regime is SATURATED
    plant = Plant()
    plant.ticks(4, 50.0)
    plant.at_s += 10.0
    plant.state = unseen(plant.state, plant.at_s)
    assert plant.tick(50.0) is BELOW


def pool(regime=BELOW, role=Role.PREFILL, *, known=True, idle=False, **fields):
    if regime is not BELOW:
        fields = {"resource": "queue", "value": 0.5, "threshold": 0.4, "reason": "queue 0.50 s"} | fields
    return {role: PoolRegime(role=role, regime=regime, known=known, idle=idle, **fields)}


def test_a_pressed_pool_moves_the_regime_at_once_and_says_what_drives_it():
    """Issue: the reported regime names pool and resource; value, threshold and dwell left with it."""
    plant = Plant()
    plant.tick(0.5, pools=pool(TRANSITION))
    assert plant.state.regime is TRANSITION
    verdict = plant.verdict
    assert (verdict.driver, verdict.value, verdict.threshold) == ("prefill.queue", 0.5, 0.4)
    assert (verdict.reason, verdict.dwell_left_s) == ("prefill: queue 0.50 s", 5.0)


def test_the_second_step_up_on_a_pools_word_need_not_wait_for_the_dwell():
    """One step a tick all the same: never from below to saturated without the middle state."""
    plant = Plant(tick_s=0.25)
    plant.ticks(2, 0.5, pools=pool(SATURATED))
    assert plant.changes == [(1000.25, BELOW, TRANSITION), (1000.5, TRANSITION, SATURATED)]


def test_below_the_knee_nothing_drives_the_regime_even_while_the_dwell_holds_a_pool_back():
    """The record says so: a driver is what the regime is needed for."""
    plant = Plant(state=RegimeState(changed_at_s=1000.0))
    plant.tick(0.5, pools=pool(TRANSITION))
    assert (plant.state.regime, plant.verdict.hold) == (BELOW, Applied.HELD_DWELL)
    assert (plant.verdict.driver, plant.state.driver) == ("prefill.queue", "")
    plant.ticks(4, 0.5, pools=pool(TRANSITION))
    assert (plant.state.regime, plant.state.driver) == (TRANSITION, "prefill.queue")


def test_a_step_up_after_a_step_down_waits_for_the_dwell_whoever_asks():
    """D1: a limit cycle needs a step down, and the dwell holds what follows it."""
    plant = Plant()
    plant.ticks(2, 0.5, pools=pool(SATURATED))
    plant.ticks(6, 0.1, in_flight=10, pools=pool())
    assert plant.state.regime is TRANSITION
    down_s = plant.changes[-1][0]
    plant.tick(0.1, in_flight=60, pools=pool(SATURATED))
    assert plant.verdict.hold is Applied.HELD_DWELL
    plant.ticks(5, 0.1, in_flight=60, pools=pool(SATURATED))
    assert plant.changes[-1] == (down_s + 5.0, TRANSITION, SATURATED)


def test_the_pool_in_the_highest_regime_drives():
    """They saturate on different resources, at different loads."""
    plant = Plant()
    both = pool(TRANSITION) | pool(SATURATED, Role.DECODE, resource="kv_blocks", value=0.95)
    plant.ticks(2, 0.5, pools=both)
    assert (plant.state.regime, plant.state.driver) == (SATURATED, "decode.kv_blocks")


def test_a_pressed_pool_holds_the_regime_however_good_ttft_looks():
    """Released first: TTFT of those served says nothing of those who wait."""
    plant = Plant()
    plant.ticks(2, 3.0, in_flight=50, pools=pool(SATURATED))
    assert plant.ticks(600, 0.1, in_flight=5, pools=pool(SATURATED)) is SATURATED


def test_a_released_pool_need_not_wait_until_ttft_has_forgotten_the_overload():
    """Its queue is gone and the load fell: what is in the TTFT window is the past."""
    plant = Plant()
    plant.ticks(20, 50.0, in_flight=200, pools=pool(SATURATED))
    plant.tick(50.0, in_flight=20, pools=pool())
    assert plant.state.regime is TRANSITION
    assert plant.verdict.reason == "prefill.queue is released: 20 in flight, needed at 200"
    plant.ticks(5, 50.0, in_flight=20, pools=pool())
    assert (plant.state.regime, plant.state.driver) == (BELOW, "")


def test_a_released_pool_under_the_same_load_may_be_the_parameters_doing():
    """D1b with evidence: constant load in flight; the cure is not taken for the end of the disease."""
    plant = Plant()
    plant.ticks(20, 50.0, in_flight=64, pools=pool(SATURATED))
    assert plant.ticks(200, 0.1, in_flight=64, pools=pool()) is SATURATED
    assert plant.ticks(1, 0.1, in_flight=64, pools=pool(idle=True)) is TRANSITION


def test_ttft_over_the_threshold_while_workers_are_idle_is_upstream_of_them():
    """I8(c): no step up, and the bottleneck is named; it steps up once they are not idle any more."""
    plant = Plant()
    assert plant.ticks(60, 50.0, pools=pool(idle=True)) is BELOW
    assert plant.verdict.bottleneck == "upstream"
    assert plant.verdict.reason == (
        "TTFT P99 50.000 s at or over θ1 1.000 s, but workers are idle: upstream of them"
    )
    assert plant.ticks(11, 50.0, pools=pool(known=False)) is SATURATED


def test_refusals_count_whatever_the_workers_do():
    """S8: who refuses is no longer below, though its workers be idle."""
    plant = Plant()
    assert plant.ticks(10, 50.0, shed_frac=0.2, pools=pool(idle=True)) is TRANSITION
    assert plant.state.driver == "refusals"


def test_ttft_alone_does_not_saturate_workers_that_are_all_known():
    """One hot worker makes a bad P99: a transition after three times the confirmation, and no more."""
    plant = Plant()
    assert plant.ticks(12, 50.0, pools=pool()) is BELOW
    assert plant.ticks(100, 50.0, pools=pool()) is TRANSITION
    assert plant.changes[0][0] == 1013.0
    assert plant.verdict.reason.endswith("but all workers are known and no pool is saturated")
    assert plant.state.driver == "ttft"


def test_soft_evidence_is_told_and_moves_nothing():
    """PoA-hat's slope and curvature corroborate a rise of TTFT; alone they are nothing."""
    plant = Plant()
    plant.ticks(60, 0.5, corroborated="PoA-hat rises by 0.050 a second")
    assert plant.path == []
    plant.ticks(5, 2.0, corroborated="PoA-hat rises by 0.050 a second")
    assert plant.path == [TRANSITION]
    assert plant.verdict.reason.endswith("θ1 1.000 s; PoA-hat rises by 0.050 a second")


def test_workers_with_a_queue_are_not_idle_though_no_router_is_heard():
    """Requests of routers that are not ours."""
    plant = Plant()
    plant.ticks(2, None, in_flight=None, pools=pool(SATURATED))
    assert plant.ticks(60, None, in_flight=None, pools=pool(SATURATED)) is SATURATED


def test_a_baseline_is_not_learnt_while_a_pool_is_pressed():
    """A start under overload must not pass for normal."""
    plant = Plant(RegimeConfig())
    plant.ticks(60, 5.0, pools=pool(TRANSITION))
    assert plant.state.baseline_s is None


SIGNALS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.floats(1e-4, 1e3)),
        st.integers(0, 100),
        st.one_of(st.none(), st.integers(0, 500)),
        st.floats(0, 1),
    ),
    max_size=120,
)


@given(SIGNALS, st.sampled_from(["baseline", "seconds"]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_comes_changes_are_single_steps_and_never_closer_than_the_dwell(signals, unit):
    """Invariant of the module; exported numbers stay finite and positive."""
    plant = Plant(RegimeConfig(unit=unit, theta1=1.0, theta2=10.0))
    for p99_s, samples, in_flight, shed_frac in signals:
        plant.tick(p99_s, samples=samples, in_flight=in_flight, shed_frac=shed_frac)
        assert plant.verdict.reason
        assert plant.state.baseline_s is None or 0 < plant.state.baseline_s < 1e4
    levels = [(before.level, after.level) for _, before, after in plant.changes]
    assert all(abs(before - after) == 1 for before, after in levels)
    times = [at_s for at_s, _, _ in plant.changes]
    assert all(later - earlier >= 5.0 for earlier, later in itertools.pairwise(times))
    assert plant.state.changes == len(times)
