"""When operators are told to move workers: a better split, beyond noise, for a minute.

Owns: the conditions, how long they must hold, what interrupts them.
Does not own: the estimate and its interval (split.py), how advice is told (report.py) and followed
              (components/poa_planner.py).
Invariant: pure. Advice names a split that was found better again within every GRACE_S of the minute, and by
           more than half of the minute's looks: an estimate is one look however long it stands. Another split
           that stays ahead for longer begins the minute anew, and so do workers that have been moved since.
Source: issue 7, Advice: outside noise and held for a minute. A worker that changes pools takes a minute or
        more to come back, so what does not last so long is no reason.
"""

import msgspec

from dynamo_poa.coupling import Advice, AllocationEstimate, Split

HOLD_S = 60.0
GRACE_S = 15.0  # three looks by default: one that finds less, or nothing, does not begin the minute anew
MIN_LOOKS = 6  # that found it
LOOKS = 11  # are judged at least, where a minute has fewer: of those, six are more than half
MIN_GAIN_FRAC = 0.02  # less is not worth moving a worker for
# Under this the interval reaches to nothing: of two splits that serve all, one is ahead by a hair.
NOISE_FRAC = 0.005


class Look(msgspec.Struct, frozen=True):
    """An estimate, and whether it found what is watched."""

    at_s: float
    found: bool


class AdviceState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick.

    candidate:     the change that is watched, with the figures it was last found with
    since_s, seen_s:  when it was found first and last, as long as an estimate stands
    looks:         of the last minute, since it was found first, or the last LOOKS where those are more
    given:         what operators are told now
    """

    candidate: Advice | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    looks: tuple[Look, ...] = ()
    given: Advice | None = None


def next_advice(
    state: AdviceState, allocation: AllocationEstimate, looked_at_s: float | None, at_s: float
) -> AdviceState:
    """Return the state after one more tick; `given` is what holds now.

    Args:  allocation: the latest estimate, the same one until the next.  looked_at_s: when it was noted, None
           before the first.  at_s: now; both monotonic.
    """
    found, candidate = worth_it(allocation), state.candidate
    again = found is not None and candidate is not None and _move(found) == _move(candidate)
    if again:
        state = msgspec.structs.replace(state, candidate=found, seen_s=at_s)
    elif candidate is None or _moved(candidate, allocation) or at_s - state.seen_s > GRACE_S:
        again = found is not None
        state = AdviceState(candidate=found, since_s=at_s, seen_s=at_s)
    if state.candidate is None or looked_at_s is None:
        return state
    looks = _with_look(state.looks, Look(looked_at_s, again), at_s)
    held_s, times = state.seen_s - state.since_s, sum(look.found for look in looks)
    holds = held_s >= HOLD_S and times >= MIN_LOOKS and times > len(looks) / 2
    given = msgspec.structs.replace(state.candidate, held_s=held_s) if holds else None
    return msgspec.structs.replace(state, looks=looks, given=given)


def _with_look(looks: tuple[Look, ...], look: Look, at_s: float) -> tuple[Look, ...]:
    """Return the looks that count: one more where it is another, without those of long ago."""
    if not looks or looks[-1].at_s != look.at_s:
        looks = (*looks, look)
    first = sum(one.at_s < at_s - HOLD_S for one in looks[:-LOOKS])
    return looks[first:]


def worth_it(allocation: AllocationEstimate) -> Advice | None:
    """Return the change of split that the estimate shows to be better beyond noise; None where none is."""
    now, then, gain_frac = allocation.now, allocation.target, allocation.gain_frac
    low, high = allocation.gain_low, allocation.gain_high
    if now is None or then is None or gain_frac is None or low is None or high is None:
        return None
    if gain_frac < MIN_GAIN_FRAC or low < NOISE_FRAC:
        return None
    return Advice(now=now, then=then, gain_frac=gain_frac, gain_low=low, gain_high=high)


def _move(advice: Advice) -> tuple[Split, Split]:
    return advice.now.split, advice.then.split


def _moved(candidate: Advice, allocation: AllocationEstimate) -> bool:
    """Tell whether the workers are split in another way than the candidate begins with."""
    return allocation.now is not None and allocation.now.split != candidate.now.split
