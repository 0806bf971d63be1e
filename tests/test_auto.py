"""Policy auto in small worlds: what it tries, keeps, leaves, remembers and forgets, and what that costs."""

import math
import statistics

import pytest
from policy_world import STATIC, TAU, Queues, World, everything, noisy, only

from dynamo_poa.config import PolicyConfig
from dynamo_poa.decisions import Traffic
from dynamo_poa.policies import make_policy, settings_to_price
from dynamo_poa.policies.auto import NO_PREDICTION, AutoPolicy, candidates
from dynamo_poa.policies.memory import MAX_ENTRIES, Entry, Key, Load, forget, remember
from dynamo_poa.policies.protocol import Answer, View
from dynamo_poa.values import Regime, RequestOutcome, Selection, Setting

CONFIG = PolicyConfig(name="auto")
BETTER = noisy(tau=0.7, slot_sigma=0.05)
WORSE = noisy(tau=1.5, slot_sigma=0.05)
UNPRICED = Answer(STATIC, "no_prediction", NO_PREDICTION)
SAME = noisy(slot_sigma=0.05)


def world(times, config=CONFIG, **fields):
    return World(AutoPolicy(config), times, **fields)


class Fixed:
    """A policy that never moves."""

    name = "fixed"

    def __init__(self, setting):
        self.setting = setting

    def start(self):
        return None

    def decide(self, state, view):
        return None, Answer(self.setting, self.name)


def test_what_is_tried_is_one_change_at_a_time_or_all_taken_back():
    """τ in {0, 0.3, 0.7}, ω in {1, 0.5}, scale in {Dynamo's own, 4}; ω and scale need a cache to weigh."""
    base = Setting(0.7, 0.5)
    assert list(candidates(base, STATIC)) == [
        STATIC,
        Setting(0.0, 0.5),
        Setting(0.3, 0.5),
        Setting(0.7, 1.0),
        Setting(0.7, 0.5, 4.0),
    ]
    assert list(candidates(STATIC, STATIC, cache_absent=True)) == [Setting(0.3, 1.0), Setting(0.7, 1.0)]


def test_a_candidate_that_helps_is_kept():
    """30 % less under τ = 0.7."""
    found = world(BETTER)
    found.run_until("kept")
    assert found.run(120).setting == TAU
    assert found.answers[-1].reason == "no_candidate_better"


def test_a_candidate_that_harms_is_left_after_its_first_slot():
    """Half as much again: asked for once, for one slot, and not again while that is remembered."""
    found = world(WORSE)
    found.run_until("worse")
    assert found.run(600) == Answer(
        STATIC,
        "no_candidate_better",
        "τ 0.3 ω 1: not priced; τ 0.7 ω 1: tried; τ 0 ω 0.5: not priced; τ 0 ω 1 scale 4: not priced",
    )
    assert found.settings == [STATIC, TAU, STATIC]
    assert sum(answer.setting == TAU for answer in found.answers) <= 17  # 4 s of quarters, and a tick


def test_a_candidate_that_changes_nothing_is_dropped():
    """Neither kept nor tried again and again."""
    found = world(SAME)
    found.run_until("trial")
    found.run(120)
    assert found.answers[-1].setting == STATIC
    assert found.answers[-1].reason == "no_candidate_better"


def test_chance_is_taken_for_a_gain_in_less_than_5_percent_of_trials():
    """A/A through the whole machine, 200 seeds, noise that requests share."""
    kept = 0
    for seed in range(200):
        found = world(noisy(slot_sigma=0.08, seed=seed), rate=12.0, seed=seed)
        found.run_until("trial")
        while found.state.trial is not None:
            found.tick()
        kept += found.state.last == "kept"
    assert kept < 10


def test_the_order_is_that_of_the_prediction_and_the_hopeless_are_never_tried():
    """The prior: the model's best first; what it says is more than 10 % worse is not tried on users."""
    predicted = {STATIC: 1.0, TAU: 1.0999, Setting(0.3, 1.0): 0.9, Setting(0.0, 0.5): 1.1001}
    found = world(SAME, predicted=predicted)
    found.run(400)
    assert found.answers[-1].reason == "no_candidate_better"
    assert "τ 0 ω 0.5: predicted +10.0%" in found.answers[-1].detail
    tried = list(dict.fromkeys(setting for setting in found.settings if setting != STATIC))
    assert tried == [Setting(0.3, 1.0), TAU]


