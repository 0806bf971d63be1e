"""The conformance suite that runs over every policy, and what the simple ones answer."""

import math
import random
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_steps import Steps

from dynamo_poa.config import ControllerConfig, PolicyConfig, RegimeConfig, knobs
from dynamo_poa.controller import pinned, released
from dynamo_poa.decisions import Traffic
from dynamo_poa.policies import POLICIES, Answer, View, make_policy, make_shadow
from dynamo_poa.values import (
    MAX_OVERLAP_WEIGHT,
    MAX_PREFILL_LOAD_SCALE,
    MAX_REVISION,
    MAX_ROUTER_TEMPERATURE,
    REGIMES,
    Curve,
    Mode,
    ParamsKind,
    Pin,
    Regime,
    RequestOutcome,
    Role,
    RouterParams,
    Selection,
    Setting,
    WorkerKey,
    WorkerLatency,
)

STATIC = Setting(0.3, 0.9)
EVERY = pytest.mark.parametrize("name", POLICIES)
# What each answers to regime `below` when it knows nothing.
DEFAULTS = {
    "static": STATIC,
    "table": Setting(0.0, 1.0),
    "auto": STATIC,
    "marginal": STATIC,
}


def view(**fields):
    return View(**{"at_s": 100.0, "regime": Regime.BELOW, "static": STATIC, **fields})


def answer(config, **fields):
    policy = make_policy(config)
    return policy.decide(policy.start(), view(**fields))[1]


def told(name, views):
    """Return what a policy answers to one view after another."""
    policy = make_policy(PolicyConfig(name=name))
    state, answers = policy.start(), []
    for one in views:
        state, answer = policy.decide(state, one)
        answers.append(answer)
    return answers


# Any number whatsoever, and those that mean trouble more often than not.
ODD = st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]) | st.floats()
COUNT = st.none() | st.integers(-(2**53), 2**53)
FORCED = st.builds(
    Setting,
    st.floats(0, MAX_ROUTER_TEMPERATURE),
    st.floats(0, MAX_OVERLAP_WEIGHT),
    st.none() | st.floats(0, MAX_PREFILL_LOAD_SCALE),
    st.sampled_from(Selection),
)
ABSURD = st.builds(
    View,
    at_s=st.floats(-1e12, 1e12),  # a clock that jumps, also back
    regime=st.sampled_from(REGIMES),
    static=st.just(STATIC),
    resource=st.sampled_from(["", "prefill.queue", "decode.kv_blocks", ".", "no such"]),
    in_force=st.none() | FORCED | st.just(STATIC),
    revision=st.integers(0, MAX_REVISION),
    since_s=ODD,
    ours=st.booleans(),
    traffic=st.builds(
        Traffic,
        in_flight=COUNT,
        arrival_rate=st.none() | ODD,
        shed_frac=ODD,
        tokens_mean=st.none() | ODD,
        tokens_effective=st.none() | ODD,
        arrived=COUNT,
    ),
    cache_absent=st.booleans(),
    calibrated=st.booleans(),
    outcomes=st.lists(
        st.builds(
            RequestOutcome,
            revision=st.integers(0, 3),
            decided_at_s=ODD,
            ttft_s=st.none() | ODD,
            e2e_s=st.none() | ODD,
            failed=st.booleans(),
        ),
        max_size=4,
    ).map(tuple),
    predicted=st.dictionaries(FORCED | st.just(STATIC), ODD, max_size=3),
)


@EVERY
@settings(derandomize=True, max_examples=100, deadline=None)
@given(views=st.lists(ABSURD, max_size=6))
def test_whatever_it_sees_a_policy_answers_within_bounds_and_the_same_again(name, views):
    """Bounded output, determinism, survival of absurd observations: contract of a policy."""
    answers = told(name, views)
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.reason
        RouterParams(revision=1, **msgspec.structs.asdict(answer.setting))  # refuses what is out of bounds
    assert told(name, views) == answers


def busy(rng, seconds, **fields):
    """Return views of real traffic, a tick apart: 20 requests each, slow and failing at random."""
    views = []
    for tick in range(seconds * 4):
        at_s = 100.0 + tick / 4
        served = tuple(
            RequestOutcome(
                revision=1,
                decided_at_s=at_s - 0.1,
                ttft_s=rng.expovariate(5),
                e2e_s=0.5 + rng.expovariate(1),
                failed=rng.random() < 0.01,
            )
            for _ in range(20)
        )
        traffic = Traffic(in_flight=80, arrival_rate=80.0, arrived=20 * tick)
        views.append(view(at_s=at_s, traffic=traffic, outcomes=served, **fields))
    return views


@EVERY
def test_with_a_long_history_a_policy_is_as_deterministic_as_without(name):
    """Any chance is drawn from a seed in the state: the same views give the same answers."""
    prices = {STATIC: 1.0, Setting(0.0, 0.9): 0.5, Setting(0.7, 0.9): 0.7}
    views = busy(random.Random(1), 120, predicted=prices, in_force=STATIC, since_s=60.0, ours=True)
    assert told(name, views) == told(name, views)


@EVERY
def test_without_data_a_policy_does_nothing(name):
    """Ten minutes of silence: the defaults, without a change, and nothing to be predicted from."""
    views = [view(at_s=100.0 + tick / 4, in_force=DEFAULTS[name], ours=True) for tick in range(2400)]
    assert {answer.setting for answer in told(name, views)} == {DEFAULTS[name]}


