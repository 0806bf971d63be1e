"""In which load regime the system is: below the knee, in transition, or saturated.

Owns: the moving average of TTFT P99, the learned baseline, thresholds with hysteresis, confirmation, dwell,
      and the evidence asked for before a regime is left downwards.
Does not own: how TTFT is measured (ttft.py) or what follows from a regime (policies/).
Invariant: pure; one step at a time, never two within the dwell; without data the regime stays, without
           traffic it returns to `below`.
Source: arXiv 2606.17081, section 5 (EWMA of TTFT P99 against two thresholds); the rest from cases D1, S4, S8.

Two asymmetries carry the rules. A bad P99 proves little, because one hiccup stays in the window for all of
it: upwards the value must outlast the window (`confirm_s` > `window_s`). A good P99 is a whole window of good
requests, but may be the parameters' own doing: downwards we ask whether the *load* fell, and otherwise only
probe, ever more rarely, so that the cure is not taken for the end of the disease.

Settling time: a lasting change of load is answered within window_s + confirm_s + 3 half_life_s upwards and
window_s + 3 half_life_s downwards, 10 s and 6 s at the defaults, and dwell_s later for a second step.
"""

import math
import statistics

import msgspec

from dynamo_poa.config import RegimeConfig
from dynamo_poa.demand import Load, compare, fell, rose
from dynamo_poa.values import REGIMES, Applied, Regime

BASELINE_READINGS = 10  # fresh windows whose median is the first baseline
BASELINE_DOWN_HALF_LIFE_S = 10.0  # a start under load must not pass for normal for long
BASELINE_UP_HALF_LIFE_S = 600.0  # longer than any ramp that should be noticed
BASELINE_UP_LIMIT = 1.5  # above this share of the baseline it is load, not drift
SHED_LIMIT = 0.01  # S8: with more than 1 % refused, TTFT of the survivors proves nothing
RELAPSE_DWELLS = 10  # needed again this soon after it was let go, without more load: let go too early