def test_a_kept_change_is_the_start_of_the_next():
    """One change at a time: the second candidates are those of the setting in force now."""
    found = world(BETTER, predicted=everything())
    found.run_until("no_candidate_better", within_s=900)
    assert found.state.base == TAU
    bases = {entry.base for entry in found.state.memory}
    assert bases == {STATIC, TAU} or bases == {STATIC, TAU, Setting(0.3, 1.0)}


def test_without_a_prediction_nothing_is_tried():
    """Does nothing without data."""
    found = world(BETTER, predicted={})
    assert found.run(120) == UNPRICED
    assert found.settings == [STATIC]


@pytest.mark.parametrize("rate", [0.0, 6.0])
def test_without_enough_traffic_nothing_is_tried(rate):
    """20 requests must be expected in the 3 s of a slot that are judged."""
    found = world(BETTER, rate=rate)
    assert found.run(120) == Answer(STATIC, "too_little_traffic")
    assert found.settings == [STATIC]


def test_traffic_that_ends_in_a_trial_ends_the_trial_without_a_verdict():
    """Nothing is learnt of a candidate that nobody was served under."""
    found = world(BETTER)
    found.run_until("trial")
    found.run(5)
    found.rate = 0.0
    found.run_until("too_little_traffic")
    assert (found.wanted, found.state.memory) == (STATIC, ())


def test_a_higher_regime_in_a_trial_ends_it_at_once_and_its_candidate_is_suspected():
    """What was seen under one load is no evidence for another; it may be the candidate that raised it."""
    found = world(BETTER, regime=Regime.BELOW)
    found.run_until("trial")
    found.run(6)
    assert found.wanted == TAU
    found.view["regime"] = Regime.SATURATED
    assert found.tick() == Answer(STATIC, "interrupted")
    assert found.state.trial is None
    suspected = [(entry.key.regime, entry.setting, entry.won) for entry in found.state.memory]
    assert suspected == [(Regime.BELOW, TAU, False)]


def test_a_regime_raised_before_the_candidates_turn_is_not_its_fault():
    """The first turn is the setting's in force."""
    found = world(BETTER, regime=Regime.BELOW)
    found.run_until("trial")
    found.run(2)
    found.view["regime"] = Regime.TRANSITION
    assert found.tick() == Answer(STATIC, "interrupted")
    assert (found.state.trial, found.state.memory) == (None, ())


def test_a_lower_regime_ends_a_trial_when_it_has_lasted_four_turns():
    """A candidate that helps lowers the regime in its own turns: that must not end its trial."""
    found = world(BETTER)
    found.run_until("trial")
    found.run(6)
    found.view["regime"] = Regime.BELOW
    assert found.run(16).reason == "trial"
    assert found.tick() == Answer(STATIC, "interrupted")
    assert (found.state.trial, found.state.memory) == (None, ())


def test_another_resource_counts_when_it_has_lasted():
    """One that comes and goes is not followed; in a trial it must last four turns, else one."""
    found = world(BETTER, resource="prefill.queue")
    found.run_until("trial")
    found.run(5)
    found.view["resource"] = "decode.kv_blocks"
    found.run(15.75)
    found.view["resource"] = "prefill.queue"
    assert found.run(1).reason == "trial"
    found.view["resource"] = "decode.kv_blocks"
    assert found.run(16).reason == "trial"
    assert found.tick() == Answer(STATIC, "interrupted")
    found.view["resource"] = "prefill.queue"
    found.run(4)
    assert found.state.key == (Regime.SATURATED, "decode.kv_blocks")
    found.tick()
    assert found.state.key == (Regime.SATURATED, "prefill.queue")


def test_what_won_is_remembered_for_its_own_conditions():
    """Back in the regime it won in, the setting is returned to without a trial; not in a higher one."""
    found = world(BETTER, regime=Regime.BELOW)
    found.run_until("kept")
    found.predicted = {}
    found.view["regime"] = Regime.SATURATED
    assert found.run(60) == UNPRICED
    found.view["regime"] = Regime.BELOW
    found.run(1)
    assert found.wanted == TAU


def test_a_setting_that_has_lowered_the_regime_is_not_dropped_for_it():
    """Dropped, the regime would rise again: it stays, and the static setting is tried against it first."""
    found = world(BETTER)
    found.run_until("kept")
    found.view["regime"], found.predicted = Regime.TRANSITION, everything()
    found.run_until("trial")
    assert (found.state.trial.base, found.state.trial.candidate) == (TAU, STATIC)
    found.run_until("worse")
    assert found.state.base == TAU


