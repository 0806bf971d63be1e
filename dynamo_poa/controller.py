"""What a tick decides: the regime, the parameters that follow, and whether they may be applied.

Owns: the pure step: modes, operators' pins and outside writes, holding on stale data, taking over from a
      predecessor.
Does not own: collecting the observation and applying the effects (loop.py), the regime's rules (regime.py),
      what a policy answers (policies/), what is told of a tick (report.py).
Invariant: `step` is pure. It compares what should be in force with what is and asks for the difference, so a
           publication that failed is asked for again by itself.
Source: architecture, The control loop; contracts RouterParams and Modes.
"""

from collections.abc import Mapping

import msgspec

from dynamo_poa import pressure
from dynamo_poa.baseline import Baseline
from dynamo_poa.config import ControllerConfig
from dynamo_poa.coupling import couple
from dynamo_poa.demand import Load
from dynamo_poa.evidence import Demand, PoolReading, read_pools
from dynamo_poa.policies import Answer, View
from dynamo_poa.policies.running import Guard, next_answer, restarted, unguarded
from dynamo_poa.pressure import PressureState, next_pressure
from dynamo_poa.regime import next_regime, unseen
from dynamo_poa.regime_state import RegimeSignal, RegimeState, Verdict
from dynamo_poa.report import (
    advice_event,
    explained,
    hot_events,
    params_event,
    policy_events,
    regime_event,
    telemetry_record,
)
from dynamo_poa.tick import Choice, ControllerState, Effects, Observation, Settings, Watched
from dynamo_poa.trend import Trend, next_trend
from dynamo_poa.values import (
    MAX_REVISION,
    Applied,
    CacheSignal,
    Mode,
    ParamsKind,
    Pin,
    PoolRegime,
    Regime,
    Role,
    RouterParams,
)

_BY_HAND = (ParamsKind.PIN, ParamsKind.EXTERNAL)

REFRESH_S = 60.0  # a record so old is written anew when ...
REFRESH_FRAC = 0.1  # ... a baseline in it is off by so much


def take_over(stored: RouterParams | None) -> ControllerState:
    """Return the first state, continuing from the record a predecessor left.

    Its regime and baselines are taken over, so nothing moves until there is evidence (I6). An operator's
    parameters are kept until the regime next changes: how long a pin was to last is not stored.
    """
    if stored is None:
        return ControllerState()
    return ControllerState(
        regime=RegimeState(regime=stored.regime, baseline_s=stored.baseline_s),
        pressure=PressureState(iteration=Baseline(value_s=stored.iteration_baseline_s)),
        kept=stored.kind in _BY_HAND,
    )


def pinned(state: ControllerState, pin: Pin) -> ControllerState:
    """Return the state with an operator's pin in place of whatever an operator wanted before."""
    return msgspec.structs.replace(state, pin=pin, kept=False, ended="")


def released(state: ControllerState, *, forget: bool = False) -> ControllerState:
    """Return the state without pin or kept outside write: the policy decides again.

    Args:  forget: it begins anew, from its defaults, without what it has learnt; so does the one in shadow.
    """
    state = msgspec.structs.replace(state, pin=None, kept=False, ended="released by an operator")
    if not forget:
        return state
    return msgspec.structs.replace(
        state, policy=restarted(state.policy), shadow_policy=restarted(state.shadow_policy)
    )