class RegimeSignal(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick knows. `fresh`: the TTFT window has changed since the tick before."""

    at_s: float
    p99_s: float | None = None
    samples: int = 0
    fresh: bool = False
    load: Load = Load()
    shed_frac: float = 0.0
    workers: int | None = None


class RegimeState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick. All instants are monotonic.

    average_s:     geometric moving average of TTFT P99
    over_since_s:  since when the raw value has been over the next threshold
    less_since_s:  since when the load has been evidently less than it was needed at
    needed:        for transition and saturated, the load at which it was needed
    needed_at_s:   when the average was last over the threshold that leads to the regime
    let_go:        the load when a regime was last left downwards, and which and when
    probe_s:       doubled by relapses; None is the configured one
    readings_s:    P99 readings until there are enough for a first baseline
    """

    regime: Regime = Regime.BELOW
    changed_at_s: float | None = None
    changes: int = 0
    baseline_s: float | None = None
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why the regime is what it is. `hold` is UNCHANGED, HELD_DWELL or HELD_NOT_READY.

    value_s, threshold_s:  what was compared, None when nothing was
    dwell_left_s:          until the next change is allowed
    """

    hold: Applied = Applied.UNCHANGED
    reason: str
    value_s: float | None = None
    threshold_s: float | None = None
    dwell_left_s: float = 0.0


def thresholds_s(baseline_s: float | None, limits: RegimeConfig) -> tuple[float, float] | None:
    """Return θ1 and θ2 in seconds, None while they count a baseline that is not known."""
    if limits.unit == "seconds":
        return limits.theta1, limits.theta2
    baseline_s = limits.baseline_s or baseline_s
    return None if baseline_s is None else (limits.theta1 * baseline_s, limits.theta2 * baseline_s)


def next_regime(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig
) -> tuple[RegimeState, Verdict]:
    """Pick the regime from here on, moving at most one step.

        up    when P99 >= θ for confirm_s and average >= θ              (θ1 from below, θ2 from transition)
        down  when P99 and average < θ and the load fell                 (θ: the one that led here)
        down  when P99 and average < exit_frac * θ and nothing needed it for probe_s
        down  when idle for idle_s, or when too few samples come to judge and the load fell for idle_s
        down  when the load fell for probe_s, whatever P99: the parameters may be what keeps it up

    More than 1 % refused requests count as over θ1, whatever the survivors' TTFT.
    """
    state, ready = _observe(state, signal, limits)
    dwell_left_s = _dwell_left_s(state, signal, limits)
    if _is_idle(state, signal, limits):
        return _idle(state, signal, limits, dwell_left_s)

    theta_s = thresholds_s(state.baseline_s, limits)
    level, value_s, shedding = state.regime.level, state.average_s, signal.shed_frac > SHED_LIMIT
    if theta_s is not None and ready and level < 2:
        threshold_s: float | None = theta_s[level]
        over = signal.p99_s is not None and signal.p99_s >= theta_s[level]
        average_over = value_s is not None and value_s >= theta_s[level]
    else:
        threshold_s, over, average_over = None, False, False
    refusing = level == 0 and shedding
    # A slow system gives few first tokens: a gap in the samples neither confirms nor refutes, if it is short.
    gap = not ready and not refusing and signal.at_s - state.averaged_at_s <= limits.window_s
    over_since_s = state.over_since_s if gap else _since(state.over_since_s, over or refusing, signal.at_s)
    state = msgspec.structs.replace(state, over_since_s=over_since_s)
    confirmed = over_since_s is not None and signal.at_s - over_since_s >= limits.confirm_s
    if confirmed and (average_over or refusing):
        over_theta = f"TTFT P99 {_show(value_s)} at or over θ{level + 1} {_show(threshold_s)}"
        reason = over_theta if average_over else _refusing(signal)
        verdict = Verdict(reason=reason, value_s=value_s, threshold_s=threshold_s, dwell_left_s=dwell_left_s)
        return _move(state, signal, limits, verdict, up=True)
    if not ready or theta_s is None:
        return _too_little(state, signal, limits, dwell_left_s, shedding=shedding)
    if level == 0:
        reason = f"TTFT P99 {_show(value_s)} under θ1 {_show(threshold_s)}"
        return state, Verdict(
            reason=reason, value_s=value_s, threshold_s=threshold_s, dwell_left_s=dwell_left_s
        )
    return _down(state, signal, limits, theta_s[level - 1], dwell_left_s, shedding=shedding)


def _observe(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> tuple[RegimeState, bool]:
    """Take the tick's data in; tell whether its TTFT may be judged."""
    at_s, load = signal.at_s, signal.load
    changes: dict[str, object] = {}
    if state.watched_since_s is None:
        changes["watched_since_s"] = at_s
        if state.regime.level > 0:  # taken over from a predecessor: the dwell starts now
            changes["changed_at_s"] = changes["needed_at_s"] = at_s
    if load.in_flight or load.arrival_rate or signal.fresh:
        changes["busy_at_s"] = at_s
    needed = state.needed[state.regime.level - 1] if state.regime.level else None
    less = needed is not None and fell(needed, load, limits.release_frac)
    state = msgspec.structs.replace(state, less_since_s=_since(state.less_since_s, less, at_s), **changes)
    if signal.p99_s is None or signal.samples < limits.min_samples:
        return state, False
    if signal.fresh or state.average_s is None:
        log_value = math.log(max(signal.p99_s, 1e-6))
        if state.average_s is None:
            log_average = log_value
        else:
            weight = 1 - 0.5 ** ((at_s - state.averaged_at_s) / limits.half_life_s)
            log_average = math.log(state.average_s) + weight * (log_value - math.log(state.average_s))
        average_s = math.exp(log_average)
        if state.regime is Regime.BELOW:
            elapsed_s = at_s - state.averaged_at_s if state.average_s is not None else 0.0
            state = _learn_baseline(state, signal.p99_s, average_s, elapsed_s)
        state = msgspec.structs.replace(state, average_s=average_s, averaged_at_s=at_s)
    return _note_need(state, signal, limits), True


def _learn_baseline(state: RegimeState, p99_s: float, average_s: float, elapsed_s: float) -> RegimeState:
    """Return the state with its baseline learned a little further; called in `below` only."""
    if state.baseline_s is None:
        readings_s = (*state.readings_s, p99_s)
        if len(readings_s) < BASELINE_READINGS:
            return msgspec.structs.replace(state, readings_s=readings_s)
        return msgspec.structs.replace(state, readings_s=(), baseline_s=statistics.median(readings_s))
    ratio = average_s / state.baseline_s
    if ratio > BASELINE_UP_LIMIT:
        return state
    half_life_s = BASELINE_DOWN_HALF_LIFE_S if ratio < 1 else BASELINE_UP_HALF_LIFE_S
    weight = 1 - 0.5 ** (elapsed_s / half_life_s)
    return msgspec.structs.replace(state, baseline_s=state.baseline_s * ratio**weight)


def _note_need(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> RegimeState:
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


def unseen(state: RegimeState, at_s: float) -> RegimeState:
    """Return the state after a tick without eyes: nothing goes on being confirmed, and nothing is idle."""
    return msgspec.structs.replace(state, over_since_s=None, less_since_s=None, busy_at_s=at_s)


def _is_idle(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> bool:
    since_s = state.busy_at_s if state.busy_at_s is not None else state.watched_since_s
    return since_s is not None and signal.at_s - since_s >= limits.idle_s


def _idle(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig, dwell_left_s: float
) -> tuple[RegimeState, Verdict]:
    """Forget what the last requests were like and step down to `below`."""
    state = msgspec.structs.replace(state, average_s=None, over_since_s=None, less_since_s=None, probe_s=None)
    if signal.workers == 0:
        reason = "no worker and no traffic"
    elif state.busy_at_s is None:
        reason = "no traffic yet"
    else:
        reason = f"idle: no request for {signal.at_s - state.busy_at_s:.1f} s"
    verdict = Verdict(reason=reason, dwell_left_s=dwell_left_s)
    if state.regime is Regime.BELOW:
        return state, verdict
    return _move(state, signal, limits, verdict, up=False)


def _too_little(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig, dwell_left_s: float, *, shedding: bool
) -> tuple[RegimeState, Verdict]:
    """Hold, unless so little is asked of the system that TTFT cannot be judged any more."""
    if not shedding and _less_for_s(state, signal) >= limits.idle_s:
        loads = compare(state.needed[state.regime.level - 1], signal.load)
        reason = f"{signal.samples} TTFT samples, too few to judge, and the load fell: {loads}"
        return _move(state, signal, limits, Verdict(reason=reason, dwell_left_s=dwell_left_s), up=False)
    if signal.p99_s is None:
        reason = "no TTFT yet" if state.average_s is None else f"no TTFT in the last {limits.window_s:g} s"
    elif signal.samples < limits.min_samples:
        reason = f"{signal.samples} TTFT samples, {limits.min_samples} needed"
    else:
        reason = f"learning the baseline: {len(state.readings_s)} of {BASELINE_READINGS} readings"
    return state, Verdict(hold=Applied.HELD_NOT_READY, reason=reason, dwell_left_s=dwell_left_s)


def _down(
    state: RegimeState,
    signal: RegimeSignal,
    limits: RegimeConfig,
    theta_s: float,
    dwell_left_s: float,
    *,
    shedding: bool,
) -> tuple[RegimeState, Verdict]:
    """Leave the regime downwards when TTFT is good and not by our own doing, or bad and perhaps by it."""
    level, value_s = state.regime.level, state.average_s
    needed = state.needed[level - 1]
    less = state.less_since_s is not None
    # Less load keeps the regimes apart by itself; without it the thresholds must.
    exit_s = theta_s if less else limits.exit_frac * theta_s
    probe_s = state.probe_s or limits.probe_s
    loads = compare(needed, signal.load)

    def because(reason: str) -> Verdict:
        return Verdict(reason=reason, value_s=value_s, threshold_s=exit_s, dwell_left_s=dwell_left_s)

    if shedding and level == 1:
        return state, because(_refusing(signal))
    if signal.p99_s is None or value_s is None or max(signal.p99_s, value_s) >= exit_s:
        not_under = f"TTFT P99 {_show(value_s)} not under {_show(exit_s)}"
        if _less_for_s(state, signal) < probe_s:
            return state, because(not_under)
        return _move(state, signal, limits, because(f"{not_under}, probing, less load: {loads}"), up=False)
    under = f"TTFT P99 {_show(value_s)} under {_show(exit_s)}"
    if less:
        return _move(state, signal, limits, because(f"{under} and the load fell: {loads}"), up=False)
    probe_in_s = state.needed_at_s + probe_s - signal.at_s
    if probe_in_s > 0:
        return state, because(f"{under}, but the load did not fall: {loads}; probe in {probe_in_s:.0f} s")
    return _move(state, signal, limits, because(f"{under}, probing: {loads}"), up=False)


def _move(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig, verdict: Verdict, *, up: bool
) -> tuple[RegimeState, Verdict]:
    """Take one step, unless the dwell holds it back."""
    if verdict.dwell_left_s > 0:
        return state, msgspec.structs.replace(verdict, hold=Applied.HELD_DWELL)
    state = _stepping_up(state, signal, limits) if up else _stepping_down(state, signal)
    state = msgspec.structs.replace(
        state,
        regime=REGIMES[state.regime.level + (1 if up else -1)],
        changed_at_s=signal.at_s,
        changes=state.changes + 1,
        needed_at_s=signal.at_s,
        over_since_s=None,
        less_since_s=None,
    )
    return state, msgspec.structs.replace(verdict, dwell_left_s=limits.dwell_s)


def _stepping_up(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> RegimeState:
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


def _stepping_down(state: RegimeState, signal: RegimeSignal) -> RegimeState:
    return msgspec.structs.replace(
        state, let_go=signal.load, let_go_from=state.regime, let_go_at_s=signal.at_s
    )


def _with_needed(state: RegimeState, level: int, load: Load) -> RegimeState:
    needed = (load, state.needed[1]) if level == 1 else (state.needed[0], load)
    return msgspec.structs.replace(state, needed=needed)


def _dwell_left_s(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> float:
    if state.changed_at_s is None:
        return 0.0
    return max(state.changed_at_s + limits.dwell_s - signal.at_s, 0.0)


def _since(since_s: float | None, holds: bool, at_s: float) -> float | None:
    """Return since when something has held, None when it does not."""
    if not holds:
        return None
    return at_s if since_s is None else since_s


def _less_for_s(state: RegimeState, signal: RegimeSignal) -> float:
    return 0.0 if state.less_since_s is None else signal.at_s - state.less_since_s


def _refusing(signal: RegimeSignal) -> str:
    return f"{signal.shed_frac:.1%} of requests refused, more than {SHED_LIMIT:.0%}"


def _show(value_s: float | None) -> str:
    return "unknown" if value_s is None else f"{value_s:.3f} s"
