"""In which load regime the system is: below the knee, in transition, or saturated.

Owns: the moving average of TTFT P99 against its baseline, thresholds with hysteresis, confirmation, dwell;
      how TTFT and the pools' own evidence are weighed; what is asked for before a regime is left downwards.
Does not own: how TTFT is measured (ttft.py), the pools' evidence (pressure.py), the load a regime was needed
              at (need.py), what follows from a regime (policies/).
Invariant: pure; one step at a time, never two within the dwell but for the one named below; without data the
           regime stays, without traffic it returns to `below`.
Source: arXiv 2606.17081, section 5 (EWMA of TTFT P99 against two thresholds); the rest from cases D1, S4, S8,
        I8(c).

What the workers say of themselves weighs more than TTFT. A pool that is pressed takes the regime up without
TTFT's confirmation and keeps it up. From transition to saturated it does so without the dwell when the step
before was up too: the dwell is against limit cycles, and those need a step down. Once all workers are known,
TTFT alone ends `below` and no more, for `saturated` is a word on capacity (a single hot worker makes a bad
P99, too); and it is told as `upstream` when they are idle besides.

Two asymmetries carry the rules. A bad P99 proves little, because one hiccup stays in the window for all of
it: upwards the value must outlast the window (`confirm_s` > `window_s`). A good P99 is a whole window of good
requests, but may be the parameters' own doing: downwards we ask whether the *load* fell, and otherwise only
probe, ever more rarely, so that the cure is not taken for the end of the disease.

Settling time by TTFT: a lasting change of load is answered within window_s + confirm_s + 3 half_life_s
upwards and window_s + 3 half_life_s downwards, 10 s and 6 s at the defaults, and dwell_s later for a second
step. By the pools' evidence: upwards as soon as chance is ruled out, downwards when the queue is gone.
"""

import math

import msgspec

from dynamo_poa.baseline import READINGS, Baseline, learned
from dynamo_poa.config import RegimeConfig
from dynamo_poa.demand import compare, fell
from dynamo_poa.need import note_need, note_pressed, stepping_down, stepping_up
from dynamo_poa.pressure import strongest
from dynamo_poa.regime_state import (
    REFUSALS,
    SHED_LIMIT,
    TTFT,
    UPSTREAM,
    RegimeSignal,
    RegimeState,
    Verdict,
    driver_of,
    thresholds_s,
)
from dynamo_poa.values import REGIMES, Applied, PoolRegime, Regime

BASELINE_READINGS = READINGS
DOUBT = 3.0  # times confirm_s


def next_regime(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig
) -> tuple[RegimeState, Verdict]:
    """Pick the regime from here on, moving at most one step.

        up    when P99 >= θ for confirm_s and average >= θ              (θ1 from below, θ2 from transition)
              unless all workers are known and idle, or known and no pool is saturated (θ2)
        up    when a pool is in a higher regime
        none  down while a pool is in this regime
        down  when the pools that led here are released and the load fell, or all of them are idle
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
    state, rise = _rise(state, signal, limits, dwell_left_s, ready=ready)
    pool, level = strongest(signal.pools.values()), state.regime.level
    if pool is not None and pool.regime.level >= level:
        state = note_pressed(state, signal, pool)
    if pool is not None and pool.regime.level > level:
        # The dwell is against limit cycles, which need a step down: a second step up need not wait for it.
        at_once = pool.regime is Regime.SATURATED and level == 1 and state.rose
        return _move(state, signal, limits, _of_pool(pool, 0.0 if at_once else dwell_left_s), up=True)
    if rise is not None and rise.hold is Applied.APPLIED:
        return _move(state, signal, limits, msgspec.structs.replace(rise, hold=Applied.UNCHANGED), up=True)
    if pool is not None and pool.regime.level == level:
        return state, _of_pool(pool, dwell_left_s)
    if _is_released(state, signal):
        loads = "all workers idle" if signal.idle else compare(state.needed[level - 1], signal.load)
        reason = f"{state.driver} is released: {loads}"
        return _move(state, signal, limits, Verdict(reason=reason, dwell_left_s=dwell_left_s), up=False)
    if rise is not None:
        return state, rise
    theta_s = thresholds_s(state.baseline_s, limits)
    if not ready or theta_s is None:
        shedding = signal.shed_frac > SHED_LIMIT
        return _too_little(state, signal, limits, dwell_left_s, shedding=shedding)
    if level == 0:
        reason = f"TTFT P99 {_show(state.average_s)} under θ1 {_show(theta_s[0])}"
        return state, Verdict(
            reason=reason, value_s=state.average_s, threshold_s=theta_s[0], dwell_left_s=dwell_left_s
        )
    return _down(state, signal, limits, theta_s[level - 1], dwell_left_s)


def _rise(
    state: RegimeState, signal: RegimeSignal, limits: RegimeConfig, dwell_left_s: float, *, ready: bool
) -> tuple[RegimeState, Verdict | None]:
    """Tell whether TTFT or refusals ask for the next regime.

    Returns:  None while they do not; a verdict with `hold` APPLIED when they do, UNCHANGED when what the
              workers say of themselves speaks against it.
    """
    theta_s = thresholds_s(state.baseline_s, limits)
    level, value_s = state.regime.level, state.average_s
    if theta_s is not None and ready and level < 2:
        threshold_s: float | None = theta_s[level]
        over = signal.p99_s is not None and signal.p99_s >= theta_s[level]
        average_over = value_s is not None and value_s >= theta_s[level]
    else:
        threshold_s, over, average_over = None, False, False
    refusing = level == 0 and signal.shed_frac > SHED_LIMIT
    # A slow system gives few first tokens: a gap in the samples neither confirms nor refutes, if it is short.
    gap = not ready and not refusing and signal.at_s - state.averaged_at_s <= limits.window_s
    over_since_s = state.over_since_s if gap else _since(state.over_since_s, over or refusing, signal.at_s)
    state = msgspec.structs.replace(state, over_since_s=over_since_s)
    if not (average_over or refusing):
        return state, None
    verdict = Verdict(
        hold=Applied.APPLIED,
        reason=f"TTFT P99 {_show(value_s)} at or over θ{level + 1} {_show(threshold_s)}",
        value_s=value_s,
        threshold_s=threshold_s,
        dwell_left_s=dwell_left_s,
        driver=TTFT,
        value=value_s,
        threshold=threshold_s,
    )
    contradicted = "workers are idle: upstream of them" if signal.idle else ""
    if not contradicted and level == 1 and signal.known and signal.pressed < 2:
        contradicted = "all workers are known and no pool is saturated"
    if average_over and contradicted and not refusing:
        state = msgspec.structs.replace(state, over_since_s=None)
        return state, msgspec.structs.replace(
            verdict,
            hold=Applied.UNCHANGED,
            reason=f"{verdict.reason}, but {contradicted}",
            bottleneck=UPSTREAM if signal.idle else "",
        )
    # Workers that are all known and not pressed do not deny a bad TTFT, but make chance the likelier reason.
    confirm_s = limits.confirm_s * (DOUBT if signal.known and not refusing else 1.0)
    if over_since_s is None or signal.at_s - over_since_s < confirm_s:
        return state, None
    if not average_over or contradicted:
        return state, msgspec.structs.replace(
            verdict, reason=_refusing(signal), driver=REFUSALS, value=signal.shed_frac, threshold=SHED_LIMIT
        )
    if signal.corroborated:
        verdict = msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {signal.corroborated}")
    return state, verdict


def _of_pool(pool: PoolRegime, dwell_left_s: float) -> Verdict:
    return Verdict(
        reason=f"{pool.role}: {pool.reason}",
        dwell_left_s=dwell_left_s,
        driver=driver_of(pool),
        value=pool.value,
        threshold=pool.threshold,
    )


def _is_released(state: RegimeState, signal: RegimeSignal) -> bool:
    """Tell whether the pool that led here is known to be past it, and not by the parameters' doing."""
    role = state.driver.partition(".")[0]
    pool = next((pool for pool in signal.pools.values() if pool.role == role), None)
    if state.regime is Regime.BELOW or pool is None or not pool.known:
        return False
    if state.regime is Regime.TRANSITION and signal.shed_frac > SHED_LIMIT:
        return False
    return signal.idle or state.less_since_s is not None


