"""The parameter channel over a real nats-server: heartbeat, late join, outages, poisoned store, lease."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats_server import NatsServer
from structlog.testing import capture_logs
from waiting import eventually

from dynamo_poa.bus import KV_VALUE_BYTES, Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import ActuationError, BusError
from dynamo_poa.params import KEY, ParamsHolder, ParamsPublisher, ParamsSubscriber, bucket, encode_params
from dynamo_poa.values import Mode, ParamsKind, RouterParams

NAMESPACE = "test"
STATIC = RouterParams(revision=0, router_temperature=0.0, overlap_weight=1.0)
CLOCK = SystemClock()


def record(revision: int, router_temperature: float = 0.5, lease_s: float = 30.0) -> RouterParams:
    return RouterParams(
        revision=revision,
        router_temperature=router_temperature,
        overlap_weight=0.8,
        kind=ParamsKind.POLICY,
        lease_s=lease_s,
    )


def bus_at(server: NatsServer, name: str = "test") -> Bus:
    return Bus(server.url, name=name, clock=CLOCK)


def publisher_on(bus: Bus) -> ParamsPublisher:
    return ParamsPublisher(bus, NAMESPACE, "controller-1", CLOCK, Mode.ACTIVE)


def holder() -> ParamsHolder:
    return ParamsHolder(STATIC, clock_s=CLOCK.monotonic_s)


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """The controller's connection, which the tests also use as an operator's."""
    async with bus_at(nats_server) as connected:
        await connected.wait_connected(5)
        yield connected


async def taken_over(router: ParamsSubscriber, params: RouterParams) -> None:
    await eventually(lambda: router.holder.current == params)


async def restart(server: NatsServer, *buses: Bus) -> None:
    server.stop()
    await eventually(lambda: not any(bus.connected for bus in buses))
    server.start()
    for bus in buses:
        await bus.wait_connected(5)


async def test_a_published_record_is_in_force_at_the_router_at_once(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Contract: published on change by heartbeat and stored; the change is logged with every field."""
    changes: list[RouterParams] = []
    async with bus_at(nats_server, "router") as router_bus:
        router = ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK, on_change=changes.append)
        with capture_logs() as logs:
            async with router:
                assert await router.wait_loaded(5)  # the store is empty, and that is known
                assert (router.holder.current, router.holder.source) == (STATIC, "static")
                publisher = publisher_on(bus)
                await publisher.publish(record(1))
                assert await eventually(lambda: changes == [record(1)]) < 0.5
                await publisher.publish(record(2, 0.9))
                await publisher.heartbeat()
                await eventually(lambda: changes == [record(1), record(2, 0.9)])
        taken = [entry for entry in logs if entry["event"] == "poa.params.taken"]
    assert taken[1] == {
        "event": "poa.params.taken",
        "log_level": "info",
        "namespace": NAMESPACE,
        "source": "heartbeat",
    } | msgspec.structs.asdict(record(2, 0.9))
    assert len(taken) == 2
    entry = await bus.kv_get(bucket(NAMESPACE), KEY)
    assert entry is not None
    assert entry.value == encode_params(record(2, 0.9))


async def test_a_late_joiner_reads_the_store_without_a_controller(nats_server: NatsServer, bus: Bus) -> None:
    """Case I6: with the controller dead a restarted router still has the parameters before its first pick."""
    await publisher_on(bus).publish(record(4))
    async with (
        bus_at(nats_server, "router") as router_bus,
        ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router,
    ):
        assert await router.wait_loaded(5)
        assert (router.holder.current, router.holder.source) == (record(4), "store")


async def test_a_router_started_without_a_server_catches_up(tmp_path: Path) -> None:
    """Case I1, third run: static parameters until the server comes, then what is published."""
    server = NatsServer(tmp_path / "nats")
    async with (
        bus_at(server, "router") as router_bus,
        bus_at(server) as bus,
        ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router,
    ):
        publisher = publisher_on(bus)
        with pytest.raises(ActuationError, match=r"revision 1 not published: NATS at .*: not connected"):
            await publisher.publish(record(1))
        assert publisher.current is None  # nothing is in force that nobody was told
        assert not await router.wait_loaded(0.2)
        assert router.holder.current == STATIC
        with server:
            await router_bus.wait_connected(5)
            await bus.wait_connected(5)
            await publisher.publish(record(1))
            await eventually(lambda: router.holder.current == record(1))
            assert publisher.store_errors == 1
            entry = await bus.kv_get(bucket(NAMESPACE), KEY)
            assert entry is not None
            assert entry.value == encode_params(record(1))


