"""In which regime each pool is, and which resource drives it.

Owns: for how long a resource has to call for a regime, and to rest, before its pool moves; moving averages;
      the unloaded decode iteration time.
Does not own: thresholds (resources.py), single ranks (hot.py), the system's regime (regime.py).
Invariant: pure; what is not known presses nobody and holds nobody; one hot rank never moves its pool.
Source: paper section 5.2; case D1 (flapping).
"""

from collections.abc import Iterable, Mapping

import msgspec

from dynamo_poa.baseline import Baseline, learned
from dynamo_poa.config import RegimeConfig
from dynamo_poa.evidence import PoolReading
from dynamo_poa.hot import HotChange, HotState, cleared, next_hot
from dynamo_poa.resources import Evidence, Recent, arrivals, pool_evidence, show, units
from dynamo_poa.values import REGIMES, HotWorker, PoolRegime, Regime, Role, WorkerKey


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried of a pool.

    over_since_s:   by resource and level it calls for, since when
    rest_since_s:   since when every resource lets go of the level
    """

    level: int = 0
    resource: str = ""
    value: float | None = None
    threshold: float | None = None
    reason: str = ""
    over_since_s: dict[tuple[str, int], float] = {}
    rest_since_s: float | None = None
    recent: Recent = Recent()
    averaged_at_s: float | None = None


class PressureState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick. `changes` are those of the last tick."""

    pools: dict[Role, PoolState] = {}
    hot: dict[WorkerKey, HotState] = {}
    changes: tuple[HotChange, ...] = ()
    iteration: Baseline = Baseline()
    iterated_at_s: float | None = None


def next_pressure(
    state: PressureState,
    pools: Mapping[Role, PoolReading],
    at_s: float,
    limits: RegimeConfig,
    *,
    expire_s: float,
) -> tuple[PressureState, dict[Role, PoolRegime]]:
    """Judge every pool and every rank.

    A pool rises to what a resource has called for during its confirmation, by two levels if need be, and
    falls by one when every resource has rested for pool_release_s; one that is no longer known rests at once.

    Args:  expire_s: a hot rank that is not confirmed for so long is let go.
    """
    iteration, iterated_at_s = _learn_iteration(state, pools, at_s)
    pool_states: dict[Role, PoolState] = {}
    hot: dict[WorkerKey, HotState] = {}
    changes: list[HotChange] = []
    regimes: dict[Role, PoolRegime] = {}
    for role, reading in pools.items():
        before = _averaged(state.pools.get(role, PoolState()), reading, at_s, limits)
        pool = pool_states[role] = _next_pool(before, reading, iteration.value_s, at_s, limits)
        of_pool, told = next_hot(
            state.hot, reading, at_s, limits, saturated=pool.level == 2, expire_s=expire_s
        )
        hot |= of_pool
        changes += told
        regimes[role] = _regime(pool, reading, of_pool)
    present = {rank.key for reading in pools.values() for rank in reading.ranks}
    for key, was in state.hot.items():
        if key not in present:
            changes += cleared(key, was, None, "the worker is gone")
    state = PressureState(
        pools=pool_states,
        hot=hot,
        changes=tuple(changes),
        iteration=iteration,
        iterated_at_s=iterated_at_s,
    )
    return state, regimes


def unseen(state: PressureState) -> PressureState:
    """Return the state after a tick without eyes: nothing goes on being confirmed or released."""
    pools = {
        role: msgspec.structs.replace(pool, over_since_s={}, rest_since_s=None)
        for role, pool in state.pools.items()
    }
    hot = {key: rank for key, rank in state.hot.items() if rank.latched}
    return msgspec.structs.replace(state, pools=pools, hot=hot, changes=())


def _learn_iteration(
    state: PressureState, pools: Mapping[Role, PoolReading], at_s: float
) -> tuple[Baseline, float | None]:
    """Learn how long a decode iteration takes with next to no request; up only while there is none more."""
    for role in (Role.DECODE, Role.AGGREGATED):
        reading = pools.get(role)
        if reading is None or reading.iteration_s is None:
            continue
        pool = state.pools.get(role, PoolState())
        if pool.level > 0:
            return state.iteration, at_s
        elapsed_s = 0.0 if state.iterated_at_s is None else at_s - state.iterated_at_s
        value_s = reading.iteration_s
        return learned(state.iteration, value_s, value_s, elapsed_s, calm=reading.unloaded), at_s
    return state.iteration, state.iterated_at_s