def step(
    state: ControllerState, seen: Observation, settings: Settings, guard: Guard = unguarded
) -> tuple[ControllerState, Effects]:
    """Decide one tick.

    In order of precedence: mode `off` keeps static parameters; an operator's pin, until it expires or is
    released; an operator's outside write, until the regime next changes; in `active` the policy's answer to
    the regime; in `shadow` static parameters, with the policy's answer only reported. On stale data the
    regime and the policy's parameters are held; an operator's word still counts.

    Args:  guard: asks a policy and returns what it raises, so that it can be disabled.
    """
    before_step = state
    stale = _stale_reason(seen, settings.config)
    readings: dict[Role, PoolReading] = {}
    pools: dict[Role, PoolRegime] = {}
    trend = Trend()
    if stale:
        regime = unseen(state.regime, seen.monotonic_s)
        state = msgspec.structs.replace(state, pressure=pressure.unseen(state.pressure))
        verdict = Verdict(hold=Applied.HELD_STALE, reason=stale)
    else:
        readings = read_pools(seen.workers, seen.latencies, _demand(seen))
        state, pools, trend = _watch(state, seen, settings.config, readings)
        regime, verdict = next_regime(state.regime, _signal(seen, pools, trend), settings.config.regime)
    changed = regime.regime is not state.regime.regime
    pin, ended = state.pin, state.ended
    if pin is not None and pin.until_s is not None and seen.monotonic_s >= pin.until_s:
        pin, ended = None, "the pin expired"
    by_hand = seen.current is not None and seen.current.kind in _BY_HAND
    if not by_hand or seen.foreign is not None:
        ended = ""  # followed already, never in force, or an operator's word again
    kept = state.kept and not changed and seen.foreign is None
    before = state.regime.regime
    state = msgspec.structs.replace(
        state, regime=regime, pin=pin, ended=ended, kept=kept, tick=state.tick + 1, advice=seen.advice
    )
    state = _count_swap(state, seen)

    state, answer, shadow = _ask(state, seen, settings, pools, guard, stale=bool(stale))
    coupling = couple(
        seen.estimate,
        seen.caching,
        seen.allocation,
        seen.advice,
        driver=regime.driver.partition(".")[0] if "." in regime.driver else "",
        without_choice=[str(role) for role, pool in seen.pools.items() if pool.workers == 1],
    )
    why = explained(_reason(settings, answer, verdict), regime.regime, coupling)
    wanted = Choice(answer.setting, ParamsKind.POLICY, why)
    choice = _choose(state, seen, settings, wanted, stale=bool(stale))
    publish = _difference(state, seen, settings, choice)
    if publish is not None:
        state = msgspec.structs.replace(state, kept=state.pin is None and publish.kind in _BY_HAND)
    changes = publish is not None and (seen.current is None or publish.revision != seen.current.revision)
    applied = _outcome(choice, wanted, verdict, published=changes)
    unpublished = Choice(settings.static, ParamsKind.STATIC, "nothing published yet")
    in_force = publish or seen.current or _record(0, unpublished, state, seen, settings)
    events = hot_events(state.pressure.changes)
    if changed:
        events.append(regime_event(before, state, verdict, settings))
    told_of = publish if changes else None  # a record that only carries newer baselines is no change
    state, told = params_event(state, seen.current, told_of, choice, wanted, applied)
    events += [*policy_events(before_step, state, settings), *told]
    events += advice_event(before_step.advice, seen)
    watched = Watched(
        readings=readings, pools=pools, trend=trend, answer=answer, shadow=shadow, coupling=coupling
    )
    record = telemetry_record(state, seen, settings, verdict, in_force, wanted, applied, watched)
    return state, Effects(publish=publish, events=tuple(events), record=record)


def _stale_reason(seen: Observation, config: ControllerConfig) -> str:
    """Return why nothing seen may be judged, empty when it may. Idle is not stale."""
    if not seen.bus_connected:
        return "NATS is not connected"
    age_s = seen.message_age_s
    if age_s is not None and age_s > config.stale_s and seen.traffic.in_flight != 0:
        return f"no message for {age_s:.0f} s"
    return ""


def _demand(seen: Observation) -> Demand:
    traffic = seen.traffic
    return Demand(
        arrival_rate=traffic.arrival_rate,
        tokens_mean=traffic.tokens_mean,
        tokens_effective=traffic.tokens_effective,
        arrived=traffic.arrived,
    )


