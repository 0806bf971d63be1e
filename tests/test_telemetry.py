"""One record, thin sinks: what log, event plane and /metrics say of a tick."""

import asyncio
import io
import json
import sys

import aiohttp
import msgspec
import pytest
import structlog
from records import RECORD

from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.errors import BusError, ConfigError
from dynamo_poa.telemetry import (
    BusSink,
    LogSink,
    MetricsServer,
    TelemetryRecord,
    configure_logging,
    exact_numbers,
)


class FakeBus:
    def __init__(self):
        self.sent = []
        self.failing = False

    async def publish(self, subject, data):
        if self.failing:
            raise BusError("not connected")
        self.sent.append((subject, data))


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
