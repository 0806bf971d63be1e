"""What a tick decides: modes, pins, outside writes, stale data, take-over."""

import msgspec
import pytest

from dynamo_poa.config import ControllerConfig, PolicyConfig, RegimeConfig
from dynamo_poa.controller import pinned, released, step, take_over
from dynamo_poa.coupling import Advice, AllocationEstimate, Attainment, CacheSwap, CachingEstimate, Split
from dynamo_poa.decisions import Traffic
from dynamo_poa.errors import ParamsError
from dynamo_poa.load import RankLoad
from dynamo_poa.params import decode_params, encode_params
from dynamo_poa.policies import make_policy
from dynamo_poa.telemetry import RouterView
from dynamo_poa.tick import ControllerState, Counts, Observation, Settings
from dynamo_poa.values import (
    Applied,
    CacheSignal,
    CacheView,
    Estimate,
    Mode,
    ParamsKind,
    Pin,
    Regime,
    Role,
    RouterParams,
    Selection,
    Setting,
    TtftSample,
    WorkerCard,
    WorkerKey,
)

STATIC = (0.2, 0.9)


def settings(mode=Mode.ACTIVE, **config):
    config = ControllerConfig(
        mode=mode, regime=RegimeConfig(unit="seconds", theta1=1.0, theta2=10.0), **config
    )
    return Settings(
        namespace="poa", config=config, policy=make_policy(PolicyConfig()), static=Setting(*STATIC)
    )


class Channel:
    """Runs the step against a channel that takes whatever is published, one second a tick."""

    def __init__(self, mode=Mode.ACTIVE, state=None, current=None):
        self.settings = settings(mode)
        self.state = state or ControllerState()
        self.current = current
        self.published = []
        self.at_s = 1000.0
        self.effects = None

    def tick(self, p99_s=0.5, *, in_flight=50, **fields):
        self.at_s += 1.0
        seen = Observation(
            wall_s=1.8e9 + self.at_s,
            monotonic_s=self.at_s,
            current=self.current,
            announced=bool(self.published),
            ttft=TtftSample(
                p50_s=p99_s, p99_s=p99_s, samples=100 if p99_s else 0, fresh=bool(p99_s), source="decisions"
            ),
            traffic=Traffic(in_flight=in_flight, arrival_rate=10.0, shed_frac=fields.pop("shed_frac", 0.0)),
            message_age_s=fields.pop("message_age_s", 0.1),
            **fields,
        )
        self.state, self.effects = step(self.state, seen, self.settings)
        if self.effects.publish is not None:
            self.current = self.effects.publish
            self.published.append(self.current)
        return self.effects

    def ticks(self, count, p99_s=0.5, **fields):
        for _ in range(count):
            self.tick(p99_s, **fields)
        return self.effects

    @property
    def values(self):
        return [(p.router_temperature, p.overlap_weight, p.kind) for p in self.published]


def record(kind=ParamsKind.EXTERNAL, revision=40, values=(0.4, 0.5), **fields):
    return RouterParams(
        revision=revision, router_temperature=values[0], overlap_weight=values[1], kind=kind, **fields
    )


def full_worker(worker_id):
    """Return a decode worker with 95 % of its blocks in use and nothing queued."""
    card = WorkerCard(worker_id=worker_id, role=Role.DECODE, kv_block_size=16, total_kv_blocks=1000)
    load = RankLoad(1000, 0.0)
    return msgspec.structs.replace(
        load.state(WorkerKey(worker_id, 0), card, 0.0, 30.0, False),
        kv_used_blocks=950,
        kv_used_frac=0.95,
        queued_requests=0,
    )


def test_the_first_record_is_the_policys_answer_to_below():
    """With nothing stored the channel is filled at once, under revision 1."""
    channel = Channel()
    effects = channel.tick()
    assert effects.publish == RouterParams(
        revision=1,
        router_temperature=0.0,
        overlap_weight=1.0,
        kind=ParamsKind.POLICY,
        reason="TTFT P99 0.500 s under θ1 1.000 s",
        regime=Regime.BELOW,
        issued_at_s=1.8e9 + 1001,
        lease_s=30.0,
    )
    assert effects.record.applied is Applied.APPLIED
    assert channel.tick().publish is None
    assert channel.effects.record.applied is Applied.UNCHANGED