def test_an_inherited_setting_that_loses_to_the_static_one_is_not_inherited_again():
    """Under the lower regime it is the cache that counts: the static setting is kept there."""
    found = world(BETTER)
    found.run_until("kept")
    found.view["regime"], found.times = Regime.BELOW, WORSE
    found.run_until("kept")
    assert found.state.base == STATIC
    for regime in (Regime.SATURATED, Regime.BELOW):
        found.view["regime"] = regime
        found.run(12)
    assert found.wanted == STATIC


def test_a_remembered_setting_is_returned_to_at_most_once_in_rest_s():
    """Rate limit on changes: a regime that flaps does not make the parameters flap."""
    found = world(BETTER, regime=Regime.BELOW)
    found.run_until("kept")
    found.run(10)
    changes = len(found.settings)
    found.predicted = {}
    for _ in range(10):
        for regime in (Regime.SATURATED, Regime.BELOW):
            found.view["regime"] = regime
            found.tick()
            found.tick()
    assert len(found.settings) - changes <= 3  # away, back once, away: 10 s


def test_trials_are_at_least_rest_s_apart():
    """Between two trials the setting rests."""
    found = world(SAME, predicted=everything())
    found.run(600)
    running = [answer.reason == "trial" for answer in found.answers]
    gaps = [pause for pause in "".join("T" if one else "-" for one in running).strip("-").split("T") if pause]
    assert len(gaps) >= 3
    assert min(map(len, gaps)) >= 10.0 / 0.25 - 1


def test_what_was_learnt_is_forgotten_with_time():
    """Half-life 10 min: a clear verdict lasts 20, an undecided one 10; then it is tried again."""
    found = world(WORSE, rate=20.0)
    since_s = found.at_s + found.run_until("worse")
    found.run_until("trial", within_s=1300)
    assert found.at_s - since_s == pytest.approx(1200, abs=30)


def test_what_was_learnt_is_forgotten_when_traffic_moves():
    """Arrival rate by more than half: what won must win again, from the start's setting."""
    found = world(BETTER)
    found.run_until("kept")
    found.run(20)
    found.rate *= 1.4
    found.run(60)
    assert found.wanted == TAU
    found.rate *= 1.4
    found.run_until("trial", within_s=60)
    assert (found.state.base, found.state.memory) == (STATIC, ())


def test_a_pin_ends_a_trial_and_nothing_is_tried_while_it_lasts():
    """`set` wins always; the last good setting is what is answered meanwhile, and learnt is nothing."""
    found = world(BETTER)
    found.run_until("trial")
    found.run(6)
    found.pinned, found.view["ours"] = Setting(0.1, 0.2), False
    assert found.run(60) == Answer(STATIC, "interrupted")
    assert found.state.memory == ()
    found.pinned, found.view["ours"] = None, True
    found.run_until("kept", within_s=120)


def test_failures_in_a_trial_end_it_at_once_and_are_remembered():
    """Requests that fail under the candidate alone."""
    healthy = noisy()

    def times(setting, at_s, rng):
        return (None, 0.1) if setting == TAU and rng.random() < 0.2 else healthy(setting, at_s, rng)

    found = world(times)
    found.run_until("failed")
    assert found.run(300).setting == STATIC
    assert sum(answer.setting == TAU for answer in found.answers) < 16
    assert [entry.won for entry in found.state.memory] == [False]


def test_what_a_change_of_settings_leaves_behind_is_not_held_against_either():
    """Interference: the first second under the candidate takes three times as long; else both are equal."""
    calm = noisy(sigma=0.1)
    found = world(None)

    def times(setting, at_s, rng):
        ttft_s, e2e_s = calm(setting, at_s, rng)
        late = setting == TAU and at_s - found.since_s < 1.0
        return (ttft_s * 3, e2e_s * 3) if late else (ttft_s, e2e_s)

    found.times = times
    found.run_until("trial")
    while found.state.trial is not None:
        found.tick()
    assert len(found.changes) >= 3
    assert max(abs(change.ttft) for change in found.changes) < 0.1  # log 3 a quarter of the time: 0.27


def test_the_table_can_be_what_it_starts_from():
    """`auto_start: table`: a calibrated table, by regime; the static setting is then a candidate."""
    policy = make_policy(PolicyConfig(name="auto", auto_start="table", saturated=(0.7, 1.0)))
    found = World(policy, noisy(tau=1.3, slot_sigma=0.05), predicted=only(TAU))
    assert found.tick().setting == TAU
    found.run_until("kept")
    assert found.wanted == STATIC