def _averaged(pool: PoolState, reading: PoolReading, at_s: float, limits: RegimeConfig) -> PoolState:
    recent = pool.recent
    elapsed_s = 0.0 if pool.averaged_at_s is None else at_s - pool.averaged_at_s
    weight = 1 - 0.5 ** (elapsed_s / limits.queue_half_life_s)
    # Bounded, so that what a long overload left behind is not averaged for as long again.
    queue_units = min(units(reading) or 0.0, limits.queue_saturated)
    queued = min(reading.queued or 0, limits.queue_saturated)
    recent = recent._replace(
        queue_units=recent.queue_units + weight * (queue_units - recent.queue_units),
        queued=recent.queued + weight * (queued - recent.queued),
    )
    recent = arrivals(recent, reading, elapsed_s, learns=pool.level == 0)
    return msgspec.structs.replace(pool, recent=recent, averaged_at_s=at_s)


def _next_pool(
    pool: PoolState, reading: PoolReading, iteration_s: float | None, at_s: float, limits: RegimeConfig
) -> PoolState:
    found = pool_evidence(reading, pool.recent, iteration_s, limits)
    over_since_s = {
        (evidence.resource, level): pool.over_since_s.get((evidence.resource, level), at_s)
        for evidence in found
        for level in range(1, evidence.level + 1)
    }
    confirmed = [
        (level, evidence)
        for evidence in found
        for level in range(1, evidence.level + 1)
        if at_s - over_since_s[evidence.resource, level] >= evidence.confirm_s
    ]
    pool = msgspec.structs.replace(pool, over_since_s=over_since_s)
    if confirmed:
        level, evidence = max(confirmed, key=lambda pair: pair[0])
        if level >= pool.level:
            peak_s = max(pool.recent.peak_s if pool.level == 2 else 0.0, reading.queue_s or 0.0)
            return _driven(pool, level, evidence, pool.recent._replace(peak_s=peak_s))
    if pool.level == 0:
        return pool
    return _release(pool, found, reading, at_s, limits)


def _driven(pool: PoolState, level: int, by: Evidence, recent: Recent) -> PoolState:
    reason = f"{by.resource} {show(by.resource, by.value)} at or over {show(by.resource, by.threshold)}"
    return msgspec.structs.replace(
        pool,
        level=level,
        resource=by.resource,
        value=by.value,
        threshold=by.threshold,
        reason=reason,
        rest_since_s=None,
        recent=recent,
    )


def _release(
    pool: PoolState, found: list[Evidence], reading: PoolReading, at_s: float, limits: RegimeConfig
) -> PoolState:
    """Fall by one level when every resource rests, and go on holding otherwise."""
    driving = next((evidence for evidence in found if evidence.resource == pool.resource), None)
    recent = pool.recent._replace(peak_s=max(pool.recent.peak_s, reading.queue_s or 0.0))
    pool = msgspec.structs.replace(pool, value=None if driving is None else driving.value, recent=recent)
    if not all(evidence.rests[pool.level - 1] for evidence in found):
        return msgspec.structs.replace(pool, rest_since_s=None, reason=f"{pool.resource} not yet released")
    since_s = at_s if pool.rest_since_s is None else pool.rest_since_s
    at_once = driving is None or (pool.level == 2 and driving.drained)
    lull = any(evidence.lull for evidence in found)
    if not at_once and (lull or at_s - since_s < limits.pool_release_s):
        return msgspec.structs.replace(pool, rest_since_s=since_s, reason=f"{pool.resource} being released")
    why = (
        "expired: no longer known" if driving is None else f"released at {show(pool.resource, driving.value)}"
    )
    level = pool.level - 1
    return msgspec.structs.replace(
        pool,
        level=level,
        rest_since_s=since_s if level else None,
        reason=f"{pool.resource} {why}",
        resource=pool.resource if level else "",
        value=pool.value if level else None,
        threshold=pool.threshold if level else None,
        recent=recent._replace(  # what led here is over
            queue_units=min(recent.queue_units, units(reading) or 0.0),
            queued=min(recent.queued, reading.queued or 0),
        ),
    )


def _regime(pool: PoolState, reading: PoolReading, hot: Mapping[WorkerKey, HotState]) -> PoolRegime:
    return PoolRegime(
        role=reading.role,
        regime=REGIMES[pool.level],
        resource=pool.resource,
        value=pool.value,
        threshold=pool.threshold,
        reason=pool.reason,
        hot=tuple(
            HotWorker(
                worker_id=key.worker_id,
                dp_rank=key.dp_rank,
                resource=of_rank.resource,
                value=of_rank.value,
                threshold=of_rank.threshold,
            )
            for key, of_rank in hot.items()
            if of_rank.latched
        ),
        known=reading.known,
        idle=reading.idle and pool.level == 0,
    )


def strongest(pools: Iterable[PoolRegime]) -> PoolRegime | None:
    """Return the pool in the highest regime, None while all are below."""
    pressed = [pool for pool in pools if pool.regime is not Regime.BELOW]
    return max(pressed, key=lambda pool: pool.regime.level, default=None)