@EVERY
def test_a_policy_is_called_what_the_configuration_calls_it(name):
    """The name is a key of the configuration and a label of /metrics."""
    assert make_policy(PolicyConfig(name=name)).name == name


def channel_of(name, mode=Mode.ACTIVE):
    """Return the step under a policy."""
    config = ControllerConfig(mode=mode, policy=PolicyConfig(name=name), regime=RegimeConfig())
    return Steps(config, make_policy(config.policy), STATIC)


def setting_after(channel, **fields):
    """Return what is in force after a tick."""
    channel.tick(**fields)
    return channel.current.setting


CALIBRATED = {
    "latencies": {WorkerKey(1, 0): WorkerLatency(key=WorkerKey(1, 0), role=Role.DECODE, curve=Curve())}
}


@EVERY
def test_an_operators_pin_wins_over_every_policy_until_it_is_released(name):
    """`set`, then `release`: what the policy wanted before it wants again."""
    channel = channel_of(name)
    before = setting_after(channel, **CALIBRATED)
    channel.state = pinned(channel.state, Pin(router_temperature=5.0, overlap_weight=0.5))
    assert [setting_after(channel, **CALIBRATED) for _ in range(30)] == [Setting(5.0, 0.5)] * 30
    assert channel.current.kind is ParamsKind.PIN
    channel.state = released(channel.state)
    assert setting_after(channel, **CALIBRATED) == before
    assert channel.current.kind is ParamsKind.POLICY


@EVERY
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SHADOW])
def test_in_no_mode_but_active_a_policy_is_followed(name, mode):
    """The kill switch, and looking on: the static setting, whatever is seen."""
    channel = channel_of(name, mode)
    assert [setting_after(channel, **CALIBRATED) for _ in range(5)] == [STATIC] * 5


@EVERY
def test_told_to_forget_a_policy_is_back_at_its_defaults(name):
    """`release --forget`: whatever it has come to, it begins as one that has seen nothing."""
    channel = channel_of(name)
    policy, state = channel.settings.policy, make_policy(PolicyConfig(name=name)).start()
    for one in busy(random.Random(1), 60, regime=Regime.SATURATED, in_force=STATIC, since_s=60.0, ours=True):
        state, _ = policy.decide(state, one)
    setting_after(channel)
    run = msgspec.structs.replace(channel.state.policy, memory=state)
    channel.state = msgspec.structs.replace(channel.state, policy=run)
    channel.state = released(channel.state, forget=True)
    assert channel.state.policy.started is False
    assert setting_after(channel) == DEFAULTS[name]


def test_the_registry_is_what_the_configuration_offers():
    """A policy that cannot be configured, or a name without a policy, is a mistake."""
    known = knobs(PolicyConfig)
    assert set(typing.get_args(known["name"][0])) == set(POLICIES)
    assert set(typing.get_args(known["shadow"][0])) == {"", *POLICIES}


def test_static_keeps_the_routers_own_parameters():
    """Do nothing: the policy every other must beat."""
    answers = [answer(PolicyConfig(name="static"), regime=regime) for regime in REGIMES]
    assert answers == [Answer(STATIC, "static")] * 3


def test_the_table_is_the_papers_unless_configured():
    """arXiv 2606.17081: (0, 1.0), (0.7, 1.0), (0.8, 0.1)."""
    assert [answer(PolicyConfig(name="table"), regime=regime) for regime in REGIMES] == [
        Answer(Setting(0.0, 1.0), "table"),
        Answer(Setting(0.7, 1.0), "table"),
        Answer(Setting(0.8, 0.1), "table"),
    ]
    own = PolicyConfig(name="table", saturated=(1.5, 2.0))
    assert answer(own, regime=Regime.SATURATED).setting == Setting(1.5, 2.0)


def test_the_table_leaves_its_own_weight_where_moving_it_would_do_nothing():
    """Case E6: no worker differs in cached tokens. An operator's ω is no reason to keep it."""
    table, before = PolicyConfig(name="table"), Setting(0.7, 1.0)
    absent = {"regime": Regime.SATURATED, "in_force": before, "cache_absent": True}
    assert answer(table, ours=True, **absent) == Answer(
        Setting(0.8, 1.0), "table", "ω stays 1: no worker differs in cached tokens"
    )
    assert answer(table, ours=False, **absent) == Answer(Setting(0.8, 0.1), "table")


def test_marginal_lets_the_plugin_select_once_the_workers_speeds_are_known():
    """Under the static τ and ω, which a request that cannot be priced falls back to."""
    marginal = PolicyConfig(name="marginal")
    assert answer(marginal, calibrated=True) == Answer(
        Setting(0.3, 0.9, None, Selection.MARGINAL), "marginal"
    )
    assert answer(marginal, calibrated=False) == Answer(STATIC, "no_coefficients")


def test_marginal_leaves_in_force_what_a_predecessor_had_before_it_knows_the_speeds_again():
    """A restart moves nothing (I6): routers fall back by themselves. An operator's setting is not kept."""
    marginal, setting = PolicyConfig(name="marginal"), Setting(0.3, 0.9, None, Selection.MARGINAL)
    assert answer(marginal, in_force=setting, ours=True) == Answer(setting, "no_coefficients")
    assert answer(marginal, in_force=setting, ours=False) == Answer(STATIC, "no_coefficients")


def test_a_shadow_is_made_only_where_one_is_configured():
    """`shadow` names the policy that is asked beside the active one."""
    assert make_shadow(PolicyConfig()) is None
    assert make_shadow(PolicyConfig(shadow="static")).name == "static"