def test_a_regime_change_publishes_both_values_at_once_and_says_so():
    """before, after and reason of the regime and of the parameters."""
    channel = Channel()
    channel.ticks(4, 2.0)
    assert channel.values == [(0.0, 1.0, "policy")]
    effects = channel.tick(2.0)
    assert channel.values[1:] == [(0.7, 1.0, "policy")]
    regime_event, params_event = effects.events
    assert (regime_event.name, regime_event.before, regime_event.after) == (
        "poa.regime.changed",
        {"regime": "below"},
        {"regime": "transition"},
    )
    assert regime_event.details["threshold_s"] == 1.0
    dynamos_own = {"prefill_load_scale": None, "selection": "kv"}
    assert (params_event.name, params_event.before, params_event.after) == (
        "poa.params.applied",
        {"router_temperature": 0.0, "overlap_weight": 1.0} | dynamos_own,
        {"router_temperature": 0.7, "overlap_weight": 1.0} | dynamos_own,
    )
    assert params_event.details["revision"] == 2
    assert params_event.reason == regime_event.reason == "TTFT P99 2.000 s at or over θ1 1.000 s"
    assert effects.record.swaps == 0
    assert channel.tick(2.0).record.swaps == 1  # once it is in the channel


def test_shadow_reports_what_it_would_set_and_publishes_static():
    """Mode shadow: estimate, decide, log, never apply."""
    channel = Channel(Mode.SHADOW)
    effects = channel.ticks(20, 50.0)
    assert channel.values == [(*STATIC, "static")]
    assert effects.record.regime is Regime.SATURATED
    assert effects.record.applied is Applied.HELD_MODE
    assert (effects.record.router_temperature, effects.record.overlap_weight) == STATIC
    assert (effects.record.wanted_router_temperature, effects.record.wanted_overlap_weight) == (0.8, 0.1)


def test_what_is_held_is_said_once_for_each_wish():
    """poa.params.held with before, after, reason; not every tick."""
    channel = Channel(Mode.SHADOW)
    held = [e for _ in range(20) for e in channel.tick(50.0).events if e.name == "poa.params.held"]
    assert [(event.after["router_temperature"], event.reason) for event in held] == [
        (0.0, "mode is shadow"),
        (0.7, "mode is shadow"),
        (0.8, "mode is shadow"),
    ]
    assert held[0].details == {"outcome": Applied.HELD_MODE}


def test_off_keeps_static_parameters_against_everything():
    """Mode off: pins and outside writes too; the store gets the static record back."""
    channel = Channel(Mode.OFF)
    channel.ticks(20, 50.0)
    assert channel.values == [(*STATIC, "static")]
    channel.tick(foreign=record(revision=40))
    assert channel.values[-1] == (*STATIC, "static")
    assert channel.published[-1].revision == 41


def test_a_pin_overrides_the_policy_until_it_expires():
    """`set --for 3s`: from the next tick on, whatever the regime does; then the policy again."""
    channel = Channel()
    channel.tick()
    channel.state = pinned(
        channel.state, Pin(router_temperature=0.3, overlap_weight=0.4, until_s=channel.at_s + 3)
    )
    effects = channel.tick()
    assert (effects.record.kind, effects.record.pin_left_s) == (ParamsKind.PIN, 2.0)
    assert channel.tick().record.applied is Applied.HELD_PIN
    effects = channel.tick()
    assert effects.record.kind is ParamsKind.POLICY
    reason = "the pin expired: TTFT P99 0.500 s under θ1 1.000 s"
    assert [event.reason for event in effects.events] == [reason]
    assert channel.current.reason == reason
    assert channel.values == [(0.0, 1.0, "policy"), (0.3, 0.4, "pin"), (0.0, 1.0, "policy")]


