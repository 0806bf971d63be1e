"""What a tick sees, remembers and asks for.

Owns: the records between the loop that sleeps and the step that decides.
Does not own: what is decided on them (controller.py) or how they come about (loop.py).
Invariant: all of them are frozen values, so that a tick can be decided again and gives the same.
"""

from collections.abc import Mapping

import msgspec

from dynamo_poa.config import ControllerConfig
from dynamo_poa.coupling import Advice, AllocationEstimate, CacheSwap, CachingEstimate, Coupling
from dynamo_poa.decisions import Traffic
from dynamo_poa.evidence import PoolReading
from dynamo_poa.load import WorkerState
from dynamo_poa.policies import Answer, Policy
from dynamo_poa.policies.running import PolicyRun
from dynamo_poa.pressure import PressureState
from dynamo_poa.regime_state import RegimeState
from dynamo_poa.telemetry import RouterView, TelemetryRecord
from dynamo_poa.trend import Trend, TrendState
from dynamo_poa.values import (
    Applied,
    CacheView,
    Estimate,
    ParamsKind,
    Pin,
    PoolLoad,
    PoolRegime,
    RequestOutcome,
    Role,
    RouterParams,
    Setting,
    TtftSample,
    WorkerKey,
    WorkerLatency,
)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters that are reported and not decided on."""

    requests_ended: dict[str, int] = {}
    params_refused: dict[str, int] = {}
    messages_received: dict[str, int] = {}
    messages_dropped: dict[str, int] = {}
    message_rate: float | None = None
    failed_ticks: int = 0
    tick_s: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a tick sees.

    current:        the record in force in the channel, None before the first
    announced:      this controller has published, be it only what it took over
    foreign:        a record somebody else wrote to the store since the last tick
    message_age_s:  since the last message of any kind, None before the first
    workers:        every rank as known now, the ones that the pools sum up
    latencies:      what is known of their speed; a rank without an entry has no curve yet
    outcomes:       requests that ended since the last tick
    predicted:      mean cost in seconds of the recent decisions under each setting that could be priced
    caching, allocation, advice, cache_swap:  the other two games, as last priced
    """

    wall_s: float
    monotonic_s: float
    current: RouterParams | None = None
    announced: bool = False
    foreign: RouterParams | None = None
    ttft: TtftSample = TtftSample()
    estimate: Estimate = Estimate(reason="no decisions")
    frozen: Estimate = Estimate(reason="no decisions", method="frozen")
    traffic: Traffic = Traffic()
    cache: CacheView = CacheView()
    pools: Mapping[Role, PoolLoad] = {}
    workers: tuple[WorkerState, ...] = ()
    latencies: Mapping[WorkerKey, WorkerLatency] = {}
    outcomes: tuple[RequestOutcome, ...] = ()
    predicted: Mapping[Setting, float] = {}
    caching: CachingEstimate = CachingEstimate(reason="not priced yet")
    allocation: AllocationEstimate = AllocationEstimate(reason="not priced yet")
    advice: Advice | None = None
    cache_swap: CacheSwap | None = None
    routers: tuple[RouterView, ...] = ()
    bus_connected: bool = True
    message_age_s: float | None = None
    counts: Counts = Counts()


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick.

    pin:        an operator's, through the control service; changed by `pinned` and `released` only
    ended:      why an operator's parameters count no more, until a record that follows them is in force
    kept:       the record in force is an operator's outside write, kept until the regime next changes
    policy, shadow_policy:  the policies between two ticks
    advice:     on the split of workers, as last told
    last_setting, since_s:  what was last seen in force, and since when
    last_held:  the outcome and wish last reported as held, so that it is said once
    """

    regime: RegimeState = RegimeState()
    pressure: PressureState = PressureState()
    trend: TrendState = TrendState()
    pin: Pin | None = None
    ended: str = ""
    kept: bool = False
    tick: int = 0
    swaps: int = 0
    policy: PolicyRun = PolicyRun()
    shadow_policy: PolicyRun = PolicyRun()
    advice: Advice | None = None
    last_setting: Setting | None = None
    since_s: float = 0.0
    last_held: tuple[Applied, Setting] | None = None


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


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick found beside TTFT; empty on stale data.

    answer, shadow:  what the policies said
    coupling:        the three games side by side
    """

    readings: Mapping[Role, PoolReading] = {}
    pools: Mapping[Role, PoolRegime] = {}
    trend: Trend = Trend()
    answer: Answer | None = None
    shadow: Answer | None = None
    coupling: Coupling = Coupling()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the controller runs.

    static:  the router's own
    shadow:  a policy that is only asked
    """

    namespace: str
    config: ControllerConfig
    policy: Policy
    static: Setting
    shadow: Policy | None = None


class Choice(msgspec.Struct, frozen=True):
    """How to route and who wants it."""

    setting: Setting
    kind: ParamsKind
    reason: str
