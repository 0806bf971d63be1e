"""When a workload's requests are sent: closed loops, Poisson, on-off, waves, a trace's own times.

Owns: the kinds of load and their parameters; arrival instants.
Does not own: what is asked (synthetic.py, trace.py), who sends it.
Invariant: open and closed loops are different types; nothing can be both.
"""

import msgspec


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """So many users, each of whom asks again when the last answer has ended and `think_s` have passed."""

    users: int
    think_s: float = 0.0

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.users} users"


class Poisson(msgspec.Struct, frozen=True, kw_only=True, tag="poisson"):
    """Requests come at random, so many a second."""

    rate_rps: float

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.rate_rps:g} requests/s"


class OnOff(msgspec.Struct, frozen=True, kw_only=True, tag="on-off"):
    """Poisson at two rates by turns."""

    on_rps: float
    off_rps: float
    on_s: float
    off_s: float

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.on_rps:g} requests/s for {self.on_s:g} s, {self.off_rps:g} for {self.off_s:g} s"


class Waves(msgspec.Struct, frozen=True, kw_only=True, tag="waves"):
    """Poisson at a rate that swings: mean_rps * (1 + swing_frac * sin(2 pi t / period_s))."""

    mean_rps: float
    swing_frac: float
    period_s: float

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.mean_rps:g} ± {self.swing_frac:.0%} requests/s every {self.period_s:g} s"


class TraceTimes(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """The trace's own arrival times, so many times as fast."""

    speedup: float = 1.0

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"trace x {self.speedup:g}"


Load = Closed | Poisson | OnOff | Waves | TraceTimes