def test_an_operator_may_write_who_selects_and_a_pin_leaves_it_to_dynamo():
    """A record in the store is taken as it says; `set` knows τ and ω only."""
    channel = Channel()
    channel.tick()
    written = msgspec.structs.replace(record(), selection=Selection.MARGINAL, prefill_load_scale=4.0)
    channel.tick(foreign=written)
    assert channel.current.setting == Setting(0.4, 0.5, 4.0, Selection.MARGINAL)
    assert channel.effects.record.selection is Selection.MARGINAL
    channel.state = pinned(channel.state, Pin(router_temperature=0.4, overlap_weight=0.5))
    channel.tick()
    assert channel.current.setting == Setting(0.4, 0.5, None, Selection.KV)
    assert channel.current.revision == 42
    assert channel.tick().publish is None


def test_a_pin_without_end_holds_through_regime_changes_until_it_is_released():
    """`set`, then `release`: back to the policy's answer of now, not of then."""
    channel = Channel()
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.ticks(20, 50.0)
    assert channel.state.regime.regime is Regime.SATURATED
    channel.state = released(channel.state)
    channel.tick(50.0)
    assert channel.values == [(0.3, 0.4, "pin"), (0.8, 0.1, "policy")]
    assert channel.current.reason == "released by an operator: TTFT P99 50.000 s not under 7.000 s"


def test_why_a_pin_ended_is_told_until_what_follows_it_is_in_force_and_no_longer():
    """Whoever reads the change wants the operator's act, not the evidence; later changes have their own."""
    channel = Channel()
    channel.state = pinned(
        channel.state, Pin(router_temperature=0.3, overlap_weight=0.4, until_s=channel.at_s + 2)
    )
    channel.tick()
    channel.tick(bus_connected=False)  # expires now, and nothing can be published
    assert channel.tick().publish.reason == "the pin expired: TTFT P99 0.500 s under θ1 1.000 s"
    channel.state = released(channel.state)  # of nothing
    channel.ticks(6, 2.0)
    assert channel.values[2:] == [(0.7, 1.0, "policy")]
    assert channel.current.reason == "TTFT P99 1.915 s at or over θ1 1.000 s"


def test_an_outside_write_in_the_tick_of_a_release_stands():
    """When the regime ends it, the evidence is the reason, not the release of before."""
    channel = Channel()
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.tick()
    channel.state = released(channel.state)
    channel.tick(foreign=record(revision=40))
    channel.ticks(8, 2.0)
    assert channel.values == [(0.3, 0.4, "pin"), (0.4, 0.5, "external"), (0.7, 1.0, "policy")]
    assert not channel.current.reason.startswith("released")


def test_a_pin_applies_in_shadow_too():
    """An operator's word is not the controller's decision."""
    channel = Channel(Mode.SHADOW)
    channel.tick()
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.tick()
    channel.state = released(channel.state)
    channel.tick()
    assert channel.values == [(*STATIC, "static"), (0.3, 0.4, "pin"), (*STATIC, "static")]
    assert channel.current.reason == "released by an operator: mode is shadow"


def test_an_outside_write_is_adopted_until_the_regime_next_changes():
    """Under a new revision above both, so that every router takes it."""
    channel = Channel()
    channel.tick()
    channel.tick(foreign=record(revision=40))
    assert channel.published[-1].revision == 41
    channel.ticks(30)
    assert channel.values == [(0.0, 1.0, "policy"), (0.4, 0.5, "external")]
    assert channel.effects.record.applied is Applied.HELD_PIN
    channel.ticks(6, 2.0)
    assert channel.values[-1] == (0.7, 1.0, "policy")


def test_a_released_outside_write_ends_at_once():
    """`release` takes back whatever an operator wanted."""
    channel = Channel()
    channel.tick()
    channel.tick(foreign=record())
    channel.state = released(channel.state)
    channel.tick()
    assert channel.values[-1] == (0.0, 1.0, "policy")


