"""One conformance suite over every policy, and what each of them answers."""

import typing

import pytest

from dynamo_poa.config import PolicyConfig, knobs
from dynamo_poa.policies import POLICIES, make_policy
from dynamo_poa.values import REGIMES, Regime, RouterParams

STATIC = (0.3, 0.9)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_policy_answers_every_regime_with_valid_parameters_always_the_same(name, regime):
    """Contract of a policy: pure, and RouterParams accepts what it says."""
    policy = make_policy(PolicyConfig(name=name), STATIC)
    temperature, weight = policy.decide(regime)
    RouterParams(revision=1, router_temperature=temperature, overlap_weight=weight)
    assert policy.decide(regime) == (temperature, weight)
    assert policy.name == name


def test_the_registry_is_what_the_configuration_offers():
    """A policy that cannot be configured, or a name without a policy, is a mistake."""
    bare, _ = knobs(PolicyConfig)["name"]
    assert set(typing.get_args(bare)) == set(POLICIES)


def test_static_keeps_the_routers_own_parameters():
    """Do nothing: the policy every other must beat."""
    policy = make_policy(PolicyConfig(name="static"), STATIC)
    assert [policy.decide(regime) for regime in REGIMES] == [STATIC] * 3


def test_the_table_is_the_papers_unless_configured():
    """arXiv 2606.17081: (0, 1.0), (0.7, 1.0), (0.8, 0.1)."""
    assert [make_policy(PolicyConfig(), STATIC).decide(regime) for regime in REGIMES] == [
        (0.0, 1.0),
        (0.7, 1.0),
        (0.8, 0.1),
    ]
    own = make_policy(PolicyConfig(saturated=(1.5, 2.0)), STATIC)
    assert own.decide(Regime.SATURATED) == (1.5, 2.0)
