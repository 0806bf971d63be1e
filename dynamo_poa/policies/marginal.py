"""The router plugin picks each request's worker by marginal social cost, as soon as that can be computed.

Owns: when that is: once the workers' latency models exist.
Does not own: the cost and the choice (the router's), the coefficients it needs, or what it falls back to
              where they are missing: Dynamo's own selection under the static parameters.
Source: theory.md, last section: with each request charged what it adds to all others, what is best for one is
        best for all (the Pigou toll).
"""

import msgspec

from dynamo_poa.policies.protocol import Answer, View
from dynamo_poa.values import Selection


class MarginalPolicy:
    """Static τ and ω under the plugin's own selection."""

    name = "marginal"

    def start(self) -> None:
        """Remember nothing."""

    def decide(self, state: None, view: View) -> tuple[None, Answer]:
        """Return the plugin's own selection, or Dynamo's while no worker's speed is known."""
        setting = msgspec.structs.replace(view.static, selection=Selection.MARGINAL)
        if view.calibrated:
            return None, Answer(setting, self.name)
        # What a predecessor has put in force stays: routers without fresh coefficients fall back by
        # themselves, and a controller that has only been restarted knows the speeds within seconds.
        kept = view.ours and view.in_force == setting
        return None, Answer(setting if kept else view.static, "no_coefficients")