def _watch(
    state: ControllerState, seen: Observation, config: ControllerConfig, readings: Mapping[Role, PoolReading]
) -> tuple[ControllerState, dict[Role, PoolRegime], Trend]:
    """Take in what the workers say of themselves, and which way PoA-hat and latency go."""
    at_s = seen.monotonic_s
    state_of_pools, pools = next_pressure(
        state.pressure, readings, at_s, config.regime, expire_s=config.stale_s
    )
    traffic = seen.traffic
    load = traffic.in_flight if traffic.arrival_rate is None else traffic.arrival_rate
    trend_state, trend = next_trend(
        state.trend,
        at_s,
        poa_hat=seen.estimate.poa_hat,
        p50_s=seen.ttft.p50_s if seen.ttft.fresh else None,
        load=load,
    )
    return msgspec.structs.replace(state, pressure=state_of_pools, trend=trend_state), pools, trend


def _signal(seen: Observation, pools: Mapping[Role, PoolRegime], trend: Trend) -> RegimeSignal:
    return RegimeSignal(
        at_s=seen.monotonic_s,
        p99_s=seen.ttft.p99_s,
        samples=seen.ttft.samples,
        fresh=seen.ttft.fresh,
        load=Load(seen.traffic.in_flight, seen.traffic.arrival_rate),
        shed_frac=seen.traffic.shed_frac,
        workers=sum(pool.workers for pool in seen.pools.values()),
        pools=pools,
        corroborated=trend.rising,
    )


def _count_swap(state: ControllerState, seen: Observation) -> ControllerState:
    """Count a change of setting once it is in the channel; the first record there is none."""
    if seen.current is None or seen.current.setting == state.last_setting:
        return state
    swapped = state.last_setting is not None
    return msgspec.structs.replace(
        state, last_setting=seen.current.setting, since_s=seen.monotonic_s, swaps=state.swaps + swapped
    )


def _ask(
    state: ControllerState,
    seen: Observation,
    settings: Settings,
    pools: Mapping[Role, PoolRegime],
    guard: Guard,
    *,
    stale: bool,
) -> tuple[ControllerState, Answer, Answer | None]:
    """Return the answers of the policy and of the one in shadow; on stale data the last ones stand."""
    view, cooldown_s = _view(state, seen, settings, pools), settings.config.policy.cooldown_s
    run, shadow_run = state.policy, state.shadow_policy
    if stale and run.last_good is not None:
        return state, run.last_good, shadow_run.last_good
    run, answer = next_answer(settings.policy, run, view, cooldown_s, guard)
    shadow = None
    if settings.shadow is not None:
        shadow_run, shadow = next_answer(settings.shadow, shadow_run, view, cooldown_s, guard)
    return msgspec.structs.replace(state, policy=run, shadow_policy=shadow_run), answer, shadow


def _view(
    state: ControllerState, seen: Observation, settings: Settings, pools: Mapping[Role, PoolRegime]
) -> View:
    current, driver = seen.current, state.regime.driver
    return View(
        at_s=seen.monotonic_s,
        regime=state.regime.regime,
        static=settings.static,
        resource=driver if "." in driver else "",
        in_force=None if current is None else current.setting,
        revision=0 if current is None else current.revision,
        since_s=0.0 if current is None else seen.monotonic_s - state.since_s,
        ours=current is not None and current.kind is ParamsKind.POLICY,
        traffic=seen.traffic,
        cache_absent=seen.cache.signal is CacheSignal.ABSENT,
        calibrated=bool(seen.latencies),
        outcomes=seen.outcomes,
        predicted=seen.predicted,
    )


def _reason(settings: Settings, answer: Answer, verdict: Verdict) -> str:
    """Return why the policy wants what it wants: the regime, and what the policy has to add."""
    added = answer.detail or ("" if answer.reason == settings.policy.name else answer.reason)
    return f"{verdict.reason}; {added}" if added else verdict.reason