async def test_what_was_not_published_after_all_is_not_taken_for_an_operators(
    nats_server: NatsServer,
) -> None:
    """A write whose answer is lost with its heartbeat is our own, and the record in force replaces it."""

    class HalfDeafBus(Bus):
        deaf = False

        async def publish(self, subject: str, data: bytes) -> None:
            if self.deaf:
                raise BusError("not connected")
            await super().publish(subject, data)

        async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
            revision = await super().kv_put(bucket, key, value)
            if self.deaf:
                raise BusError("no answer")
            return revision

    async with HalfDeafBus(nats_server.url, name="test", clock=CLOCK) as bus:
        await bus.wait_connected(5)
        publisher = publisher_on(bus)
        await publisher.publish(record(1))
        bus.deaf = True
        with pytest.raises(ActuationError):
            await publisher.publish(record(2, 0.9))
        bus.deaf = False
        assert publisher.current == record(1)
        assert await publisher.poll_store() is None
        entry = await bus.kv_get(bucket(NAMESPACE), KEY)
        assert entry is not None
        assert entry.value == encode_params(record(1))


async def test_both_ends_heal_after_the_server_restarts(nats_server: NatsServer, bus: Bus) -> None:
    """Case I1: parameters hold during the outage, and the next change arrives within seconds of its end."""
    async with (
        bus_at(nats_server, "router") as router_bus,
        ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router,
    ):
        await router.wait_loaded(5)
        publisher = publisher_on(bus)
        await publisher.publish(record(1))
        await eventually(lambda: router.holder.current == record(1))
        for revision in (2, 3):
            await restart(nats_server, bus, router_bus)
            assert router.holder.current == record(revision - 1)
            await publisher.publish(record(revision))
            await taken_over(router, record(revision))
        assert router.holder.refused == Counter()


