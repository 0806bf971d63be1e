"""What a tick tells: the events of its changes, and its record.

Owns: turning a decided tick into events and the canonical record.
Does not own: the decision (controller.py) or where what is told goes (telemetry.py).
Invariant: pure; a change is told once, what is held back once for each wish and reason.
"""

from collections.abc import Iterable

import msgspec

from dynamo_poa import telemetry
from dynamo_poa.coupling import Advice, Coupling
from dynamo_poa.hot import HotChange
from dynamo_poa.policies import Answer, Policy
from dynamo_poa.policies.running import PolicyRun
from dynamo_poa.regime_state import SHED_LIMIT, Verdict, thresholds_s
from dynamo_poa.telemetry import PolicyView, TelemetryRecord
from dynamo_poa.tick import Choice, ControllerState, Event, Observation, Settings, Watched
from dynamo_poa.values import Applied, Regime, RouterParams, Setting


def regime_event(before: Regime, state: ControllerState, verdict: Verdict, settings: Settings) -> Event:
    """Say why the regime changed: value, threshold and dwell."""
    return Event(
        name=telemetry.REGIME_CHANGED,
        before={"regime": before},
        after={"regime": state.regime.regime},
        reason=verdict.reason,
        details={
            "driver": verdict.driver,
            "value": verdict.value,
            "threshold": verdict.threshold,
            "value_s": verdict.value_s,
            "threshold_s": verdict.threshold_s,
            "dwell_left_s": verdict.dwell_left_s,
            "mode": settings.config.mode,
        },
    )


def hot_events(changes: Iterable[HotChange]) -> list[Event]:
    """Say which worker has become hot, or is no longer, and why."""
    return [
        Event(
            name=telemetry.WORKER_OVERLOADED if change.overloaded else telemetry.WORKER_CLEARED,
            before={"overloaded": not change.overloaded},
            after={"overloaded": change.overloaded},
            reason=change.reason,
            details={
                "worker_id": str(change.key.worker_id),
                "dp_rank": change.key.dp_rank,
                "role": change.role,
                "resource": change.resource,
                "value": change.value,
                "threshold": change.threshold,
            },
        )
        for change in changes
    ]


def params_event(
    state: ControllerState,
    current: RouterParams | None,
    publish: RouterParams | None,
    choice: Choice,
    wanted: Choice,
    applied: Applied,
) -> tuple[ControllerState, list[Event]]:
    """Say what was applied, and once what was held back and why."""
    before = {} if current is None else _named(current.setting)
    if publish is not None:
        details = {"revision": publish.revision, "kind": publish.kind, "regime": publish.regime}
        event = Event(
            name=telemetry.PARAMS_APPLIED,
            before=before,
            after=_named(choice.setting),
            reason=choice.reason,
            details=details,
        )
        return msgspec.structs.replace(state, last_held=None), [event]
    held = (applied, wanted.setting) if before and choice.setting != wanted.setting else None
    if held == state.last_held:
        return state, []
    state = msgspec.structs.replace(state, last_held=held)
    if held is None:
        return state, []
    event = Event(
        name=telemetry.PARAMS_HELD,
        before=before,
        after=_named(wanted.setting),
        reason=choice.reason,
        details={"outcome": applied},
    )
    return state, [event]


def _named(setting: Setting) -> dict[str, object]:
    return msgspec.structs.asdict(setting)


def policy_events(before: ControllerState, now: ControllerState, settings: Settings) -> list[Event]:
    """Say that a policy has failed, and that it is asked again."""
    events: list[Event] = []
    for policy, was, run in (
        (settings.policy, before.policy, now.policy),
        (settings.shadow, before.shadow_policy, now.shadow_policy),
    ):
        was_asked, is_asked = was.disabled_until_s is None, run.disabled_until_s is None
        failed = run.errors > was.errors
        if policy is None or not (failed or was_asked != is_asked):
            continue
        events.append(
            Event(
                name=telemetry.POLICY_FAILED if failed else telemetry.POLICY_RESUMED,
                before={"asked": was_asked},
                after={"asked": is_asked},
                reason=run.error if failed else f"{settings.config.policy.cooldown_s:g} s have passed",
                details={"policy": policy.name, "errors": run.errors},
            )
        )
    return events


def advice_event(before: Advice | None, seen: Observation) -> list[Event]:
    """Say that operators are advised to move workers, or no longer, once for each change of split."""
    now, present = seen.advice, seen.allocation.now
    was, becomes = _advised(before), _advised(now)
    if was == becomes:
        return []
    details: dict[str, object] = {"split": None if present is None else str(present.split)}
    if now is None:
        reason = seen.allocation.reason or "no other split is better beyond noise, or workers were moved"
    else:
        reason = str(now)
        details |= {name: getattr(now, name) for name in ("gain_frac", "gain_low", "gain_high", "held_s")}
    return [
        Event(
            name=telemetry.ADVICE_WITHDRAWN if now is None else telemetry.ADVICE_GIVEN,
            before={"advised": was},
            after={"advised": becomes},
            reason=reason,
            details=details,
        )
    ]


def _advised(advice: Advice | None) -> str | None:
    return None if advice is None else str(advice.then.split)


