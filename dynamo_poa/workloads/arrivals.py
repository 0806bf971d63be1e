"""When a workload's requests are sent: closed loops, Poisson, on-off, waves, a trace's own times.

Owns: the kinds of load and their parameters; arrival instants.
Does not own: what is asked (synthetic.py, trace.py), who sends it.
Invariant: open and closed loops are different types; nothing can be both. Instants never go back.
"""

import math
import random
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, ClassVar

from dynamo_poa.config import Knob, Section


class Closed(Section, frozen=True, kw_only=True, tag="closed"):
    """So many users, each of whom asks again when the last answer has ended and `think_s` have passed."""

    PATH: ClassVar[str] = "Closed"

    users: Annotated[int, Knob("who ask one request at a time each", low=1, high=100_000)]
    think_s: Annotated[float, Knob("from an answer's end to the user's next request", "s", low=0)] = 0.0

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.users} users" + (f" who think {self.think_s:g} s" if self.think_s else "")


class Poisson(Section, frozen=True, kw_only=True, tag="poisson"):
    """Requests come at random, so many a second."""

    PATH: ClassVar[str] = "Poisson"

    rate_rps: Annotated[float, Knob("mean rate", "requests/s", above=0)]

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.rate_rps:g} requests/s"


class OnOff(Section, frozen=True, kw_only=True, tag="on-off"):
    """Poisson at two rates by turns, the first of them first."""

    PATH: ClassVar[str] = "OnOff"

    on_rps: Annotated[float, Knob("mean rate in a burst", "requests/s", above=0)]
    off_rps: Annotated[float, Knob("mean rate between bursts; 0 for none", "requests/s", low=0)]
    on_s: Annotated[float, Knob("a burst's length", "s", above=0)]
    off_s: Annotated[float, Knob("from a burst's end to the next burst", "s", above=0)]

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.on_rps:g} requests/s for {self.on_s:g} s, {self.off_rps:g} for {self.off_s:g} s"


class Waves(Section, frozen=True, kw_only=True, tag="waves"):
    """Poisson at a rate that swings: mean_rps * (1 + swing_frac * sin(2 pi t / period_s))."""

    PATH: ClassVar[str] = "Waves"

    mean_rps: Annotated[float, Knob("rate over a whole period", "requests/s", above=0)]
    swing_frac: Annotated[float, Knob("of the mean, up and down", low=0, high=1)]
    period_s: Annotated[float, Knob("from crest to crest", "s", above=0)]

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"{self.mean_rps:g} ± {self.swing_frac:.0%} requests/s every {self.period_s:g} s"


class TraceTimes(Section, frozen=True, kw_only=True, tag="trace"):
    """The trace's own arrival times, so many times as fast.

    With `spread_s`, requests that the file has at one instant are spread at random over what follows, as
    they were before the times were rounded: Mooncake's conversation trace has one instant in 3 s. Without,
    every seed sends at the same instants.
    """

    PATH: ClassVar[str] = "TraceTimes"

    speedup: Annotated[float, Knob("times as fast as the file says", above=0)] = 1.0
    spread_s: Annotated[float, Knob("what the file's times are rounded to, before `speedup`", "s", low=0)] = (
        0.0
    )

    @property
    def text(self) -> str:
        """Return it for a person."""
        spread = f", spread over {self.spread_s:g} s" if self.spread_s else ""
        return f"trace x {self.speedup:g}{spread}"


Open = Poisson | OnOff | Waves
Load = Closed | Open | TraceTimes


def instants(load: Open, rng: random.Random) -> Iterator[float]:
    """Yield arrival instants without end, in seconds from the start, ascending.

    On-off: a unit exponential is used up at each rate in its turn, which is exact at the borders too.
    Waves:  Poisson at the crest's rate, of which each arrival is kept with probability rate(t) / crest.
    """
    match load:
        case Poisson():
            at_s = 0.0
            while True:
                at_s += rng.expovariate(load.rate_rps)
                yield at_s
        case OnOff():
            yield from _on_off(load, rng)
        case Waves():
            at_s, crest_rps = 0.0, load.mean_rps * (1 + load.swing_frac)
            while True:
                at_s += rng.expovariate(crest_rps)
                rate_rps = load.mean_rps * (
                    1 + load.swing_frac * math.sin(2 * math.pi * at_s / load.period_s)
                )
                if rng.random() * crest_rps < rate_rps:
                    yield at_s


def _on_off(load: OnOff, rng: random.Random) -> Iterator[float]:
    turns = ((load.on_rps, load.on_s), (load.off_rps, load.off_s))
    starts_s, number = 0.0, 0
    left = rng.expovariate(1.0)
    while True:
        rate_rps, length_s = turns[number % 2]
        at_s, ends_s = starts_s, starts_s + length_s
        while rate_rps and at_s + left / rate_rps < ends_s:
            at_s += left / rate_rps
            yield at_s
            left = rng.expovariate(1.0)
        left -= (ends_s - at_s) * rate_rps
        starts_s, number = ends_s, number + 1


def respaced(times_s: Iterable[float], load: TraceTimes, rng: random.Random) -> Iterator[float]:
    """Yield a trace's times as `load` wants them, the first group's instant at 0, ascending.

    Args:     times_s: as the file has them, ascending.
    """
    groups = ((at_s, sum(1 for _ in same)) for at_s, same in groupby(times_s))
    here = next(groups, None)
    origin_s = here[0] if here else 0.0
    while here:
        at_s, count = here
        here = next(groups, None)
        room_s = min(load.spread_s, here[0] - at_s) if here else load.spread_s
        offsets = sorted(rng.uniform(0, room_s) for _ in range(count)) if room_s else [0.0] * count
        for offset_s in offsets:
            yield (at_s - origin_s + offset_s) / load.speedup