def test_it_answers_absurd_views_with_the_defaults():
    """Not a number, times that run backwards, a million failures: no trial, no exception."""
    policy = AutoPolicy(CONFIG)
    state = policy.start()
    nothing = RequestOutcome(revision=-1, decided_at_s=math.nan, ttft_s=math.nan, e2e_s=-1.0)
    for at_s, price in ((1e9, math.nan), (-5.0, -1.0), (0.0, math.inf), (1e18, 0.0)):
        view = View(
            at_s=at_s,
            regime=Regime.SATURATED,
            static=STATIC,
            in_force=STATIC,
            ours=True,
            since_s=1e9,
            traffic=Traffic(arrival_rate=math.nan, tokens_mean=math.inf, arrived=-1),
            outcomes=(nothing,) * 100,
            predicted={STATIC: price, TAU: price},
        )
        state, answer = policy.decide(state, view)
        assert answer.setting == STATIC


def test_what_it_asks_the_price_of_is_what_it_may_try():
    """All candidates of the setting in force and of the static one; nothing is priced for nobody."""
    config = PolicyConfig(name="static", shadow="auto")
    priced = settings_to_price(config, STATIC, TAU)
    assert set(priced) == {STATIC, TAU, *candidates(STATIC, STATIC), *candidates(TAU, STATIC)}
    assert settings_to_price(PolicyConfig(name="table"), STATIC, TAU) == ()
    marginal = settings_to_price(PolicyConfig(name="static", shadow="marginal"), STATIC, None)
    assert marginal == (STATIC, Setting(0.0, 1.0, selection=Selection.MARGINAL))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_old_news_make_the_router_herd_it_ends_at_a_temperature_and_gains(seed):
    """Closed loop, load known every 0.5 s: τ = 0.7 is truly better (mean end-to-end about -25 %)."""
    found = Queues(AutoPolicy(CONFIG), refresh_s=0.5, predicted=everything(), seed=seed)
    found.run(900)
    fixed = Queues(Fixed(STATIC), refresh_s=0.5, seed=seed)
    fixed.run(900)
    assert found.state.base.router_temperature > 0
    assert statistics.fmean(found.total_s) < 0.9 * statistics.fmean(fixed.total_s)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_the_cache_decides_it_stays_at_the_defaults_and_costs_less_than_3_percent(seed):
    """Closed loop, a miss costs 0.1 s: τ = 0.7 is truly worse (about +50 %). The prior lets all be tried."""
    found = Queues(AutoPolicy(CONFIG), miss_s=0.1, predicted=everything(), seed=seed)
    found.run(600)
    fixed = Queues(Fixed(STATIC), miss_s=0.1, seed=seed)
    fixed.run(600)
    assert found.answers[-1].reason == "no_candidate_better"
    assert found.state.base == STATIC
    assert {TAU, Setting(0.3, 1.0)} < {entry.setting for entry in found.state.memory}
    assert statistics.fmean(found.total_s) < 1.03 * statistics.fmean(fixed.total_s)
    assert len(found.total_s) > 0.97 * len(fixed.total_s)


def test_a_candidate_under_trial_is_tentative_and_the_last_good_setting_is_not():
    """`last_good`: what is held when data become stale or the policy fails."""
    found = world(SAME)
    found.run(100)
    assert {(answer.setting, answer.tentative) for answer in found.answers} == {(STATIC, False), (TAU, True)}


def test_a_clock_that_runs_backwards_forgets_nothing_and_trips_over_nothing():
    """An absurd observation: what was noted in its future is as strong as ever."""
    key = Key(Regime.BELOW, "")
    entry = Entry(key=key, setting=TAU, base=STATIC, won=True, strength=1.0, at_s=1e9, load=Load())
    assert forget((entry,), key, Load(), -1e12, 600.0) == (entry,)
    assert forget((entry,), key, Load(), 1e9 + 1201.0, 600.0) == ()


def test_what_is_remembered_is_bounded():
    """Regimes and resources come and go; the newest comparisons stay."""
    memory = ()
    for number in range(MAX_ENTRIES + 5):
        key = Key(Regime.BELOW, str(number))
        entry = Entry(
            key=key, setting=TAU, base=STATIC, won=False, strength=1.0, at_s=float(number), load=Load()
        )
        memory = remember(remember(memory, entry), entry)
    assert (len(memory), memory[0].key.resource) == (MAX_ENTRIES, "5")
