"""From which value on a resource calls for which regime, and when it lets go of it again.

Owns: the thresholds of each resource, of a pool and of a single rank, and their hysteresis.
Does not own: for how long it has to call (pressure.py keeps the time), the figures (evidence.py).
Invariant: pure; a resource that is not known says nothing.
Source: paper section 5.2: pools saturate on different resources.

Why a queue's thresholds count units of service time: see evidence.Service. By chance alone eight ranks at
80 % of their capacity queue up to 17 units within half an hour; at 120 % they gain 10 to 15 a second.
Counting arrivals is faster, for it has only their number's noise and not their sizes': see `arrivals`.
Measured: bench `detection`.
"""

from typing import NamedTuple

from dynamo_poa.config import RegimeConfig
from dynamo_poa.evidence import PoolReading, RankReading

QUEUE, KV_BLOCKS, SLOTS, ITERATION = "queue", "kv_blocks", "slots", "iteration"

EARLY_FRAC = 0.1  # of its threshold a queue needs, and no confirmation, when arrivals alone ...
EXCESS_REQUESTS = 31.0  # ... outran capacity by so many requests a rank's pool could not take
DRAINED_DEMAND = 0.75  # arriving work over capacity that ends `saturated` once half of the peak is gone
REST_DEMAND = 0.8  # the most, on average, at which an empty queue is more than a lull
DEMAND_HALF_LIFE_S = 5.0  # of that average; at 95 % of capacity its deviation is 2.5 %
BUSY_FRAC = 0.95  # busier than that, time no longer tells how much was asked for
WORK_HALF_LIFE_S = 120.0  # of what requests really take
QUEUE_EXIT_FRAC = 0.18  # of its threshold; a stable queue empties again and again
EXIT_FRAC = 0.9  # shares and iteration times move slowly: a little under the threshold is enough


class Evidence(NamedTuple):
    """What one resource says now.

    level:       the regime it calls for: 0, 1 or 2
    rests:       whether it lets go of level 1, and of level 2
    drained:     it lets go of level 2 without waiting for release_s
    confirm_s:   how long it has to call before it is heard
    lull:        it rests, but so much is asked for that it may not for long
    """

    resource: str
    level: int
    value: float
    threshold: float
    rests: tuple[bool, bool]
    drained: bool = False
    confirm_s: float = 0.0
    lull: bool = False


class Recent(NamedTuple):
    """What a pool was like lately.

    queue_units, queued:  moving averages of the queue, in units and in requests
    peak_s:               highest queue since the pool became saturated
    arrived:              requests up to the tick before
    excess_s:             by how much arriving work has outrun capacity: see `arrivals`
    demand:               moving average of arriving work over capacity, None while it is not known
    busy_frac, offered:   moving averages, below the knee, of the time passes ran and of what arrivals should
                          have made of it
    """

    queue_units: float = 0.0
    queued: float = 0.0
    peak_s: float = 0.0
    arrived: int | None = None
    excess_s: float = 0.0
    demand: float | None = None
    busy_frac: float = 0.0
    offered: float = 0.0

    @property
    def work_frac(self) -> float:
        """Return what a request really takes over what its size says: batches share what a pass costs."""
        return min(max(self.busy_frac / self.offered, 0.5), 1.5) if self.offered else 1.0


def units(reading: PoolReading) -> float | None:
    """Return a pool's queue in its unit, None while either is unknown."""
    return reading.queue_s / reading.unit_s if reading.queue_s is not None and reading.unit_s else None


def arrivals(recent: Recent, reading: PoolReading, elapsed_s: float, *, learns: bool) -> Recent:
    """Return by how much arrivals, each of mean size, have outrun the pool's capacity: a CUSUM at capacity.

        excess = max(0, excess + arrivals * request_s * work_frac - elapsed), at most three times what proves

    Args:  learns: below the knee, where the time that passes ran tells what requests really take.
    """
    if reading.arrived is None or reading.request_s is None or recent.arrived is None:
        return recent._replace(arrived=reading.arrived, excess_s=0.0, demand=None)
    brought_s = max(reading.arrived - recent.arrived, 0) * reading.request_s
    most_s = 3 * EXCESS_REQUESTS * reading.request_s
    excess_s = min(max(recent.excess_s + brought_s * recent.work_frac - elapsed_s, 0.0), most_s)
    if learns and reading.busy_frac is not None and reading.busy_frac < BUSY_FRAC and elapsed_s > 0:
        weight = 1 - 0.5 ** (elapsed_s / WORK_HALF_LIFE_S)
        recent = recent._replace(
            busy_frac=recent.busy_frac + weight * (reading.busy_frac - recent.busy_frac),
            offered=recent.offered + weight * (brought_s / elapsed_s - recent.offered),
        )
    now, average = demand(recent, reading), recent.demand
    if now is not None and average is not None:
        now = average + (1 - 0.5 ** (elapsed_s / DEMAND_HALF_LIFE_S)) * (now - average)
    return recent._replace(arrived=reading.arrived, excess_s=excess_s, demand=now)


def demand(recent: Recent, reading: PoolReading) -> float | None:
    """Return arriving work over capacity, of the last seconds; None while it is not known."""
    if reading.rate is None or reading.request_s is None:
        return None
    return reading.rate * reading.request_s * recent.work_frac