def test_an_outside_write_gives_way_to_a_pin():
    """The later word of the same person; the store is healed with the pin."""
    channel = Channel()
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.tick()
    channel.tick(foreign=record(revision=2))
    assert channel.values == [(0.3, 0.4, "pin")] * 2
    assert channel.published[-1].revision == 3


def test_a_successor_continues_where_the_predecessor_was():
    """I6: regime, baseline and values are taken over; re-issued once under a new revision."""
    stored = record(ParamsKind.POLICY, revision=9, values=(0.8, 0.1), regime=Regime.SATURATED, baseline_s=0.1)
    channel = Channel(state=take_over(stored), current=stored)
    effects = channel.ticks(30, None, in_flight=80)
    assert channel.values == [(0.8, 0.1, "policy")]
    assert channel.published[0].revision == 10
    assert effects.record.regime is Regime.SATURATED
    assert effects.record.baseline_s == 0.1
    assert effects.record.swaps == 0


@pytest.mark.parametrize("kind", [ParamsKind.EXTERNAL, ParamsKind.PIN])
def test_a_successor_keeps_an_operators_parameters_until_the_regime_changes(kind):
    """How long a pin was to last is not stored; dropping it at a restart would surprise more."""
    stored = record(kind, revision=9)
    channel = Channel(state=take_over(stored), current=stored)
    channel.ticks(10)
    assert channel.values == [(0.4, 0.5, kind)]
    channel.ticks(7, 2.0)
    assert channel.values[1:] == [(0.7, 1.0, "policy")]


def test_a_successor_in_mode_off_returns_to_static():
    """Restarted with --no-adaptive."""
    stored = record(ParamsKind.POLICY, revision=9, values=(0.8, 0.1), regime=Regime.SATURATED)
    channel = Channel(Mode.OFF, state=take_over(stored), current=stored)
    channel.tick()
    assert channel.values == [(*STATIC, "static")]


def test_a_controller_that_lost_the_store_counts_on_from_what_routers_hold():
    """A lower revision would be refused by every router until its lease ends."""
    channel = Channel()
    router = RouterView(router_id="r", revision=77, source="heartbeat", dropped=0, in_flight={}, age_s=0.1)
    assert channel.tick(routers=(router,)).publish.revision == 78


def test_after_the_last_revision_it_counts_anew():
    """I3: 2^53 - 1 is valid and has no successor; what else is known is still counted on."""
    channel = Channel()
    channel.tick()
    adopted = channel.tick(foreign=record(revision=2**53 - 1)).publish
    assert (adopted.revision, adopted.router_temperature) == (2, 0.4)
    ghost = RouterView(router_id="r1", revision=2**53 - 1, source="store", dropped=0, in_flight={}, age_s=0.1)
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    assert channel.tick(routers=(ghost,)).publish.revision == 3
    channel = Channel(current=record(ParamsKind.POLICY, revision=2**53 - 1))
    assert channel.tick().publish.revision == 1


def test_without_nats_everything_is_held():
    """HELD_STALE, nothing published, regime untouched, however slow the last thing seen was."""
    channel = Channel()
    channel.tick()
    effects = channel.ticks(30, 50.0, bus_connected=False)
    assert effects.record.applied is Applied.HELD_STALE
    assert effects.record.reason == "NATS is not connected"
    assert effects.record.regime is Regime.BELOW
    assert len(channel.published) == 1


def test_silence_under_load_is_stale_and_idle_silence_is_not():
    """No message for stale_s with requests in flight, or with nobody who knows."""
    channel = Channel()
    channel.ticks(12, 50.0)
    assert channel.state.regime.regime is Regime.SATURATED
    effects = channel.ticks(60, None, in_flight=50, message_age_s=31.0)
    assert effects.record.applied is Applied.HELD_STALE
    assert effects.record.reason == "no message for 31 s"
    effects = channel.ticks(60, None, in_flight=None, message_age_s=31.0)
    assert effects.record.regime is Regime.SATURATED
    effects = channel.ticks(20, None, in_flight=0, message_age_s=31.0)
    assert effects.record.regime is Regime.BELOW


