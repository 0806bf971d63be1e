"""One telemetry record with every part filled in."""

from dynamo_poa.telemetry import RouterView, TelemetryRecord
from dynamo_poa.values import (
    Applied,
    Curve,
    Mode,
    ParamsKind,
    PoolLoad,
    Regime,
    Role,
    Shares,
    WorkerKey,
    WorkerLatency,
)

RECORD = TelemetryRecord(
    tick=7,
    at_s=1_800_000_000.25,
    namespace="poa",
    mode=Mode.ACTIVE,
    regime=Regime.TRANSITION,
    reason="TTFT P99 2.000 s at or over θ1 1.000 s",
    applied=Applied.APPLIED,
    router_temperature=0.7,
    overlap_weight=1.0,
    revision=3,
    kind=ParamsKind.POLICY,
    wanted_router_temperature=0.7,
    wanted_overlap_weight=1.0,
    poa_hat=1.5,
    poa_by_role={"prefill": 1.75},
    poa_low=1.25,
    poa_high=1.75,
    poa_samples=64,
    poa_shares=Shares(miss=0.125, congestion=0.375, capacity=0.5),
    poa_frozen=1.125,
    stragglers=(
        WorkerLatency(
            key=WorkerKey(14370722098883561847, 0),
            role=Role.DECODE,
            curve=Curve(),
            factor=5.0,
            straggler=True,
        ),
    ),
    pools={"prefill": PoolLoad(role=Role.PREFILL, workers=2, kv_used_frac=0.25)},
    routers=(RouterView(router_id="r1", revision=3, source="heartbeat", dropped=0, in_flight={}, age_s=0.1),),
    messages_received={"kv-events": 10},
    params_refused={"not_finite": 2},
    messages_dropped={"schema": 1},
    bus_connected=True,
    swaps=2,
)
