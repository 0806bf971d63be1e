"""What a live run is summed up as."""

import msgspec

from dynamo_poa.bench.load import Result
from dynamo_poa.bench.story import Story, SwapWatch, quantile
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.ttft import sample_of
from dynamo_poa.values import Applied, Mode, ParamsKind, Regime, Role, RouterParams, Selection
from dynamo_poa.wire import Chosen, DecisionBatch, Heartbeat


def record(
    regime: Regime, tau: float, omega: float, swaps: int, poa_hat: float | None = None
) -> TelemetryRecord:
    return TelemetryRecord(
        tick=1,
        at_s=100.0,
        namespace="poa",
        mode=Mode.ACTIVE,
        regime=regime,
        reason="because",
        applied=Applied.UNCHANGED,
        router_temperature=tau,
        overlap_weight=omega,
        revision=swaps,
        kind=ParamsKind.POLICY,
        wanted_router_temperature=tau,
        wanted_overlap_weight=omega,
        swaps=swaps,
        poa_hat=poa_hat,
    )


def result(ttft_s: float | None, error: str = "") -> Result:
    return Result(started_at_s=0.0, ttft_s=ttft_s, latency_s=1.0, tokens=1, error=error)


def test_a_phase_counts_failures_apart_and_takes_quantiles_of_the_rest() -> None:
    """Every request started is accounted for; a failed one has no TTFT."""
    story = Story()
    story.begin("calm", 4, 10.0)
    for hundredths in range(1, 101):
        story.on_result(result(hundredths / 100))
    story.on_result(result(None, "HTTP 503"))
    story.on_telemetry(record(Regime.BELOW, 0.0, 1.0, 0, 1.5))
    story.on_telemetry(record(Regime.BELOW, 0.0, 1.0, 0, 2.5))
    phase = story.end(20.0)
    assert (phase.requests, phase.failed, phase.ttft_p50_s, phase.ttft_p99_s) == (101, 1, 0.5, 0.99)
    assert phase.e2e_p99_s == 1.0
    assert (phase.throughput_rps, phase.poa_hat, phase.regime) == (10.0, 2.0, Regime.BELOW)
    report = story.report(cpu_busy_frac=0.5, seconds=10.0)
    assert (report.failed_requests, report.failures) == (1, {"HTTP 503": 1})
    assert report.bottleneck == "simulated-gpu"
    assert story.report(cpu_busy_frac=0.9, seconds=10.0).bottleneck == "cpu"


def test_regime_changes_and_swaps_are_told_as_they_happen() -> None:
    """The first record tells nothing; each change tells before and after."""
    story = Story()
    story.begin("calm", 4, 0.0)
    assert story.on_telemetry(record(Regime.BELOW, 0.0, 1.0, 3)) == []
    assert story.on_telemetry(record(Regime.TRANSITION, 0.7, 1.0, 4)) == [
        "regime  below → transition   because",
        "swap    τ 0 → 0.7, ω 1 → 1   (revision 4)",
    ]
    assert story.on_telemetry(record(Regime.TRANSITION, 0.7, 1.0, 5)) == []  # the count may come a tick late
    report = story.report(cpu_busy_frac=0.1, seconds=1.0)
    assert report.swaps == 2
    assert not report.went_up_and_down
    story.on_telemetry(record(Regime.BELOW, 0.0, 1.0, 6))
    assert story.report(cpu_busy_frac=0.1, seconds=1.0).went_up_and_down


def test_a_swap_says_what_of_the_setting_changed() -> None:
    """Who selects, and the prefill load scale, beside τ and ω."""
    story = Story()
    first = record(Regime.BELOW, 0.0, 1.0, 0)
    marginal = msgspec.structs.replace(first, selection=Selection.MARGINAL, revision=1)
    scaled = msgspec.structs.replace(first, prefill_load_scale=4.0, revision=2)
    assert story.on_telemetry(first) == []
    assert story.on_telemetry(marginal) == ["swap    selection kv → marginal   (revision 1)"]
    assert story.on_telemetry(scaled) == [
        "swap    selection marginal → kv, prefill load scale own → 4   (revision 2)"
    ]


def test_swap_latency_is_from_the_decision_to_the_earliest_request_with_its_revision() -> None:
    """Repeated heartbeats keep the first instant; the revision found at the start is no swap."""
    watch = SwapWatch()
    for revision, issued_at_s in ((1, 10.0), (2, 20.0), (2, 20.0), (3, 30.0)):
        params = RouterParams(
            revision=revision, router_temperature=0.0, overlap_weight=1.0, issued_at_s=issued_at_s
        )
        watch.on_heartbeat(Heartbeat(controller_id="c", sent_at_s=99.0, mode=Mode.ACTIVE, params=params))
    for revision, at_s in ((1, 11.0), (2, 20.5), (2, 20.2), (3, 30.1)):
        chosen = Chosen("r", Role.DECODE, at_s, at_s, 1, 0, 8, revision, 1, ())
        watch.on_batch(DecisionBatch(router_id="r", sequence=0, sent_at_s=0.0, events=(chosen,)))
    assert [round(latency_s, 6) for latency_s in watch.latencies_s()] == [0.2, 0.1]


def test_quantiles_are_values_that_occurred() -> None:
    """Nearest rank, on worked numbers."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile(range(1, 201), 0.99) == 198


def test_a_phases_p99_is_the_controllers() -> None:
    """The same statistic of the same values (D1c): one slow request among 59 is not their P99."""
    ttfts_s = [50.0] + [1.0] * 58
    story = Story()
    story.begin("calm", 4, 0.0)
    for ttft_s in ttfts_s:
        story.on_result(result(ttft_s))
    assert story.end(1.0).ttft_p99_s == 1.0
    assert sample_of(ttfts_s, fresh=True, source="decisions").p99_s == 1.0