def test_a_pin_counts_on_stale_data_too():
    """It does not depend on what is seen."""
    channel = Channel()
    channel.tick()
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.tick(None, message_age_s=31.0)
    assert channel.values[-1] == (0.3, 0.4, "pin")


def test_a_record_that_did_not_reach_the_channel_is_asked_for_again():
    """The step compares with what is in force, so a failed publication needs no memory."""
    channel = Channel()
    first = channel.tick().publish
    channel.current = None
    second = channel.tick().publish
    assert (first.revision, second.revision) == (1, 1)


def test_the_record_carries_what_was_seen():
    """One canonical record per tick."""
    channel = Channel()
    estimate = Estimate(
        poa_hat=1.5, samples=64, legs={"decode": Estimate(poa_hat=1.5)}, reason="prefill: zero cost"
    )
    counts = Counts(messages_received={"kv_metrics": 3}, message_rate=2.0, tick_s=0.002, failed_ticks=1)
    told = channel.tick(0.5, estimate=estimate, counts=counts).record
    fields = ("poa_hat", "poa_samples", "poa_reason", "ttft_p99_s", "theta1_s", "theta2_s", "in_flight")
    assert [getattr(told, field) for field in fields] == [1.5, 64, "prefill: zero cost", 0.5, 1.0, 10.0, 50]
    assert (told.message_rate, told.tick_s, told.failed_ticks) == (2.0, 0.002, 1)
    assert told.tick == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=type(told)) == told


def test_the_record_carries_the_other_games_and_the_advice_told_of_them():
    """Issue 7: one record a tick has all three games; a reader of the event plane needs no other."""
    channel = Channel()
    at = [
        Attainment(split=Split(count, 8 - count), ttft_frac=0.9, itl_frac=0.9, goodput_rps=float(count))
        for count in (3, 4)
    ]
    advice = Advice(now=at[0], then=at[1], gain_frac=0.3, gain_low=0.2, gain_high=0.4)
    swap = CacheSwap(at_s=1.0, overlap_weight_before=1.0, overlap_weight_after=0.1)
    caching = CachingEstimate(poa_hat=2.0)
    allocation = AllocationEstimate(poa_hat=1.25, now=at[0], best=at[1])
    told = channel.tick(0.5, caching=caching, allocation=allocation, advice=advice, cache_swap=swap).record
    assert (told.caching, told.allocation, told.poa_advice, told.cache_swap) == (
        caching,
        allocation,
        advice,
        swap,
    )
    assert (told.coupling.caching, told.coupling.allocation) == (2.0, 1.25)


def test_the_step_is_pure():
    """The same state and observation give the same answer, and neither is changed."""
    state, seen = ControllerState(), Observation(wall_s=1.8e9, monotonic_s=5.0)
    assert step(state, seen, settings()) == step(state, seen, settings())
    assert state == ControllerState()


@pytest.mark.parametrize("signal", CacheSignal)
def test_overlap_weight_is_not_moved_while_no_worker_differs_in_overlap(signal):
    """E6: τ follows the regime; ω stays where the policy has it, and the reason says why."""
    channel = Channel()
    channel.ticks(3)
    channel.ticks(40, p99_s=50.0, cache=CacheView(signal=signal))
    assert channel.effects.record.regime is Regime.SATURATED
    absent = signal is CacheSignal.ABSENT
    assert channel.values[-1] == (0.8, 1.0 if absent else 0.1, ParamsKind.POLICY)
    said = "; ω stays 1: no worker differs in cached tokens"
    assert channel.published[-1].reason.endswith(said) is absent
    assert channel.effects.record.applied is Applied.UNCHANGED
    channel.ticks(60, in_flight=5, cache=CacheView(signal=signal))
    assert channel.effects.record.regime is Regime.BELOW
    assert {omega for _, omega, _ in channel.values} == ({1.0} if absent else {1.0, 0.1})


