"""Whether more or less is asked of the system than before.

Owns: comparing two loads; which figure decides when both are known.
Does not own: what follows from it (regime.py).
Invariant: what is unknown is no evidence either way.
"""

import msgspec


class Load(msgspec.Struct, frozen=True):
    """How much is asked of the system. None is unknown."""

    in_flight: int | None = None
    arrival_rate: float | None = None  # requests/s


def fell(before: Load, now: Load, release_frac: float) -> bool:
    """Tell whether the load is at most `release_frac` of what it was; unknown is no evidence.

    Requests in flight decide where they are known: behind closed-loop clients the arrival rate bursts when
    they start and falls when the system is slow, at the same load.
    """
    if before.in_flight is not None and now.in_flight is not None:
        return now.in_flight <= release_frac * before.in_flight
    if before.arrival_rate is not None and now.arrival_rate is not None:
        return now.arrival_rate <= release_frac * before.arrival_rate
    return False


def rose(before: Load, now: Load, release_frac: float) -> bool:
    """Tell whether the load has grown by more than `release_frac`; unknown is no evidence.

    Here the arrival rate decides: requests in flight also pile up because the system is slow.
    """
    if before.arrival_rate is not None and now.arrival_rate is not None:
        return before.arrival_rate <= release_frac * now.arrival_rate
    if before.in_flight is not None and now.in_flight is not None:
        return before.in_flight <= release_frac * now.in_flight
    return False


def compare(needed: Load | None, now: Load) -> str:
    """Return both loads in words."""
    before = None if needed is None else needed.in_flight
    shown = ["unknown" if count is None else str(count) for count in (now.in_flight, before)]
    return f"{shown[0]} in flight, needed at {shown[1]}"
