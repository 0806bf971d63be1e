"""What each policy answers, and the conformance suite that runs over all of them."""

import typing

import msgspec
import pytest

from dynamo_poa.config import PolicyConfig, knobs
from dynamo_poa.policies import POLICIES, Answer, View, make_policy, make_shadow
from dynamo_poa.values import REGIMES, Regime, RouterParams, Selection, Setting

STATIC = Setting(0.3, 0.9)


def view(**fields):
    return View(**{"at_s": 100.0, "regime": Regime.BELOW, "static": STATIC, **fields})


def answer(config, **fields):
    policy = make_policy(config)
    return policy.decide(policy.start(), view(**fields))[1]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_policy_answers_every_regime_with_valid_parameters_always_the_same(name, regime):
    """Contract of a policy: pure, and RouterParams accepts what it says."""
    policy = make_policy(PolicyConfig(name=name))
    found = policy.decide(policy.start(), view(regime=regime))
    RouterParams(revision=1, **msgspec.structs.asdict(found[1].setting))
    assert policy.decide(policy.start(), view(regime=regime)) == found
    assert policy.name == name


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


def test_a_shadow_is_made_only_where_one_is_configured():
    """`shadow` names the policy that is asked beside the active one."""
    assert make_shadow(PolicyConfig()) is None
    assert make_shadow(PolicyConfig(shadow="static")).name == "static"
