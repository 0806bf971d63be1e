"""What the regime's machine is told of a tick, what it remembers, and what it answers.

Owns: these records, and the thresholds in seconds.
Does not own: any rule on them (regime.py, need.py).
Invariant: frozen values; None is unknown.
"""

from collections.abc import Mapping

import msgspec

from dynamo_poa.config import RegimeConfig
from dynamo_poa.demand import Load
from dynamo_poa.pressure import strongest
from dynamo_poa.values import Applied, PoolRegime, Regime, Role

TTFT = "ttft"
REFUSALS = "refusals"
UPSTREAM = "upstream"
SHED_LIMIT = 0.01  # S8: with more than 1 % refused, TTFT of the survivors proves nothing


def driver_of(pool: PoolRegime) -> str:
    """Return what drives a pool as `<role>.<resource>`."""
    return f"{pool.role}.{pool.resource}"


class RegimeSignal(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick knows.

    fresh:         the TTFT window has changed since the tick before
    pools:         what the workers' own figures say of each pool; empty while nothing is known of any
    corroborated:  soft evidence for a rise of TTFT, in words
    """

    at_s: float
    p99_s: float | None = None
    samples: int = 0
    fresh: bool = False
    load: Load = Load()
    shed_frac: float = 0.0
    workers: int | None = None
    pools: Mapping[Role, PoolRegime] = {}
    corroborated: str = ""

    @property
    def pressed(self) -> int:
        """Return the level of the pool that is in the highest regime."""
        pool = strongest(self.pools.values())
        return 0 if pool is None else pool.regime.level

    @property
    def known(self) -> bool:
        """Tell whether every rank of every pool says what it has queued."""
        return bool(self.pools) and all(pool.known for pool in self.pools.values())

    @property
    def idle(self) -> bool:
        """Tell whether every pool is known to have no queue and workers to spare."""
        return bool(self.pools) and all(pool.idle for pool in self.pools.values())


class RegimeState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick. All instants are monotonic.

    average_s:     geometric moving average of TTFT P99
    over_since_s:  since when the raw value has been over the next threshold
    less_since_s:  since when the load has been evidently less than it was needed at
    needed:        for transition and saturated, the load at which it was needed
    needed_at_s:   when the average was last over the threshold that leads to the regime
    let_go:        the load when a regime was last left downwards, and which and when
    probe_s:       doubled by relapses; None is the configured one
    rose:          the last change was upwards
    driver:        what the regime was last needed for: `<role>.<resource>`, `ttft` or `refusals`
    steady_s:      slower average, for the baseline only
    readings_s:    P99 readings until there are enough for a first baseline
    """

    regime: Regime = Regime.BELOW
    changed_at_s: float | None = None
    changes: int = 0
    baseline_s: float | None = None
    steady_s: float | None = None
    readings_s: tuple[float, ...] = ()
    average_s: float | None = None
    averaged_at_s: float = 0.0
    over_since_s: float | None = None
    less_since_s: float | None = None
    watched_since_s: float | None = None
    busy_at_s: float | None = None
    needed: tuple[Load | None, Load | None] = (None, None)
    needed_at_s: float = 0.0
    let_go: Load | None = None
    let_go_from: Regime | None = None
    let_go_at_s: float = 0.0
    probe_s: float | None = None
    rose: bool = False
    driver: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why the regime is what it is. `hold` is UNCHANGED, HELD_DWELL or HELD_NOT_READY.

    value_s, threshold_s:  TTFT's that were compared, None when none were
    dwell_left_s:          until the next change is allowed
    driver:                what drives it: `<role>.<resource>`, `ttft`, `refusals`, or nothing
    value, threshold:      the driver's, in its unit
    bottleneck:            `upstream` when TTFT is bad and the workers are idle
    """

    hold: Applied = Applied.UNCHANGED
    reason: str
    value_s: float | None = None
    threshold_s: float | None = None
    dwell_left_s: float = 0.0
    driver: str = ""
    value: float | None = None
    threshold: float | None = None
    bottleneck: str = ""


def thresholds_s(baseline_s: float | None, limits: RegimeConfig) -> tuple[float, float] | None:
    """Return θ1 and θ2 in seconds, None while they count a baseline that is not known."""
    if limits.unit == "seconds":
        return limits.theta1, limits.theta2
    baseline_s = limits.baseline_s or baseline_s
    return None if baseline_s is None else (limits.theta1 * baseline_s, limits.theta2 * baseline_s)