def pool_evidence(
    reading: PoolReading, recent: Recent, baseline_s: float | None, limits: RegimeConfig
) -> list[Evidence]:
    """Return what each known resource of a pool says.

    Args:  baseline_s: decode iteration without load.
    """
    found = [
        _queue(reading, recent, limits),
        _kv_blocks(reading, limits),
        _slots(reading, recent, limits),
        _iteration(reading, baseline_s, limits),
    ]
    return [evidence for evidence in found if evidence is not None]


def _queue(reading: PoolReading, recent: Recent, limits: RegimeConfig) -> Evidence | None:
    """Seconds of queued work: 2 at its threshold, or at EARLY_FRAC of it when arrivals outran capacity.

    Half of its peak gone, and demand well under capacity: what is left is the past, and no longer saturation.
    """
    queue_s, unit_s = reading.queue_s, reading.unit_s
    if queue_s is None or unit_s is None:
        return None
    threshold, confirm_s = limits.queue_saturated * unit_s, limits.pool_confirm_s
    if reading.request_s is not None and recent.excess_s >= EXCESS_REQUESTS * reading.request_s:
        threshold, confirm_s = EARLY_FRAC * threshold, 0.0
    empty = queue_s <= QUEUE_EXIT_FRAC * limits.queue_saturated * unit_s
    now = demand(recent, reading)
    drained = now is not None and now <= DRAINED_DEMAND and queue_s <= recent.peak_s / 2
    lull = recent.demand is not None and recent.demand > REST_DEMAND
    rests = (empty, empty or drained)
    if queue_s >= threshold and not drained:
        return Evidence(QUEUE, 2, queue_s, threshold, rests, confirm_s=confirm_s, lull=lull)
    if recent.queue_units >= limits.queue_transition and not empty:
        value, threshold = recent.queue_units * unit_s, limits.queue_transition * unit_s
        return Evidence(QUEUE, 1, value, threshold, rests, drained, limits.pool_confirm_s, lull)
    return Evidence(QUEUE, 0, queue_s, threshold, rests, drained, lull=lull)


def _kv_blocks(reading: PoolReading, limits: RegimeConfig) -> Evidence | None:
    """Share of KV blocks in use: 1 near full, 2 when requests wait for them besides."""
    value, threshold = reading.kv_frac, limits.kv_frac
    if value is None:
        return None
    waits = reading.queued is not None and reading.queued >= max(1.0, len(reading.ranks) / 2)
    level = 0 if value < threshold else 2 if waits else 1
    low = value < EXIT_FRAC * threshold
    rests = (low, low or not waits)
    return Evidence(KV_BLOCKS, level, value, threshold, rests, confirm_s=limits.confirm_s)


def _slots(reading: PoolReading, recent: Recent, limits: RegimeConfig) -> Evidence | None:
    """Share of slots in use while requests wait for one; how many wait is judged like a queue's units."""
    value, threshold = reading.slots_frac, limits.slots_frac
    if value is None or reading.queued is None:
        return None
    full, everywhere = value >= threshold, (reading.queued_median or 0) > 0
    level = 0
    if full and everywhere and reading.queued >= limits.queue_saturated:
        level = 2
    elif full and recent.queued >= limits.queue_transition:
        level = 1
    low = value < EXIT_FRAC * threshold or reading.queued <= QUEUE_EXIT_FRAC * limits.queue_saturated
    return Evidence(SLOTS, level, value, threshold, (low, low), confirm_s=limits.confirm_s)


def _iteration(reading: PoolReading, baseline_s: float | None, limits: RegimeConfig) -> Evidence | None:
    """Decode iteration time over its unloaded value: tokens come slowly, which is not yet saturation."""
    if reading.iteration_s is None or baseline_s is None:
        return None
    value, threshold = reading.iteration_s / baseline_s, limits.iteration_factor
    low = value < EXIT_FRAC * threshold
    return Evidence(
        ITERATION, int(value >= threshold), value, threshold, (low, True), confirm_s=limits.confirm_s
    )


def rank_evidence(rank: RankReading, reading: PoolReading, limits: RegimeConfig) -> list[Evidence]:
    """Return what makes a rank overloaded by itself; `rests` says under its exit threshold."""
    found = []
    if rank.queue_s is not None and reading.service_s is not None:
        threshold = limits.queue_saturated * reading.service_s
        low = rank.queue_s <= QUEUE_EXIT_FRAC * threshold
        found.append(Evidence(QUEUE, 2 * (rank.queue_s >= threshold), rank.queue_s, threshold, (low, low)))
    if rank.kv_frac is not None:
        level = 2 * (rank.kv_frac >= limits.kv_frac and bool(rank.queued))
        low = rank.kv_frac < EXIT_FRAC * limits.kv_frac
        found.append(Evidence(KV_BLOCKS, level, rank.kv_frac, limits.kv_frac, (low, low)))
    if rank.slots_frac is not None and rank.queued is not None:
        level = 2 * (rank.slots_frac >= limits.slots_frac and rank.queued >= limits.queue_saturated)
        low = rank.queued <= QUEUE_EXIT_FRAC * limits.queue_saturated
        found.append(Evidence(SLOTS, level, rank.slots_frac, limits.slots_frac, (low, low)))
    return found


def show(resource: str, value: float) -> str:
    """Return a resource's value as a person reads it: seconds, a share, or a multiple."""
    if resource == QUEUE:
        return f"{value:.2f} s"
    return f"{value:.1f} x" if resource == ITERATION else f"{value:.0%}"