def _observe(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> tuple[RegimeState, bool]:
    """Take the tick's data in; tell whether its TTFT may be judged."""
    at_s, load = signal.at_s, signal.load
    changes: dict[str, object] = {}
    if state.watched_since_s is None:
        changes["watched_since_s"] = at_s
        if state.regime.level > 0:  # taken over from a predecessor: the dwell starts now
            changes["changed_at_s"] = changes["needed_at_s"] = at_s
    if load.in_flight or load.arrival_rate or signal.fresh or signal.pressed:
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
        if state.regime is Regime.BELOW and not signal.pressed:
            elapsed_s = at_s - state.averaged_at_s if state.average_s is not None else 0.0
            before = Baseline(value_s=state.baseline_s, steady_s=state.steady_s, readings_s=state.readings_s)
            baseline = learned(before, signal.p99_s, average_s, elapsed_s, calm=signal.idle)
            state = msgspec.structs.replace(
                state,
                baseline_s=baseline.value_s,
                steady_s=baseline.steady_s,
                readings_s=baseline.readings_s,
            )
        state = msgspec.structs.replace(state, average_s=average_s, averaged_at_s=at_s)
    return note_need(state, signal, limits), True


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
        return Verdict(
            reason=reason,
            value_s=value_s,
            threshold_s=exit_s,
            dwell_left_s=dwell_left_s,
            driver=TTFT,
            value=value_s,
            threshold=exit_s,
        )

    if signal.shed_frac > SHED_LIMIT and level == 1:
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
    state = stepping_up(state, signal, limits) if up else stepping_down(state, signal)
    regime = REGIMES[state.regime.level + (1 if up else -1)]
    driver = verdict.driver if up else state.driver
    state = msgspec.structs.replace(
        state,
        regime=regime,
        changed_at_s=signal.at_s,
        changes=state.changes + 1,
        needed_at_s=signal.at_s,
        over_since_s=None,
        less_since_s=None,
        rose=up,
        driver="" if regime is Regime.BELOW else driver,
    )
    return state, msgspec.structs.replace(verdict, dwell_left_s=limits.dwell_s)


def _dwell_left_s(state: RegimeState, signal: RegimeSignal, limits: RegimeConfig) -> float:
    if state.changed_at_s is None:
        return 0.0
    return max(state.changed_at_s + limits.dwell_s - signal.at_s, 0.0)


def _less_for_s(state: RegimeState, signal: RegimeSignal) -> float:
    return 0.0 if state.less_since_s is None else signal.at_s - state.less_since_s


def _refusing(signal: RegimeSignal) -> str:
    return f"{signal.shed_frac:.1%} of requests refused, more than {SHED_LIMIT:.0%}"


def _since(since_s: float | None, holds: bool, at_s: float) -> float | None:
    """Return since when something has held, None when it does not."""
    if not holds:
        return None
    return at_s if since_s is None else since_s


def _show(value_s: float | None) -> str:
    return "unknown" if value_s is None else f"{value_s:.3f} s"