async def test_a_change_missed_during_an_outage_is_read_from_the_store(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Contract: routers read the store after each reconnect."""
    async with (
        bus_at(nats_server, "router") as router_bus,
        ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router,
    ):
        await router.wait_loaded(5)
        await publisher_on(bus).publish(record(1))
        await eventually(lambda: router.holder.current == record(1))
        await bus.kv_put(bucket(NAMESPACE), KEY, encode_params(record(2)))  # no heartbeat says so
        await restart(nats_server, bus, router_bus)
        await eventually(lambda: router.holder.current == record(2))
        assert router.holder.source == "store"


async def test_silence_leads_to_the_static_record_and_the_next_heartbeat_back(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Safe state: after the lease a router falls back to its static parameters, says so, and recovers."""
    changes: list[RouterParams] = []
    short = record(7, lease_s=0.6)
    async with bus_at(nats_server, "router") as router_bus:
        with capture_logs() as logs:
            async with ParamsSubscriber(
                router_bus, NAMESPACE, holder(), CLOCK, on_change=changes.append
            ) as router:
                await router.wait_loaded(5)
                publisher = publisher_on(bus)
                await publisher.publish(short)
                await eventually(lambda: changes == [short, STATIC])
                assert router.holder.source == "static"
                await publisher.heartbeat()
                await eventually(lambda: changes == [short, STATIC, short])
        assert [entry["event"] for entry in logs if entry["event"].startswith("poa.params")][:3] == [
            "poa.params.taken",
            "poa.params.expired",
            "poa.params.taken",
        ]


Operator = Callable[[Any], Awaitable[Any]]

POISON: list[tuple[str, Operator]] = [
    ("not_finite", lambda kv: kv.put(KEY, b'{"router_temperature": NaN, "overlap_weight": 1}')),
    ("not_finite", lambda kv: kv.put(KEY, b'{"router_temperature": Infinity, "overlap_weight": 1}')),
    ("out_of_range", lambda kv: kv.put(KEY, b'{"router_temperature": 1e308, "overlap_weight": 1}')),
    ("out_of_range", lambda kv: kv.put(KEY, b'{"router_temperature": 0.5, "overlap_weight": -0.5}')),
    ("missing", lambda kv: kv.put(KEY, b'{"router_temperature": 0.5}')),
    ("type", lambda kv: kv.put(KEY, b'{"router_temperature": "0.7", "overlap_weight": 1}')),
    ("not_json", lambda kv: kv.put(KEY, b'{"router_temperature": 0.7, "overl')),
    ("empty", lambda kv: kv.put(KEY, b"")),
    ("too_large", lambda kv: kv.put(KEY, bytes(KV_VALUE_BYTES - 1024))),
    ("deleted", lambda kv: kv.delete(KEY)),
    ("deleted", lambda kv: kv.purge(KEY)),
]


async def test_poison_in_the_store_is_refused_counted_and_healed(nats_server: NatsServer, bus: Bus) -> None:
    """Case I3: the last good one stays stored; each write is dealt with once; a valid one is returned."""
    publisher = publisher_on(bus)
    await publisher.publish(record(5))
    operator = await nats.connect(nats_server.url)
    kv = await operator.jetstream().key_value(bucket(NAMESPACE))
    expected: Counter[str] = Counter()
    with capture_logs() as logs:
        for reason, poison in POISON:
            await poison(kv)
            expected[reason] += 1
            for _ in range(3):
                assert await publisher.poll_store() is None
            assert publisher.refused == expected
            entry = await bus.kv_get(bucket(NAMESPACE), KEY)
            assert entry is not None
            assert entry.value == encode_params(record(5))
    refused = [entry["refusal"] for entry in logs if entry["event"] == "poa.params.refused"]
    assert refused == list(expected)  # the first of each reason; no log loop
    await kv.put(KEY, b'{"router_temperature": 0.7, "overlap_weight": 0.3, "note": "by hand"}')
    assert await publisher.poll_store() == RouterParams(
        revision=0, router_temperature=0.7, overlap_weight=0.3, kind=ParamsKind.EXTERNAL
    )
    assert await publisher.poll_store() is None
    await operator.close()


async def test_a_router_that_joins_on_poison_stays_with_its_static_record(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Case I3: refused, counted and said once, then the heartbeat applies."""
    await bus.kv_put(bucket(NAMESPACE), KEY, b'{"router_temperature": NaN, "overlap_weight": 1}')
    async with bus_at(nats_server, "router") as router_bus:
        with capture_logs() as logs:
            async with ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router:
                await eventually(lambda: router.holder.refused == Counter({"not_finite": 1}))
                assert router.holder.current == STATIC
                assert await router.wait_loaded(5)
                await publisher_on(bus).publish(record(1))
                await eventually(lambda: router.holder.current == record(1))
        assert [entry for entry in logs if entry["event"] == "poa.params.refused"] == [
            {
                "event": "poa.params.refused",
                "log_level": "warning",
                "namespace": NAMESPACE,
                "source": "store",
                "refusal": "not_finite",
                "key": "router_temperature",
                "value": "nan",
                "bound": "a finite number in [0, 100]",
                "count": 1,
            }
        ]


async def test_a_restarted_controller_takes_over_what_is_stored(bus: Bus) -> None:
    """Case I6: no jump to the baseline; revisions go on from the highest, past poison too."""
    assert await publisher_on(bus).load() is None
    first = publisher_on(bus)
    for revision in (55, 56, 57):
        await first.publish(record(revision))
    assert await publisher_on(bus).load() == record(57)
    await bus.kv_put(bucket(NAMESPACE), KEY, b"{")
    await bus.kv_put(bucket(NAMESPACE), KEY, b"")
    second = publisher_on(bus)
    assert await second.load() == record(57)
    assert second.refused == Counter({"empty": 1, "not_json": 1})
    assert await second.poll_store() is None  # known already, not counted again
    assert second.refused == Counter({"empty": 1, "not_json": 1})
    await bus.kv_put(bucket(NAMESPACE), KEY, b'{"router_temperature": 0.7, "overlap_weight": 0.3}')
    assert await publisher_on(bus).load() == RouterParams(
        revision=57, router_temperature=0.7, overlap_weight=0.3, kind=ParamsKind.EXTERNAL
    )


async def test_a_store_lost_with_its_server_is_written_again(tmp_path: Path) -> None:
    """A server that comes back empty must serve late joiners again."""
    with NatsServer(tmp_path / "one") as server:
        async with bus_at(server) as bus:
            await bus.wait_connected(5)
            publisher = publisher_on(bus)
            await publisher.publish(record(3))
            server.stop()
            await eventually(lambda: not bus.connected)
            with pytest.raises(BusError, match="not connected"):
                await publisher.poll_store()
            with NatsServer(tmp_path / "two", port=server.port):
                await bus.wait_connected(5)
                assert await publisher.poll_store() is None
                entry = await bus.kv_get(bucket(NAMESPACE), KEY)
                assert entry is not None
                assert entry.value == encode_params(record(3))


async def test_without_jetstream_heartbeats_alone_carry_the_channel(tmp_path: Path) -> None:
    """Heartbeat and store are independent: one is enough to publish; the failed write is counted."""
    with NatsServer(tmp_path / "nats", jetstream=False) as server:
        async with (
            bus_at(server, "router") as router_bus,
            bus_at(server) as bus,
            ParamsSubscriber(router_bus, NAMESPACE, holder(), CLOCK) as router,
        ):
            await router_bus.wait_connected(5)
            await bus.wait_connected(5)
            publisher = publisher_on(bus)
            await publisher.publish(record(1))
            await eventually(lambda: router.holder.current == record(1))
            assert await router.wait_loaded(1)
            assert publisher.store_errors == 1
