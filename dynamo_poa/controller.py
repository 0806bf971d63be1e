"""What a tick decides: the regime, the parameters that follow, and whether they may be applied.

Owns: the pure step: modes, operators' pins and outside writes, holding on stale data, taking over from a
      predecessor, what is reported.
Does not own: collecting the observation and applying the effects (loop.py), the regime's rules (regime.py).
Invariant: `step` is pure. It compares what should be in force with what is and asks for the difference, so a
           publication that failed is asked for again by itself.
Source: architecture, The control loop; contracts RouterParams and Modes.
"""

from collections.abc import Mapping

import msgspec

from dynamo_poa import telemetry
from dynamo_poa.config import ControllerConfig
from dynamo_poa.decisions import Traffic
from dynamo_poa.policies import Pair, Policy
from dynamo_poa.regime import Load, RegimeSignal, RegimeState, Verdict, next_regime, thresholds_s, unseen
from dynamo_poa.telemetry import RouterView, TelemetryRecord
from dynamo_poa.values import (
    Applied,
    Estimate,
    Mode,
    ParamsKind,
    Pin,
    PoolLoad,
    Role,
    RouterParams,
    TtftSample,
)

_BY_HAND = (ParamsKind.PIN, ParamsKind.EXTERNAL)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters that are reported and not decided on."""

    requests_ended: dict[str, int] = {}
    messages_received: dict[str, int] = {}
    messages_dropped: dict[str, int] = {}
    message_rate: float | None = None
    failed_ticks: int = 0
    tick_s: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a tick sees.

    current:        the record in force in the channel, None before the first
    foreign:        a record somebody else wrote to the store since the last tick
    message_age_s:  since the last message of any kind, None before the first
    """

    wall_s: float
    monotonic_s: float
    current: RouterParams | None = None
    foreign: RouterParams | None = None
    ttft: TtftSample = TtftSample()
    estimate: Estimate = Estimate(reason="no decisions")
    traffic: Traffic = Traffic()
    pools: Mapping[Role, PoolLoad] = {}
    routers: tuple[RouterView, ...] = ()
    bus_connected: bool = True
    message_age_s: float | None = None
    counts: Counts = Counts()


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick.

    pin:            an operator's, through the control service; changed by `pinned` and `released` only
    kept_revision:  the record of an operator's outside write, kept until the regime next changes
    announced:      this controller has published, be it only what it took over
    last_held:      the outcome and wish last reported as held, so that it is said once
    """

    regime: RegimeState = RegimeState()
    pin: Pin | None = None
    kept_revision: int | None = None
    announced: bool = False
    tick: int = 0
    swaps: int = 0
    last_values: Pair | None = None
    last_held: tuple[Applied, Pair] | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that changed, or was kept from changing; `name` is one of telemetry.py's."""

    name: str
    before: dict[str, object]
    after: dict[str, object]
    reason: str
    details: dict[str, object] = {}


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick asks for. `publish` is None when what is in force is what should be."""

    publish: RouterParams | None
    events: tuple[Event, ...]
    record: TelemetryRecord


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the controller runs. `static` is the router's own (τ, ω)."""

    namespace: str
    config: ControllerConfig
    policy: Policy
    static: Pair


class _Choice(msgspec.Struct, frozen=True):
    """Parameters and who wants them."""

    values: Pair
    kind: ParamsKind
    reason: str


def take_over(stored: RouterParams | None) -> ControllerState:
    """Return the first state, continuing from the record a predecessor left.

    Its regime and baseline are taken over, so nothing moves until there is evidence (I6). An operator's
    parameters are kept until the regime next changes: how long a pin was to last is not stored.
    """
    if stored is None:
        return ControllerState()
    by_hand = stored.kind in _BY_HAND
    return ControllerState(
        regime=RegimeState(regime=stored.regime, baseline_s=stored.baseline_s),
        kept_revision=stored.revision if by_hand else None,
    )


def pinned(state: ControllerState, pin: Pin) -> ControllerState:
    """Return the state with an operator's pin in place of whatever an operator wanted before."""
    return msgspec.structs.replace(state, pin=pin, kept_revision=None)


