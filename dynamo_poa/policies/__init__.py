"""Which parameters belong to the load regime.

Owns: the contract of a policy and the registry of those there are.
Does not own: the regime (regime.py) or whether the answer is applied (controller.py).
Invariant: a policy is pure and answers every regime with values that RouterParams accepts; one conformance
           suite runs over all of them (tests/test_policies.py).
"""

from collections.abc import Callable
from typing import Protocol

from dynamo_poa.config import PolicyConfig
from dynamo_poa.policies.static import StaticPolicy
from dynamo_poa.policies.table import TablePolicy
from dynamo_poa.values import REGIMES, Regime

Pair = tuple[float, float]  # router_temperature, overlap_weight


class Policy(Protocol):
    """Decides parameters; `name` is its key in the configuration."""

    name: str

    def decide(self, regime: Regime) -> Pair:
        """Return (router_temperature, overlap_weight) for the regime."""
        ...


def _table(config: PolicyConfig, static: Pair) -> Policy:
    return TablePolicy({regime: getattr(config, regime) for regime in REGIMES})


def _static(config: PolicyConfig, static: Pair) -> Policy:
    return StaticPolicy(static)


POLICIES: dict[str, Callable[[PolicyConfig, Pair], Policy]] = {"static": _static, "table": _table}


def make_policy(config: PolicyConfig, static: Pair) -> Policy:
    """Return the configured policy. `static` is the router's own (τ, ω)."""
    return POLICIES[config.name](config, static)
