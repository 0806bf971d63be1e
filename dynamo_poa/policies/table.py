"""One fixed pair of parameters per regime: the paper's table, or the user's.

Owns: looking the pair up; leaving ω alone while moving it would do nothing (case E6).
Does not own: the values, which are configuration (PolicyConfig), or any belief that they help: on homogeneous
              workers they often do not. Measure them against `static` on your own traffic.
Source: arXiv 2606.17081, section 5: greedy affinity below, randomness against herding in transition, load
        balance over affinity when saturated.
"""

from collections.abc import Mapping

from dynamo_poa.policies.protocol import Answer, View
from dynamo_poa.values import Regime, Setting


class TablePolicy:
    """(τ, ω) by regime."""

    name = "table"

    def __init__(self, table: Mapping[Regime, tuple[float, float]]) -> None:
        self._table = dict(table)

    def start(self) -> None:
        """Remember nothing."""

    def decide(self, state: None, view: View) -> tuple[None, Answer]:
        """Return the regime's (τ, ω)."""
        router_temperature, overlap_weight = self._table[view.regime]
        held = view.in_force.overlap_weight if view.in_force is not None and view.ours else overlap_weight
        if not view.cache_absent or held == overlap_weight:
            return None, Answer(Setting(router_temperature, overlap_weight), self.name)
        why = f"ω stays {held:g}: no worker differs in cached tokens"
        return None, Answer(Setting(router_temperature, held), self.name, why)
