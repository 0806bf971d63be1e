"""One record, thin sinks: what log, event plane and /metrics say of a tick."""

import asyncio
import io
import json
import sys

import aiohttp
import msgspec
import pytest
import structlog
from dynamo_messages import W1, W2, Sender, card, fp, rm, st
from prometheus_client.parser import text_string_to_metric_families
from records import RECORD

from dynamo_poa.errors import BusError, ConfigError
from dynamo_poa.fleet import Fleet
from dynamo_poa.telemetry import (
    BusSink,
    ControllerMetrics,
    LogSink,
    MetricsServer,
    TelemetryRecord,
    configure_logging,
    exact_numbers,
)
from dynamo_poa.values import Role, WorkerCard


class FakeBus:
    def __init__(self):
        self.sent = []
        self.failing = False

    async def publish(self, subject, data):
        if self.failing:
            raise BusError("not connected")
        self.sent.append((subject, data))


@pytest.fixture(autouse=True)
def _structlog_defaults():
    yield
    structlog.reset_defaults()


def scraped(metrics):
    """Return every sample of the registry by name and labels."""
    from prometheus_client import generate_latest

    samples = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in samples, "duplicate series"
            samples[key] = sample.value
    return samples


async def test_the_log_line_is_the_record():
    """One canonical line per tick: keys are the record's field names."""
    with structlog.testing.capture_logs() as lines:
        await LogSink(structlog.get_logger()).emit(RECORD)
    assert lines == [{"event": "poa.tick", "log_level": "info", **msgspec.to_builtins(RECORD)}]


async def test_the_event_plane_gets_the_record_and_a_dead_bus_costs_only_that():
    """poa.<namespace>.telemetry, msgpack; a sink never raises."""
    bus = FakeBus()
    sink = BusSink(bus, "poa")
    await sink.emit(RECORD)
    (subject, data), *rest = bus.sent
    assert (subject, rest) == ("poa.poa.telemetry", [])
    assert msgspec.msgpack.decode(data, type=TelemetryRecord) == RECORD
    bus.failing = True
    await sink.emit(RECORD)
    assert sink.dropped == 1


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


async def test_the_server_answers_metrics_and_health():
    """/health is 200 when ready and 503 before; /metrics is Prometheus' text, also for 20 at once."""
    metrics, ready = ControllerMetrics(), False
    await metrics.emit(RECORD)
    async with (
        MetricsServer(metrics.registry, 0, lambda: ready) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        async with client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (503, {"ready": False})
        ready = True
        async with client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"ready": True})

        async def scrape():
            async with client.get("/metrics") as answer:
                assert answer.content_type == "text/plain"
                return await answer.text()

        texts = await asyncio.gather(*(scrape() for _ in range(20)))
        assert len(set(texts)) == 1
        assert "poa_hat 1.5\n" in texts[0]


async def test_a_port_in_use_is_a_configuration_error_that_names_it():
    """O1: two servers on one port."""
    metrics = ControllerMetrics()
    async with MetricsServer(metrics.registry, 0, lambda: True) as first:
        second = MetricsServer(metrics.registry, first.port, lambda: True, key="PoaRouter.metrics_port")
        with pytest.raises(ConfigError) as caught:
            await second.__aenter__()
        assert caught.value.problems == (
            f"PoaRouter.metrics_port = {first.port}: must be a free port on 127.0.0.1, this one is in use",
        )


def test_logs_are_json_lines_with_exact_numbers(monkeypatch):
    """Each line parses; ids past 2^53 are text so that a JSON reader gives them back exactly (E4)."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info")
    log = structlog.get_logger()
    log.debug("poa.left.out")
    log.info("poa.worker.seen", worker_id=2**64 - 1, ids=[2**53 + 1, 5], by_id={2**63: 1}, ok=True)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("poa.tick.failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert {key: first[key] for key in ("event", "level", "worker_id", "ids", "by_id", "ok")} == {
        "event": "poa.worker.seen",
        "level": "info",
        "worker_id": "18446744073709551615",
        "ids": ["9007199254740993", 5],
        "by_id": {"9223372036854775808": 1},
        "ok": True,
    }
    assert "ValueError: no" in second["exception"]


def test_numbers_a_json_reader_keeps_are_left_alone():
    """Only what would be rounded becomes text."""
    event = {"a": 2**53, "b": 1.5, "c": None, "d": "x", "e": True}
    assert exact_numbers(None, "info", event) == event
