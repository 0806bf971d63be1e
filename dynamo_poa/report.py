"""What a tick tells: the events of its changes, and its record.

Owns: turning a decided tick into events and the canonical record.
Does not own: the decision (controller.py) or where what is told goes (telemetry.py).
Invariant: pure; a change is told once, what is held back once for each wish and reason.
"""

from collections.abc import Iterable

import msgspec

from dynamo_poa import telemetry
from dynamo_poa.hot import HotChange
from dynamo_poa.policies import Pair
from dynamo_poa.regime_state import SHED_LIMIT, Verdict, thresholds_s
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.tick import Choice, ControllerState, Event, Observation, Settings, Watched
from dynamo_poa.values import Applied, Regime, RouterParams


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
    before = {} if current is None else _named((current.router_temperature, current.overlap_weight))
    if publish is not None:
        details = {"revision": publish.revision, "kind": publish.kind, "regime": publish.regime}
        event = Event(
            name=telemetry.PARAMS_APPLIED,
            before=before,
            after=_named(choice.values),
            reason=choice.reason,
            details=details,
        )
        return msgspec.structs.replace(state, last_held=None), [event]
    held = (applied, wanted.values) if before and choice.values != wanted.values else None
    if held == state.last_held:
        return state, []
    state = msgspec.structs.replace(state, last_held=held)
    if held is None:
        return state, []
    event = Event(
        name=telemetry.PARAMS_HELD,
        before=before,
        after=_named(wanted.values),
        reason=choice.reason,
        details={"outcome": applied},
    )
    return state, [event]


def _named(values: Pair) -> dict[str, object]:
    return {"router_temperature": values[0], "overlap_weight": values[1]}


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
    theta_s = thresholds_s(regime.baseline_s, settings.config.regime)
    return TelemetryRecord(
        tick=state.tick,
        at_s=seen.wall_s,
        namespace=settings.namespace,
        mode=settings.config.mode,
        regime=regime.regime,
        reason=verdict.reason,
        applied=applied,
        router_temperature=in_force.router_temperature,
        overlap_weight=in_force.overlap_weight,
        revision=in_force.revision,
        kind=in_force.kind,
        wanted_router_temperature=wanted.values[0],
        wanted_overlap_weight=wanted.values[1],
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
