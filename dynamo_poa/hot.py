"""Which single rank is overloaded while its pool is not, and when that is over.

Owns: the latch of a hot rank, its confirmation, its release and its expiry.
Does not own: thresholds (resources.py), the pool's regime (pressure.py), which a hot rank never moves.
Invariant: pure; a latch outlives neither its signal nor `expire_s` without confirmation.
Source: cases S2 (a latch without expiry), I8(b) (one long prompt), E7 (one hot rank of several).
"""

from collections.abc import Mapping

import msgspec

from dynamo_poa.config import RegimeConfig
from dynamo_poa.evidence import PoolReading
from dynamo_poa.resources import Evidence, rank_evidence, show
from dynamo_poa.values import Role, WorkerKey

HOT_CONFIRM_S = 2.0  # a long prompt queued behind another is no hot worker


class HotState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is over by itself; `latched` once it has been for HOT_CONFIRM_S."""

    role: Role
    resource: str
    value: float
    threshold: float
    since_s: float
    confirmed_at_s: float
    latched: bool = False


class HotChange(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has become hot, or is no longer; `value` None: the figure ceased."""

    key: WorkerKey
    role: Role
    resource: str
    overloaded: bool
    value: float | None
    threshold: float
    reason: str


def next_hot(
    before: Mapping[WorkerKey, HotState],
    reading: PoolReading,
    at_s: float,
    limits: RegimeConfig,
    *,
    saturated: bool,
    expire_s: float,
) -> tuple[dict[WorkerKey, HotState], list[HotChange]]:
    """Latch ranks that are over while their pool's median rank is not; let go of those that are no longer.

    Args:  saturated: the pool as a whole is.
    """
    evidence = {rank.key: rank_evidence(rank, reading, limits) for rank in reading.ranks}
    over = {key: next((e for e in found if e.level), None) for key, found in evidence.items()}
    shared = saturated or sum(e is not None for e in over.values()) > len(reading.ranks) // 2
    hot: dict[WorkerKey, HotState] = {}
    changes: list[HotChange] = []
    for key, found in evidence.items():
        was, now = before.get(key), over[key]
        if shared:
            if was is not None:
                changes += cleared(key, was, was.value, "its whole pool is overloaded")
        elif now is not None:
            since_s = at_s if was is None else was.since_s
            latched = at_s - since_s >= HOT_CONFIRM_S
            hot[key] = HotState(
                role=reading.role,
                resource=now.resource,
                value=now.value,
                threshold=now.threshold,
                since_s=since_s,
                confirmed_at_s=at_s,
                latched=latched,
            )
            if latched and not (was and was.latched):
                changes.append(_overloaded(key, hot[key]))
        elif was is not None and was.latched:
            reading_now = next((e for e in found if e.resource == was.resource), None)
            why = _why_cleared(was, reading_now, at_s, expire_s)
            if why:
                changes += cleared(key, was, None if reading_now is None else reading_now.value, why)
            else:
                value = was.value if reading_now is None else reading_now.value
                hot[key] = msgspec.structs.replace(was, value=value)
    return hot, changes


def _why_cleared(was: HotState, now: Evidence | None, at_s: float, expire_s: float) -> str:
    """Return why a latched rank is let go, empty while it is not."""
    if now is None:
        return f"{was.resource} expired: no longer sent"
    if now.rests[0]:
        return f"{was.resource} down to {show(was.resource, now.value)}"
    if at_s - was.confirmed_at_s >= expire_s:
        return f"{was.resource} expired: not confirmed for {at_s - was.confirmed_at_s:.0f} s"
    return ""


def _overloaded(key: WorkerKey, hot: HotState) -> HotChange:
    value, threshold = show(hot.resource, hot.value), show(hot.resource, hot.threshold)
    return HotChange(
        key=key,
        role=hot.role,
        resource=hot.resource,
        overloaded=True,
        value=hot.value,
        threshold=hot.threshold,
        reason=f"{hot.resource} {value} at or over {threshold}, its pool's median worker is not",
    )


def cleared(key: WorkerKey, was: HotState, value: float | None, reason: str) -> list[HotChange]:
    """Return the change that ends a latch; none when it was not latched yet."""
    if not was.latched:
        return []
    change = HotChange(
        key=key,
        role=was.role,
        resource=was.resource,
        overloaded=False,
        value=value,
        threshold=was.threshold,
        reason=reason,
    )
    return [change]