def test_overlap_weight_returns_once_workers_differ_again_and_after_an_operator():
    """E6: what is held back is done when it has an effect; an operator's ω is never kept for ours."""
    channel = Channel()
    channel.ticks(40, p99_s=50.0)
    absent = CacheView(signal=CacheSignal.ABSENT)
    channel.ticks(60, in_flight=5, cache=absent)
    assert channel.values[-1] == (0.0, 0.1, ParamsKind.POLICY)
    channel.tick(in_flight=5, cache=CacheView(signal=CacheSignal.PRESENT))
    assert channel.values[-1] == (0.0, 1.0, ParamsKind.POLICY)
    channel.state = pinned(channel.state, Pin(router_temperature=0.3, overlap_weight=0.4))
    channel.ticks(2, in_flight=5, cache=absent)
    channel.state = released(channel.state)
    channel.tick(in_flight=5, cache=absent)
    assert channel.values[-2:] == [(0.3, 0.4, ParamsKind.PIN), (0.0, 1.0, ParamsKind.POLICY)]


@pytest.mark.parametrize(("shed_frac", "censored"), [(0.0, False), (0.01, False), (0.011, True)])
def test_an_estimate_of_survivors_is_flagged(shed_frac, censored):
    """S8: more than 1 % of arrivals refused, in the window."""
    channel = Channel()
    channel.tick(shed_frac=shed_frac)
    assert channel.effects.record.censored is censored


def test_a_baseline_learnt_below_the_knee_is_stored_for_a_successor_under_the_same_revision():
    """I6: one record a minute at most, and no change told: parameters are the same."""
    channel = Channel()
    channel.ticks(61)
    assert [params.revision for params in channel.published] == [1, 1]
    assert channel.current.baseline_s == pytest.approx(0.5)
    assert channel.effects.events == ()
    assert channel.effects.record.applied is Applied.UNCHANGED
    channel.ticks(300)
    assert len(channel.published) == 2  # nothing new to tell
    successor = take_over(channel.current)
    assert successor.regime.baseline_s == channel.current.baseline_s


def test_a_successor_knows_the_unloaded_iteration_time():
    """Learnt again under load it would be the loaded one."""
    state = take_over(record(ParamsKind.POLICY, iteration_baseline_s=0.007))
    assert state.pressure.iteration.value_s == 0.007


def test_baselines_travel_in_the_stored_record_and_older_records_have_none():
    """Lenient for what was written before they were; refused whole when they cannot be."""
    stored = encode_params(record(ParamsKind.POLICY, baseline_s=0.1, iteration_baseline_s=0.007))
    assert decode_params(stored).iteration_baseline_s == 0.007
    older = decode_params(b'{"router_temperature": 0.4, "overlap_weight": 0.5}')
    assert (older.baseline_s, older.iteration_baseline_s) == (None, None)
    with pytest.raises(ParamsError, match="iteration_baseline_s"):
        decode_params(b'{"router_temperature": 0.4, "overlap_weight": 0.5, "iteration_baseline_s": 0}')


def test_the_record_and_the_event_name_what_drives_the_regime():
    """Pool and resource with value and threshold; the pool's regime stands beside the system's."""
    channel = Channel()
    decode = [full_worker(number) for number in (1, 2)]
    told = [event for _ in range(6) for event in channel.tick(workers=tuple(decode)).events]
    effects = channel.effects
    regime_event = next(event for event in told if event.name == "poa.regime.changed")
    assert regime_event.details == {
        "driver": "decode.kv_blocks",
        "value": 0.95,
        "threshold": 0.9,
        "value_s": None,
        "threshold_s": None,
        "dwell_left_s": 5.0,
        "mode": Mode.ACTIVE,
    }
    assert effects.record.driver == "decode.kv_blocks"
    assert effects.record.bottleneck == "decode"
    assert effects.record.pool_regimes["decode"].resource == "kv_blocks"