def released(state: ControllerState) -> ControllerState:
    """Return the state without pin or kept outside write: the policy decides again."""
    return msgspec.structs.replace(state, pin=None, kept_revision=None)


def step(state: ControllerState, seen: Observation, settings: Settings) -> tuple[ControllerState, Effects]:
    """Decide one tick.

    In order of precedence: mode `off` keeps static parameters; an operator's pin, until it expires or is
    released; an operator's outside write, until the regime next changes; in `active` the policy's answer to
    the regime; in `shadow` static parameters, with the policy's answer only reported. On stale data the
    regime and the policy's parameters are held; an operator's word still counts.
    """
    stale = _stale_reason(seen, settings.config)
    if stale:
        regime = unseen(state.regime, seen.monotonic_s)
        verdict = Verdict(hold=Applied.HELD_STALE, reason=stale)
    else:
        regime, verdict = next_regime(state.regime, _signal(seen), settings.config.regime)
    changed = regime.regime is not state.regime.regime
    pin = state.pin
    if pin is not None and pin.until_s is not None and seen.monotonic_s >= pin.until_s:
        pin = None
    kept_revision = None if changed or seen.foreign is not None else state.kept_revision
    before = state.regime.regime
    state = msgspec.structs.replace(
        state, regime=regime, pin=pin, kept_revision=kept_revision, tick=state.tick + 1
    )
    state = _count_swap(state, seen.current)

    wanted = _wanted(state, verdict, settings)
    choice = _choose(state, seen, settings, wanted, stale=bool(stale))
    publish = _difference(state, seen, settings, choice)
    if publish is not None:
        by_hand = state.pin is None and publish.kind in _BY_HAND
        state = msgspec.structs.replace(
            state, announced=True, kept_revision=publish.revision if by_hand else None
        )
    applied = _outcome(publish, choice, wanted, verdict)
    unpublished = _Choice(settings.static, ParamsKind.STATIC, "nothing published yet")
    in_force = publish or seen.current or _record(0, unpublished, state, seen, settings)
    events = []
    if changed:
        events.append(_regime_event(before, state, verdict, settings))
    state, params_event = _params_event(state, seen.current, publish, choice, wanted, applied)
    events += params_event
    record = _telemetry(state, seen, settings, verdict, in_force, wanted, applied)
    return state, Effects(publish=publish, events=tuple(events), record=record)


def _stale_reason(seen: Observation, config: ControllerConfig) -> str:
    """Return why nothing seen may be judged, empty when it may. Idle is not stale."""
    if not seen.bus_connected:
        return "NATS is not connected"
    age_s = seen.message_age_s
    if age_s is not None and age_s > config.stale_s and seen.traffic.in_flight != 0:
        return f"no message for {age_s:.0f} s"
    return ""


def _signal(seen: Observation) -> RegimeSignal:
    return RegimeSignal(
        at_s=seen.monotonic_s,
        p99_s=seen.ttft.p99_s,
        samples=seen.ttft.samples,
        fresh=seen.ttft.fresh,
        load=Load(seen.traffic.in_flight, seen.traffic.arrival_rate),
        shed_frac=seen.traffic.shed_frac,
        workers=sum(pool.workers for pool in seen.pools.values()),
    )


def _count_swap(state: ControllerState, current: RouterParams | None) -> ControllerState:
    """Count a change of values once it is in the channel; the first record there is none."""
    if current is None:
        return state
    values = (current.router_temperature, current.overlap_weight)
    swapped = state.last_values is not None and values != state.last_values
    return msgspec.structs.replace(state, last_values=values, swaps=state.swaps + swapped)


def _wanted(state: ControllerState, verdict: Verdict, settings: Settings) -> _Choice:
    return _Choice(settings.policy.decide(state.regime.regime), ParamsKind.POLICY, verdict.reason)


