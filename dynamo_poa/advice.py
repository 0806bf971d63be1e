"""When operators are told to move workers: a better split, beyond noise, for a minute.

Owns: the conditions, how long they must hold, what interrupts them.
Does not own: the estimate and its interval (split.py), how advice is told (report.py) and followed
              (components/poa_planner.py).
Invariant: pure. Advice names a split that was found better again within every GRACE_S of the minute. Another
           one that stays ahead for longer begins it anew, and so do workers that have been moved meanwhile.
Source: issue 7, Advice: outside noise and held for a minute. A worker that changes pools takes a minute or
        more to come back, so what does not last so long is no reason.
"""

import msgspec

from dynamo_poa.coupling import Advice, AllocationEstimate, Split

HOLD_S = 60.0
GRACE_S = 15.0  # three looks by default: one that finds less, or nothing, does not begin the minute anew
MIN_GAIN_FRAC = 0.02  # less is not worth moving a worker for
NOISE_FRAC = (
    0.005  # under this the interval reaches to nothing: of two splits that serve all, one is ahead by a hair
)


class AdviceState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick.

    candidate:     the change that is watched, with the figures it was last found with
    since_s, seen_s:  when it was found first and last
    given:         what operators are told now
    """

    candidate: Advice | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    given: Advice | None = None


def next_advice(state: AdviceState, allocation: AllocationEstimate, at_s: float) -> AdviceState:
    """Return the state after one more tick; `given` is what holds now.

    Args:  allocation: the latest estimate, the same one until the next.  at_s: monotonic.
    """
    found, candidate = worth_it(allocation), state.candidate
    if found is not None and candidate is not None and _move(found) == _move(candidate):
        state = msgspec.structs.replace(state, candidate=found, seen_s=at_s)
    elif candidate is None or _moved(candidate, allocation) or at_s - state.seen_s > GRACE_S:
        state = AdviceState(candidate=found, since_s=at_s, seen_s=at_s)
    if state.candidate is None:
        return state
    held_s = state.seen_s - state.since_s
    given = msgspec.structs.replace(state.candidate, held_s=held_s) if held_s >= HOLD_S else None
    return msgspec.structs.replace(state, given=given)


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
