"""The parameters never move: what every other policy has to beat.

Owns: answering with the configured static parameters, whatever the regime.
Does not own: those parameters; they are the router's.
"""

from dynamo_poa.values import Regime


class StaticPolicy:
    """Dynamo's own behaviour, kept."""

    name = "static"

    def __init__(self, weights: tuple[float, float]) -> None:
        self._weights = weights

    def decide(self, regime: Regime) -> tuple[float, float]:
        """Return the same (τ, ω) always."""
        return self._weights