def _choose(
    state: ControllerState, seen: Observation, settings: Settings, wanted: Choice, *, stale: bool
) -> Choice:
    """Return what should be in force now; what follows an operator's parameters says why they ended.

    On stale data what is in force is held, but for a candidate that a policy was trying: nobody sees what it
    does to users.
    """
    mode, current, foreign = settings.config.mode, seen.current, seen.foreign
    if mode is Mode.OFF:
        return Choice(settings.static, ParamsKind.STATIC, "mode is off")
    if state.pin is not None:
        return Choice(state.pin.setting, ParamsKind.PIN, "pinned by an operator")
    if foreign is not None:
        why = foreign.reason or "written to the store by an operator"
        return Choice(foreign.setting, ParamsKind.EXTERNAL, why)
    on_trial = state.policy.tentative and current is not None and current.kind is ParamsKind.POLICY
    if current is not None and (state.kept or (stale and not on_trial)):
        return Choice(current.setting, current.kind, current.reason)
    chosen = Choice(settings.static, ParamsKind.STATIC, "mode is shadow") if mode is Mode.SHADOW else wanted
    if not state.ended:
        return chosen
    return Choice(chosen.setting, chosen.kind, f"{state.ended}: {chosen.reason}")


def _difference(
    state: ControllerState, seen: Observation, settings: Settings, choice: Choice
) -> RouterParams | None:
    """Return the record to publish, None when the one in force routes as chosen.

    A new record also for the same values when they are now somebody else's, when somebody else's record lies
    in the store, when a successor would take over another regime, and once after a start: routers may hold a
    record of the predecessor's that the store has lost.
    """
    current = seen.current
    if not seen.bus_connected:
        return None
    if current is not None and seen.foreign is None and seen.announced:
        same_values = current.setting == choice.setting
        same_regime = current.regime is state.regime.regime or choice.kind is not ParamsKind.POLICY
        if same_values and current.kind is choice.kind and same_regime:
            return _refreshed(current, state, seen)
    known = [router.revision for router in seen.routers]
    if current is not None:
        known.append(current.revision)
    if seen.foreign is not None:
        known.append(seen.foreign.revision)
    # A record may carry any valid revision. After the last one there is no next: we count anew from what else
    # is known, and routers that hold it take our word when its lease is over.
    followed = [revision for revision in known if revision < MAX_REVISION]
    return _record(max(followed, default=0) + 1, choice, state, seen, settings)


def _refreshed(current: RouterParams, state: ControllerState, seen: Observation) -> RouterParams | None:
    """Return the record in force with baselines that a successor should know, None while it does.

    Same revision and values: routers take no notice. Only the policy's own record, below the knee, and once
    in REFRESH_S, so that what is stored is settled.
    """
    settled = state.regime.regime is Regime.BELOW and current.kind is ParamsKind.POLICY
    if not settled or seen.wall_s - current.issued_at_s < REFRESH_S:
        return None
    baseline_s, iteration_s = state.regime.baseline_s, state.pressure.iteration.value_s
    if not (_differs(current.baseline_s, baseline_s) or _differs(current.iteration_baseline_s, iteration_s)):
        return None
    return msgspec.structs.replace(
        current, baseline_s=baseline_s, iteration_baseline_s=iteration_s, issued_at_s=seen.wall_s
    )


def _differs(stored_s: float | None, learnt_s: float | None) -> bool:
    if learnt_s is None:
        return False
    return stored_s is None or abs(learnt_s - stored_s) > REFRESH_FRAC * stored_s


def _record(
    revision: int, choice: Choice, state: ControllerState, seen: Observation, settings: Settings
) -> RouterParams:
    return RouterParams(
        **msgspec.structs.asdict(choice.setting),
        revision=revision,
        kind=choice.kind,
        reason=choice.reason,
        regime=state.regime.regime,
        issued_at_s=seen.wall_s,
        lease_s=settings.config.lease_s,
        baseline_s=state.regime.baseline_s,
        iteration_baseline_s=state.pressure.iteration.value_s,
    )


def _outcome(
    choice: Choice,
    wanted: Choice,
    verdict: Verdict,
    *,
    published: bool,
) -> Applied:
    """Return what became of the wish; a publication that fails is reported by loop.py."""
    if published:
        return Applied.APPLIED
    if verdict.hold is Applied.HELD_STALE:
        return Applied.HELD_STALE
    if choice.setting != wanted.setting:
        return Applied.HELD_PIN if choice.kind in _BY_HAND else Applied.HELD_MODE
    return verdict.hold
