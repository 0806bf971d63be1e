"""Which policies there are.

Owns: the registry.
Does not own: the contract of a policy (protocol.py), the regime (regime.py), whether an answer is applied
              (controller.py).
Invariant: what is here is what the configuration offers; one conformance suite runs over all of them
           (tests/test_policies.py).
"""

from collections.abc import Callable

import msgspec

from dynamo_poa.config import PolicyConfig, PolicyName
from dynamo_poa.policies.auto import AutoPolicy, candidates
from dynamo_poa.policies.marginal import MarginalPolicy
from dynamo_poa.policies.protocol import Answer, Policy, View
from dynamo_poa.policies.static import StaticPolicy
from dynamo_poa.policies.table import TablePolicy
from dynamo_poa.values import REGIMES, Selection, Setting

__all__ = ["POLICIES", "Answer", "Policy", "View", "make_policy", "make_shadow", "settings_to_price"]


def _table(config: PolicyConfig) -> Policy:
    return TablePolicy({regime: getattr(config, regime) for regime in REGIMES})


def _auto(config: PolicyConfig) -> Policy:
    if config.auto_start == "static":
        return AutoPolicy(config)
    return AutoPolicy(config, {regime: Setting(*getattr(config, regime)) for regime in REGIMES})


POLICIES: dict[PolicyName, Callable[[PolicyConfig], Policy]] = {
    "static": lambda config: StaticPolicy(),
    "table": _table,
    "auto": _auto,
    "marginal": lambda config: MarginalPolicy(),
}


def make_policy(config: PolicyConfig) -> Policy:
    """Return the policy whose word counts."""
    return POLICIES[config.name](config)


def make_shadow(config: PolicyConfig) -> Policy | None:
    """Return the policy that is only asked and recorded, None when none is configured."""
    return POLICIES[config.shadow](config) if config.shadow else None


def settings_to_price(config: PolicyConfig, static: Setting, in_force: Setting | None) -> tuple[Setting, ...]:
    """Return the settings that may be in force next, whose predicted cost somebody wants to know.

    `auto` chooses by it, and of a policy in shadow the gain is told; otherwise there are none.
    """
    names = {config.name, config.shadow}
    if "auto" not in names and not config.shadow:
        return ()
    wanted = dict.fromkeys((static,) if in_force is None else (in_force, static))
    if "auto" in names:
        for base in tuple(wanted):
            wanted |= dict.fromkeys(candidates(base, static))
    if "table" in names or config.auto_start == "table":
        wanted |= dict.fromkeys(Setting(*getattr(config, regime)) for regime in REGIMES)
    if "marginal" in names:
        wanted[msgspec.structs.replace(static, selection=Selection.MARGINAL)] = None
    return tuple(wanted)
