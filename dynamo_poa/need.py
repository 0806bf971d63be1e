"""At which load a regime was needed, and whether letting it go has proved too early.

Owns: the load remembered for each regime, what a relapse makes of it.
Does not own: when a regime is left (regime.py), how loads are compared (demand.py).
Invariant: pure; after a relapse nothing raises the load that was needed.
Source: cases D1(b), S4.
"""

import msgspec

from dynamo_poa.config import RegimeConfig
from dynamo_poa.demand import Load, rose
from dynamo_poa.regime_state import RegimeSignal, RegimeState, driver_of, thresholds_s
from dynamo_poa.values import REGIMES, PoolRegime, Regime

RELAPSE_DWELLS = 10  # needed again this soon after it was let go, without more load: let go too early


def note_need(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> RegimeState:
    """Return the state with the load at which, and the instant when, its regime was still needed.

    A ramp that goes on after the step up raises it; after a relapse nothing does, because the load in flight
    is then swollen by the step down that failed. A regime taken over is held against the load found.
    """
    level, theta_s, load = state.regime.level, thresholds_s(state.baseline_s, limits), signal.load
    if level == 0:
        return state
    if theta_s is not None and state.average_s is not None and state.average_s >= theta_s[level - 1]:
        state = msgspec.structs.replace(state, needed_at_s=signal.at_s)
    if load.in_flight is None:
        return state
    needed = state.needed[level - 1]
    grew = needed is not None and load.in_flight > (needed.in_flight or 0)
    if needed is None:
        found = tuple(load if at <= level and was is None else was for at, was in enumerate(state.needed, 1))
        return msgspec.structs.replace(state, needed=found)
    if grew and state.needed_at_s == signal.at_s and state.probe_s is None:
        return _with_needed(state, level, load)
    return state


def note_pressed(state: RegimeState, signal: RegimeSignal, pool: PoolRegime) -> RegimeState:
    """Return the state with its driver, and the load at which its regime and those under it are needed.

    Below the knee there is none yet: the dwell may still keep the pool's pressure from moving the regime.
    """
    driver = "" if state.regime is Regime.BELOW else driver_of(pool)
    state = msgspec.structs.replace(state, needed_at_s=signal.at_s, driver=driver)
    for level in range(1, state.regime.level + 1):
        needed = state.needed[level - 1]
        grew = needed is None or (signal.load.in_flight or 0) > (needed.in_flight or 0)
        if grew and state.probe_s is None:
            state = _with_needed(state, level, signal.load)
    return state


def stepping_up(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> RegimeState:
    """Note the load at which the higher regime is needed.

    After a relapse that is the load at which it was wrongly let go: only less is evidence next time.
    """
    target, load, let_go = REGIMES[state.regime.level + 1], signal.load, state.let_go
    soon = signal.at_s - state.let_go_at_s <= RELAPSE_DWELLS * max(limits.dwell_s, limits.confirm_s)
    if (
        let_go is None
        or target is not state.let_go_from
        or not soon
        or rose(let_go, load, limits.release_frac)
    ):
        return msgspec.structs.replace(_with_needed(state, target.level, load), probe_s=None)
    known = [count for count in (load.in_flight, let_go.in_flight) if count is not None]
    least = Load(min(known, default=None), let_go.arrival_rate)
    probe_s = min(2 * (state.probe_s or limits.probe_s), 86_400.0)
    return msgspec.structs.replace(_with_needed(state, target.level, least), probe_s=probe_s)


def stepping_down(state: RegimeState, signal: RegimeSignal) -> RegimeState:
    """Note the load at which a regime is let go."""
    return msgspec.structs.replace(
        state, let_go=signal.load, let_go_from=state.regime, let_go_at_s=signal.at_s
    )


def _with_needed(state: RegimeState, level: int, load: Load) -> RegimeState:
    needed = (load, state.needed[1]) if level == 1 else (state.needed[0], load)
    return msgspec.structs.replace(state, needed=needed)
