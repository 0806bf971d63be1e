"""One fixed pair of parameters per regime: the paper's table, or the user's.

Owns: looking the pair up.
Does not own: the values, which are configuration (PolicyConfig), or any belief that they help: on homogeneous
              workers they often do not. Measure them against `static` on your own traffic.
Source: arXiv 2606.17081, section 5: greedy affinity below, randomness against herding in transition, load
        balance over affinity when saturated.
"""

from collections.abc import Mapping

from dynamo_poa.values import Regime


class TablePolicy:
    """(τ, ω) by regime."""

    name = "table"

    def __init__(self, table: Mapping[Regime, tuple[float, float]]) -> None:
        self._table = dict(table)

    def decide(self, regime: Regime) -> tuple[float, float]:
        """Return the regime's (τ, ω)."""
        return self._table[regime]
