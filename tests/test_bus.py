"""The bus without a server: it says so, at once, and closes."""

import asyncio
import time

import pytest
from nats_server import free_port

from dynamo_poa.bus import Bus, heeding_cancellation
from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import BusError


async def test_entering_and_leaving_without_a_server_takes_no_time() -> None:
    """Case I1, third run: a process started while NATS is down waits for it and can be stopped."""
    started_s = time.monotonic()
    async with Bus(f"nats://127.0.0.1:{free_port()}", name="test", clock=SystemClock()) as bus:
        await asyncio.sleep(0.05)  # in the middle of connecting
        assert not bus.connected
    assert time.monotonic() - started_s < 1.0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_waiting_for_a_server_in_vain_names_it() -> None:
    """Bad input: an unreachable NATS is one message with its address."""
    url = f"nats://127.0.0.1:{free_port()}"
    async with Bus(url, name="test", clock=SystemClock()) as bus:
        with pytest.raises(
            BusError, match=rf"NATS at {url}: no connection within 0.1 s \(ConnectionRefusedError"
        ):
            await bus.wait_connected(0.1)


async def test_everything_is_refused_at_once_while_not_connected() -> None:
    """Requests never wait for the bus: what needs a connection fails, it does not queue."""
    url = f"nats://127.0.0.1:{free_port()}"
    async with Bus(url, name="test", clock=SystemClock()) as bus:
        refusal = f"NATS at {url}: not connected"
        with pytest.raises(BusError, match=refusal):
            await bus.publish("a", b"")
        with pytest.raises(BusError, match=refusal):
            await bus.request("a", b"", timeout_s=5)
        with pytest.raises(BusError, match=refusal):
            await bus.kv_get("bucket", "key")
        with pytest.raises(BusError, match=refusal):
            await bus.kv_put("bucket", "key", b"")


def test_a_password_in_the_address_is_never_shown() -> None:
    """Messages and logs carry the address."""
    clock = SystemClock()
    assert Bus("nats://user:secret@host:4222", name="test", clock=clock).url == "nats://host:4222"
    assert Bus("nats://host:4222", name="test", clock=clock).url == "nats://host:4222"


async def test_a_cancellation_that_meets_the_answer_is_not_lost() -> None:
    """nats-py waits with `asyncio.wait_for`, which in Python 3.11 forgets it; the task would never stop."""
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(heeding_cancellation(asyncio.wait_for(answer, 5)))
    await asyncio.sleep(0)
    answer.set_result(b"")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
