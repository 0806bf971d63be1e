"""What /metrics says of the controller, and what it does not."""

import msgspec
from dynamo_messages import W1, W2, Sender, card, fp, rm, st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from records import RECORD

from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.fleet import Fleet
from dynamo_poa.telemetry import PolicyView
from dynamo_poa.values import Role, Selection, Setting, WorkerCard


def scraped(metrics):
    """Return every sample of the registry by name and labels."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in samples, "duplicate series"
            samples[key] = sample.value
    return samples


async def test_metrics_say_what_the_record_says():
    """Names and values a scraper sees."""
    metrics = ControllerMetrics()
    await metrics.emit(RECORD)
    samples = scraped(metrics)
    assert samples["poa_hat",] == 1.5
    assert samples["poa_hat_role", ("role", "prefill")] == 1.75
    assert [samples["poa_regime", ("regime", r)] for r in ("below", "transition", "saturated")] == [0, 1, 0]
    assert samples["poa_router_temperature",] == 0.7
    assert samples["poa_router_applied_revision", ("router_id", "r1")] == 3
    assert samples["poa_pool_kv_used_frac", ("role", "prefill")] == 0.25
    assert samples["poa_params_applied_total", ("outcome", "applied")] == 1
    assert samples["poa_messages_dropped_total", ("reason", "schema")] == 1
    assert samples["poa_params_refused_total", ("reason", "not_finite")] == 2
    assert samples["poa_params_swaps_total",] == 2


async def test_each_policys_wish_reason_and_failures_have_series_of_their_own():
    """The one whose word counts and the one in shadow, also when both are of one name."""
    metrics = ControllerMetrics()
    shadow = PolicyView(
        name="table",
        setting=Setting(0.8, 0.1, 4.0, Selection.MARGINAL),
        reason="policy_failed",
        predicted_gain_frac=0.25,
        disabled_left_s=30.0,
        errors=2,
    )
    await metrics.emit(msgspec.structs.replace(RECORD, shadow=shadow, prefill_load_scale=4.0))
    await metrics.emit(msgspec.structs.replace(RECORD, shadow=shadow))
    samples = scraped(metrics)

    def of(name, which, **labels):
        key = {"as": which, "policy": "table"} | labels
        return samples.get((name, *sorted(key.items())))

    def both(name, **labels):
        return [of(name, which, **labels) for which in ("active", "shadow")]

    assert both("poa_policy_router_temperature") == [0.7, 0.8]
    assert both("poa_policy_overlap_weight") == [1.0, 0.1]
    assert both("poa_policy_prefill_load_scale") == [None, 4.0]
    assert both("poa_policy_marginal") == [0, 1]
    assert both("poa_policy_predicted_gain_frac") == [None, 0.25]
    assert both("poa_policy_disabled") == [0, 1]
    assert both("poa_policy_errors_total") == [0, 2]
    assert of("poa_policy_answers_total", "active", reason="table") == 2
    assert of("poa_policy_answers_total", "shadow", reason="policy_failed") == 2
    assert ("poa_prefill_load_scale",) not in samples  # gone with the setting
    assert [samples["poa_selection", ("selection", who)] for who in Selection] == [1, 0]


async def test_what_is_unknown_has_no_series():
    """Absent, not 0 and not NaN; also when it was known a tick before."""
    metrics = ControllerMetrics()
    assert scraped(metrics) == {}
    await metrics.emit(RECORD)
    await metrics.emit(msgspec.structs.replace(RECORD, poa_hat=None, poa_by_role={}, pools={}))
    names = {key[0] for key in scraped(metrics)}
    assert "poa_regime" in names
    assert names.isdisjoint({"poa_hat", "poa_hat_role", "poa_ttft_p99_seconds", "poa_pool_workers"})


async def test_removed_workers_leave_no_series_and_ids_are_exact():
    """O1: 50 workers come and go, then a late message speaks of one; E4: ids past 2^63 as decimal text."""
    fleet = Fleet("workers", 30.0)
    metrics = ControllerMetrics(lambda: fleet.workers(0.0))
    await metrics.emit(RECORD)
    before = len(scraped(metrics))
    big = 14370722098883561847
    for worker_id in range(big, big + 50):
        fleet.set_cards([WorkerCard(worker_id=worker_id, role=Role.DECODE, kv_block_size=16)], 0.0)
        assert (
            "poa_worker_stale",
            ("dp_rank", "0"),
            ("role", "decode"),
            ("worker_id", str(worker_id)),
        ) in scraped(metrics)
    fleet.set_cards([], 0.0)
    payload = {"worker_id": big, "dp_rank": 0, "kv_used_blocks": 9}
    envelope = {"publisher_id": 1, "sequence": 0, "published_at": 0, "topic": "kv_metrics"}
    fleet.observe(
        "namespace.workers.component.backend.endpoint.generate.kv_metrics",
        msgspec.msgpack.encode(envelope | {"payload": msgspec.msgpack.encode(payload)}),
        0.0,
        0.0,
    )
    assert fleet.dropped == {"unknown_worker": 1}
    assert len(scraped(metrics)) == before


async def test_each_ranks_cache_and_each_publishers_clock_are_shown():
    """S1, E1: what is resident, whether that is exact, tokens prefilled, and whose clock is off."""
    fleet = Fleet("ns", 30.0)
    metrics = ControllerMetrics(lambda: fleet.workers(100.0), lambda: fleet.publishers(101.0))
    await metrics.emit(RECORD)
    fleet.set_cards([card(W1), card(W2)], 100.0)
    sender = Sender(fleet)
    sender.send("w1", st(W1, 1, None, [11, 12, 13]), 100.0)
    sender.send("w1", rm(W1, 2, [12]), 100.0)
    sender.send("w2", st(W2, 9, None, [21]), 100.0)
    sender.send("w1", fp(W1, 1, 0.05, np=1, pt=100), 100.0)
    samples = scraped(metrics)

    def of(name, worker_id):
        return samples.get((name, ("dp_rank", "0"), ("role", "aggregated"), ("worker_id", str(worker_id))))

    assert [of("poa_worker_resident_blocks", worker) for worker in (W1, W2)] == [2, 1]
    assert [of("poa_worker_resident_approximate", worker) for worker in (W1, W2)] == [0, 1]
    assert [of("poa_worker_prefill_tokens_total", worker) for worker in (W1, W2)] == [100, 0]
    topics = {key[2][1] for key in samples if key[0] == "poa_publisher_skew_seconds"}
    assert topics == {"kv-events", "forward-pass-metrics"}
    assert {samples[key] for key in samples if key[0] == "poa_publisher_age_seconds"} == {1.0}
