"""The bus over a real nats-server: reconnects, hangs, overload, requests, key-value."""

import asyncio
import contextlib
import inspect
import os
import time
from pathlib import Path
from typing import Any

import pytest
from nats_server import NatsServer
from pausable_proxy import PausableProxy
from waiting import eventually

from dynamo_poa.bus import Bus, KvEntry
from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import BusError, NoResponders


def bus_at(url: str, ping_interval_s: float = 5.0) -> Bus:
    return Bus(url, name="test", clock=SystemClock(), ping_interval_s=ping_interval_s)


async def publish_when_connected(bus: Bus, subject: str, data: bytes) -> None:
    await bus.wait_connected(5)
    await bus.publish(subject, data)


def coroutine_file(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    assert inspect.iscoroutine(coroutine)
    return coroutine.cr_code.co_filename


async def arrival(got: list[bytes], data: bytes) -> None:
    await eventually(lambda: data in got)


async def publish_until_refused(bus: Bus) -> None:
    for _ in range(64):
        for _ in range(16):
            await bus.publish("elsewhere", bytes(65536))
        await asyncio.sleep(0)  # lets what the socket takes go out


async def test_a_bus_entered_before_its_server_connects_when_it_comes(tmp_path: Path) -> None:
    """Case I1, third run: waits, does not exit; subscriptions made meanwhile work."""
    server = NatsServer(tmp_path / "nats")
    got: list[tuple[str, bytes]] = []
    connects: list[int] = []
    async with bus_at(server.url) as bus:
        bus.subscribe("poa.*.x", lambda subject, data: got.append((subject, data)))
        bus.on_connect(lambda: connects.append(1))
        with pytest.raises(BusError):
            await bus.wait_connected(0.3)
        with server:
            await publish_when_connected(bus, "poa.a.x", b"1")
            await eventually(lambda: got == [("poa.a.x", b"1")])
    assert bus.reconnects == 0
    assert connects == [1]


async def test_after_each_outage_every_message_comes_exactly_once(nats_server: NatsServer) -> None:
    """Case I1, second run: no doubled subscriptions; one callback for each connect."""
    got: list[bytes] = []
    connects: list[int] = []
    async with bus_at(nats_server.url) as bus:
        bus.subscribe("a", lambda _subject, data: got.append(data))
        bus.on_connect(lambda: connects.append(1))
        await publish_when_connected(bus, "a", b"0")
        await eventually(lambda: got == [b"0"])
        for outage in (b"1", b"2", b"3"):
            nats_server.stop()
            assert await eventually(lambda: not bus.connected) < 1.0
            nats_server.start()
            await publish_when_connected(bus, "a", outage)
            await arrival(got, outage)
        assert got == [b"0", b"1", b"2", b"3"]
        assert bus.reconnects == 3
        assert len(connects) == 4


async def test_a_handler_that_raises_costs_its_own_message_only(nats_server: NatsServer) -> None:
    """Case I1: a callback that raises must end neither the subscription nor the connection."""
    got: list[bytes] = []

    def handler(_subject: str, data: bytes) -> None:
        if data == b"bad":
            raise KeyError("worker 7")
        got.append(data)

    def on_connect() -> None:
        raise ValueError("no")

    async with bus_at(nats_server.url) as bus:
        bus.subscribe("a", handler)
        bus.on_connect(on_connect)
        await bus.wait_connected(5)
        assert (bus.handler_errors, bus.last_error) == (1, "ValueError('no')")
        for data in (b"1", b"bad", b"2"):
            await bus.publish("a", data)
        await eventually(lambda: got == [b"1", b"2"])
        assert (bus.handler_errors, bus.last_error) == (2, "KeyError('worker 7')")
        nats_server.stop()
        await eventually(lambda: not bus.connected)
        nats_server.start()
        await publish_when_connected(bus, "a", b"3")
        await eventually(lambda: got == [b"1", b"2", b"3"])
        assert bus.handler_errors == 3


async def test_subscribing_on_a_live_connection_takes_effect(nats_server: NatsServer) -> None:
    """A subscription may be made at any time; `on_connect` calls back at once then."""
    got: list[bytes] = []
    async with bus_at(nats_server.url) as bus:
        await bus.wait_connected(5)
        bus.subscribe("a", lambda _subject, data: got.append(data))
        connects: list[int] = []
        bus.on_connect(lambda: connects.append(1))
        assert connects == [1]
        for _ in range(100):
            await bus.publish("a", b"x")
            if got:
                break
            await asyncio.sleep(0.02)
        assert got[0] == b"x"


async def test_a_hung_connection_is_given_up_and_replaced(nats_server: NatsServer) -> None:
    """Case S4(b): open and nothing passes; a full buffer must not block the publisher."""
    got: list[bytes] = []
    async with PausableProxy(nats_server.port) as proxy, bus_at(proxy.url, ping_interval_s=0.3) as bus:
        bus.subscribe("a", lambda _subject, data: got.append(data))
        await publish_when_connected(bus, "a", b"before")
        await eventually(lambda: got == [b"before"])
        proxy.pause()
        started_s = time.monotonic()
        with pytest.raises(BusError, match="bytes unsent, elsewhere refused"):
            await publish_until_refused(bus)
        assert time.monotonic() - started_s < 1.0
        await eventually(lambda: not bus.connected)
        proxy.resume()
        await publish_when_connected(bus, "a", b"after")
        await eventually(lambda: got == [b"before", b"after"])
        assert bus.reconnects == 1


async def test_leaving_a_hung_connection_takes_seconds_and_leaves_nothing(nats_server: NatsServer) -> None:
    """nats-py's own close waits without limit for a peer that takes no data."""
    async with PausableProxy(nats_server.port) as proxy:
        async with bus_at(proxy.url) as bus:
            bus.subscribe("a", lambda _subject, _data: None)
            await bus.wait_connected(5)
            proxy.pause()
            with pytest.raises(BusError, match="bytes unsent, elsewhere refused"):
                await publish_until_refused(bus)
            started_s = time.monotonic()
        assert time.monotonic() - started_s < 3.0
        left = [task for task in asyncio.all_tasks() if f"{os.sep}nats{os.sep}" in coroutine_file(task)]
        assert left == []
        proxy.resume()
        await eventually(lambda: proxy.connections == 0)  # the socket is gone, not left to be read later


async def test_a_flood_is_dropped_and_counted_and_other_subjects_stay_prompt(nats_server: NatsServer) -> None:
    """Case E8: a slow consumer drops its own messages, each counted; another subject is not late."""
    handled = 0
    late_s: list[float] = []

    def slow(_subject: str, _data: bytes) -> None:
        nonlocal handled
        handled += 1
        until_s = time.perf_counter() + 0.0002
        while time.perf_counter() < until_s:
            pass

    def prompt(_subject: str, data: bytes) -> None:
        late_s.append(time.perf_counter() - float(data))

    async with bus_at(nats_server.url) as bus, bus_at(nats_server.url) as other:
        # More than what one read brings: it fills up only because reading goes ahead of handling.
        bus.subscribe("flood", slow, pending_messages=1000)
        bus.subscribe("metrics", prompt)
        await bus.wait_connected(5)
        await other.wait_connected(5)
        for _ in range(10):
            for _ in range(500):
                await other.publish("flood", bytes(600))
            await other.publish("metrics", repr(time.perf_counter()).encode())
        await eventually(lambda: handled + bus.dropped == 5000)
        await eventually(lambda: len(late_s) == 10)
    assert bus.dropped > 100
    assert handled > 1000
    assert max(late_s) < 1.0
    assert bus.reconnects == 0


async def test_requests_are_answered_or_say_why_not(nats_server: NatsServer) -> None:
    """Request and reply, on every connection; nobody there is told at once, apart from no answer in time."""

    def serve(data: bytes) -> bytes:
        if data == b"bad":
            raise ValueError("bad request")
        return data + b"!"

    async with bus_at(nats_server.url) as bus, bus_at(nats_server.url) as client:
        bus.respond("service", serve)
        await bus.wait_connected(5)
        await client.wait_connected(5)
        assert await client.request("service", b"hello", timeout_s=5) == b"hello!"
        started_s = time.monotonic()
        with pytest.raises(NoResponders, match="nobody answers on elsewhere"):
            await client.request("elsewhere", b"", timeout_s=5)
        assert time.monotonic() - started_s < 1.0
        with pytest.raises(BusError, match="request on service: nats: timeout") as no_answer:
            await client.request("service", b"bad", timeout_s=0.1)
        assert not isinstance(no_answer.value, NoResponders)
        assert bus.handler_errors == 1
        nats_server.stop()
        await eventually(lambda: not bus.connected and not client.connected)
        nats_server.start()
        await bus.wait_connected(5)
        await client.wait_connected(5)
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(NoResponders):  # connected is not yet subscribed anew
                    assert await client.request("service", b"again", timeout_s=5) == b"again!"
                    break
                await asyncio.sleep(0.05)


async def test_a_key_is_absent_then_written_and_survives_a_restart(nats_server: NatsServer) -> None:
    """Never written is None, empty is not; the store outlives the server's restart."""
    async with bus_at(nats_server.url) as bus:
        await bus.wait_connected(5)
        assert await bus.kv_get("poa_test", "params") is None
        assert await bus.kv_put("poa_test", "params", b"one") == 1
        assert await bus.kv_put("poa_test", "params", b"") == 2
        assert await bus.kv_get("poa_test", "params") == KvEntry(b"", 2, deleted=False)
        assert await bus.kv_get("poa_test", "params", revision=1) == KvEntry(b"one", 1, deleted=False)
        assert await bus.kv_get("poa_test", "params", revision=3) is None
        nats_server.stop()
        await eventually(lambda: not bus.connected)
        nats_server.start()
        await bus.wait_connected(5)
        assert await bus.kv_get("poa_test", "params") == KvEntry(b"", 2, deleted=False)


async def test_a_value_larger_than_the_bucket_allows_is_refused(tmp_path: Path) -> None:
    """Case I3, 2 MiB value: the server refuses it also where its payload limit would let it pass."""
    with NatsServer(tmp_path / "nats", max_payload=4 * 2**20) as server:
        async with bus_at(server.url) as bus:
            await bus.wait_connected(5)
            assert await bus.kv_put("poa_test", "params", b"good") == 1
            with pytest.raises(BusError, match="message size exceeds maximum allowed"):
                await bus.kv_put("poa_test", "params", bytes(2 * 2**20))
            assert await bus.kv_get("poa_test", "params") == KvEntry(b"good", 1, deleted=False)


async def test_a_server_without_jetstream_is_told_apart(tmp_path: Path) -> None:
    """The store needs JetStream; everything else works without."""
    with NatsServer(tmp_path / "nats", jetstream=False) as server:
        async with bus_at(server.url) as bus:
            await bus.wait_connected(5)
            with pytest.raises(BusError, match="read of poa_test/params: JetStream is not enabled"):
                await bus.kv_get("poa_test", "params")
            with pytest.raises(BusError, match="write of poa_test/params: JetStream is not enabled"):
                await bus.kv_put("poa_test", "params", b"")


async def test_gathered_messages_come_in_order_and_soon(nats_server: NatsServer) -> None:
    """A subscription that gathers wakes up once for many; none is lost, and a single one is not kept."""
    taken: list[int] = []
    async with bus_at(nats_server.url) as bus:
        bus.subscribe("numbers", lambda _, data: taken.append(int(data)), gather_s=0.05)
        for number in range(500):
            await publish_when_connected(bus, "numbers", str(number).encode())
        await eventually(lambda: len(taken) == 500)
        await publish_when_connected(bus, "numbers", b"500")
        await eventually(lambda: len(taken) == 501)
    assert taken == list(range(501))
