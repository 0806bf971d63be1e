"""The parameters never move: what every other policy has to beat.

Owns: answering with the configured static parameters, whatever the regime.
Does not own: those parameters; they are the router's.
"""

from dynamo_poa.policies.protocol import Answer, View


class StaticPolicy:
    """Dynamo's own behaviour, kept."""

    name = "static"

    def start(self) -> None:
        """Remember nothing."""

    def decide(self, state: None, view: View) -> tuple[None, Answer]:
        """Return the static setting always."""
        return None, Answer(view.static, self.name)