def _choose(
    state: ControllerState, seen: Observation, settings: Settings, wanted: _Choice, *, stale: bool
) -> _Choice:
    """Return what should be in force now."""
    mode, current, foreign = settings.config.mode, seen.current, seen.foreign
    if mode is Mode.OFF:
        return _Choice(settings.static, ParamsKind.STATIC, "mode is off")
    if state.pin is not None:
        pair = (state.pin.router_temperature, state.pin.overlap_weight)
        return _Choice(pair, ParamsKind.PIN, "pinned by an operator")
    if foreign is not None:
        pair = (foreign.router_temperature, foreign.overlap_weight)
        return _Choice(pair, ParamsKind.EXTERNAL, foreign.reason or "written to the store by an operator")
    if current is not None and (stale or state.kept_revision == current.revision):
        return _Choice((current.router_temperature, current.overlap_weight), current.kind, current.reason)
    if mode is Mode.SHADOW:
        return _Choice(settings.static, ParamsKind.STATIC, "mode is shadow")
    return wanted


def _difference(
    state: ControllerState, seen: Observation, settings: Settings, choice: _Choice
) -> RouterParams | None:
    """Return the record to publish, None when the one in force routes as chosen.

    A new record also for the same values when they are now somebody else's, when somebody else's record lies
    in the store, when a successor would take over another regime, and once after a start: routers may hold a
    record of the predecessor's that the store has lost.
    """
    current = seen.current
    if not seen.bus_connected:
        return None
    if current is not None and seen.foreign is None and state.announced:
        same_values = (current.router_temperature, current.overlap_weight) == choice.values
        same_regime = current.regime is state.regime.regime or choice.kind is not ParamsKind.POLICY
        if same_values and current.kind is choice.kind and same_regime:
            return None
    known = [router.revision for router in seen.routers]
    if current is not None:
        known.append(current.revision)
    if seen.foreign is not None:
        known.append(seen.foreign.revision)
    return _record(max(known, default=0) + 1, choice, state, seen, settings)


def _record(
    revision: int, choice: _Choice, state: ControllerState, seen: Observation, settings: Settings
) -> RouterParams:
    router_temperature, overlap_weight = choice.values
    return RouterParams(
        revision=revision,
        router_temperature=router_temperature,
        overlap_weight=overlap_weight,
        kind=choice.kind,
        reason=choice.reason,
        regime=state.regime.regime,
        issued_at_s=seen.wall_s,
        lease_s=settings.config.lease_s,
        baseline_s=state.regime.baseline_s,
    )


def _outcome(
    publish: RouterParams | None,
    choice: _Choice,
    wanted: _Choice,
    verdict: Verdict,
) -> Applied:
    """Return what became of the wish; a publication that fails is reported by loop.py."""
    if publish is not None:
        return Applied.APPLIED
    if verdict.hold is Applied.HELD_STALE:
        return Applied.HELD_STALE
    if choice.values != wanted.values:
        return Applied.HELD_PIN if choice.kind in _BY_HAND else Applied.HELD_MODE
    return verdict.hold


def _regime_event(before: object, state: ControllerState, verdict: Verdict, settings: Settings) -> Event:
    return Event(
        name=telemetry.REGIME_CHANGED,
        before={"regime": before},
        after={"regime": state.regime.regime},
        reason=verdict.reason,
        details={
            "value_s": verdict.value_s,
            "threshold_s": verdict.threshold_s,
            "dwell_left_s": verdict.dwell_left_s,
            "mode": settings.config.mode,
        },
    )


def _params_event(
    state: ControllerState,
    current: RouterParams | None,
    publish: RouterParams | None,
    choice: _Choice,
    wanted: _Choice,
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


def _telemetry(
    state: ControllerState,
    seen: Observation,
    settings: Settings,
    verdict: Verdict,
    in_force: RouterParams,
    wanted: _Choice,
    applied: Applied,
) -> TelemetryRecord:
    regime, pin = state.regime, state.pin
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
        poa_by_role=seen.estimate.by_role,
        poa_samples=seen.estimate.samples,
        poa_method=seen.estimate.method,
        poa_reason=seen.estimate.reason,
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
        pools={str(role): pool for role, pool in seen.pools.items()},
        routers=seen.routers,
        requests_ended=seen.counts.requests_ended,
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