def _told(
    policy: Policy, run: PolicyRun, answer: Answer, seen: Observation, in_force: RouterParams
) -> PolicyView:
    """Return what is told of a policy and its answer.

    predicted_gain_frac = 1 - predicted cost of its answer / that of what is in force
    """
    priced = [seen.predicted.get(setting) for setting in (answer.setting, in_force.setting)]
    gain_frac = 1 - priced[0] / priced[1] if priced[0] is not None and priced[1] else None
    left_s = None if run.disabled_until_s is None else run.disabled_until_s - seen.monotonic_s
    return PolicyView(
        name=policy.name,
        setting=answer.setting,
        reason=answer.reason,
        detail=answer.detail,
        predicted_gain_frac=gain_frac,
        disabled_left_s=left_s,
        errors=run.errors,
    )


def explained(reason: str, regime: Regime, coupling: Coupling) -> str:
    """Return a reason with what no policy can change: under load, when capacity is where the cost is from."""
    if regime is Regime.BELOW or coupling.dominant != "capacity":
        return reason
    return f"{reason}; capacity dominates: {coupling.remedy}"


def telemetry_record(
    state: ControllerState,
    seen: Observation,
    settings: Settings,
    verdict: Verdict,
    in_force: RouterParams,
    wanted: Choice,
    applied: Applied,
    watched: Watched,
) -> TelemetryRecord:
    """Return the tick's canonical record."""
    regime, pin, iteration = state.regime, state.pin, state.pressure.iteration
    iteration_s = {
        str(role): reading.iteration_s
        for role, reading in watched.readings.items()
        if reading.iteration_s is not None
    }
    policy = shadow = None
    if watched.answer is not None:
        policy = _told(settings.policy, state.policy, watched.answer, seen, in_force)
    if watched.shadow is not None and settings.shadow is not None:
        shadow = _told(settings.shadow, state.shadow_policy, watched.shadow, seen, in_force)
    theta_s = thresholds_s(regime.baseline_s, settings.config.regime)
    return TelemetryRecord(
        tick=state.tick,
        at_s=seen.wall_s,
        namespace=settings.namespace,
        mode=settings.config.mode,
        regime=regime.regime,
        reason=explained(verdict.reason, regime.regime, watched.coupling),
        applied=applied,
        router_temperature=in_force.router_temperature,
        overlap_weight=in_force.overlap_weight,
        revision=in_force.revision,
        kind=in_force.kind,
        prefill_load_scale=in_force.prefill_load_scale,
        selection=in_force.selection,
        wanted_router_temperature=wanted.setting.router_temperature,
        wanted_overlap_weight=wanted.setting.overlap_weight,
        wanted_prefill_load_scale=wanted.setting.prefill_load_scale,
        wanted_selection=wanted.setting.selection,
        policy=policy,
        shadow=shadow,
        dwell_left_s=verdict.dwell_left_s,
        pin_left_s=None if pin is None or pin.until_s is None else pin.until_s - seen.monotonic_s,
        poa_hat=seen.estimate.poa_hat,
        poa_low=seen.estimate.low,
        poa_high=seen.estimate.high,
        poa_shares=seen.estimate.shares,
        poa_by_role=seen.estimate.by_role,
        poa_legs=seen.estimate.legs,
        poa_samples=seen.estimate.samples,
        poa_method=seen.estimate.method,
        poa_reason=seen.estimate.reason,
        poa_frozen=seen.frozen.poa_hat,
        poa_frozen_by_role=seen.frozen.by_role,
        coupling=watched.coupling,
        caching=seen.caching,
        allocation=seen.allocation,
        cache_swap=seen.cache_swap,
        poa_advice=seen.advice,
        stragglers=tuple(latency for latency in seen.latencies.values() if latency.straggler),
        ttft_p50_s=seen.ttft.p50_s,
        ttft_p99_s=seen.ttft.p99_s,
        ttft_samples=seen.ttft.samples,
        ttft_source=seen.ttft.source,
        ttft_average_s=regime.average_s,
        baseline_s=settings.config.regime.baseline_s or regime.baseline_s,
        theta1_s=theta_s and theta_s[0],
        theta2_s=theta_s and theta_s[1],
        in_flight=seen.traffic.in_flight,
        arrival_rate=seen.traffic.arrival_rate,
        shed_frac=seen.traffic.shed_frac,
        censored=seen.traffic.shed_frac > SHED_LIMIT,
        cache_signal=seen.cache.signal,
        cache_hit_frac=seen.cache.hit_frac,
        pools={str(role): pool for role, pool in seen.pools.items()},
        pool_regimes={str(role): pool for role, pool in watched.pools.items()},
        driver=regime.driver,
        bottleneck=verdict.bottleneck or regime.driver.partition(".")[0] * ("." in regime.driver),
        poa_slope=watched.trend.poa_slope,
        curvature=watched.trend.curvature,
        iteration_s=iteration_s,
        iteration_baseline_s=dict.fromkeys(iteration_s, iteration.value_s) if iteration.value_s else {},
        routers=seen.routers,
        requests_ended=seen.counts.requests_ended,
        params_refused=seen.counts.params_refused,
        messages_received=seen.counts.messages_received,
        messages_dropped=seen.counts.messages_dropped,
        message_rate=seen.counts.message_rate,
        message_age_s=seen.message_age_s,
        bus_connected=seen.bus_connected,
        regime_changes=regime.changes,
        swaps=state.swaps,
        failed_ticks=seen.counts.failed_ticks,
        tick_s=seen.counts.tick_s,
    )
