"""Kept connections to workers: frames, their acknowledgements in order, refusals, silence and loss."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from waiting import eventually

from dynamo_poa.clock import ManualClock, SystemClock
from dynamo_poa.errors import WorkerUnreachable
from dynamo_poa.relay_workers import WorkerConnections
from dynamo_poa.values import Address

W = 0xF55807E0DE523495  # above 2^63
OK = b"\0\0\0\0"


def refusal(text: str) -> bytes:
    return len(text).to_bytes(4, "big") + text.encode()


class Worker:
    """A listener of workers: takes what comes and acknowledges what the test says."""

    def __init__(self, *, reads: bool = True) -> None:
        self.got: list[bytearray] = []  # by connection
        self.ended: list[bool] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._reads = reads
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Worker":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for number in range(len(self._writers)):
            self.reset(number)
        await eventually(lambda: all(self.ended))

    def address(self, worker_id: int = W) -> Address:
        assert self._server is not None
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1], f"{worker_id:x}/generate")

    def say(self, data: bytes, connection: int = -1) -> None:
        self._writers[connection].write(data)

    def close(self, connection: int = -1) -> None:
        self._writers[connection].close()

    def reset(self, connection: int = -1) -> None:
        self._writers[connection].transport.abort()

    async def has(self, *frames: bytes, connection: int = -1) -> None:
        await eventually(
            lambda: len(self.got) > max(connection, 0) and bytes(self.got[connection]) == b"".join(frames)
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.got)
        self.got.append(bytearray())
        self.ended.append(False)
        self._writers.append(writer)
        try:
            if not self._reads:
                writer.transport.pause_reading()
            while data := await reader.read(65536):
                self.got[number] += data
        except OSError:
            pass
        finally:
            self.ended[number] = True
            writer.close()


@asynccontextmanager
async def connected(clock: Any = None, **settings: Any) -> AsyncIterator[tuple[Worker, WorkerConnections]]:
    async with Worker() as worker, WorkerConnections(clock or SystemClock(), **settings) as connections:
        yield worker, connections


async def taken(worker: Worker, connections: WorkerConnections, frame: bytes = b"x") -> Any:
    """Deliver one frame and have it acknowledged."""
    before = sum(map(len, worker.got))
    sent = asyncio.ensure_future(connections.deliver(worker.address(), frame))
    await eventually(lambda: sum(map(len, worker.got)) == before + len(frame))
    worker.say(OK)
    return await sent


async def test_a_frame_is_delivered_when_the_worker_has_taken_it() -> None:
    """Not when it was written. Source: protocol: an empty acknowledgement."""
    async with connected() as (worker, connections):
        sent = asyncio.ensure_future(connections.deliver(worker.address(), memoryview(b"frame")))
        await worker.has(b"frame")
        await asyncio.sleep(0.02)
        assert not sent.done()
        worker.say(OK)
        assert not (await sent).done()


async def test_frames_share_a_connection_and_acknowledgements_come_in_order_however_they_are_cut() -> None:
    """Several in a segment, one in several: the third is a refusal and is the third frame's."""
    async with connected() as (worker, connections):
        sent = []
        for number in range(4):
            sent.append(asyncio.ensure_future(connections.deliver(worker.address(number), b"%d" % number)))
            await worker.has(b"0123"[: number + 1])
        answer = OK + OK + refusal("Unknown endpoint: 2/generate") + OK
        for byte in answer[:11]:
            worker.say(bytes([byte]))
            await asyncio.sleep(0.001)
        worker.say(answer[11:])
        results = await asyncio.gather(*sent, return_exceptions=True)
        assert [isinstance(result, asyncio.Future) for result in results] == [True, True, False, True]
        assert isinstance(results[2], WorkerUnreachable)
        assert (results[2].worker_id, results[2].detail) == (2, "Unknown endpoint: 2/generate")
        assert (len(worker.got), connections.open) == (1, 1)


async def test_a_worker_that_drains_refuses_and_its_connection_stays() -> None:
    """It says so from SIGTERM until it exits, on all connections. Source: measured on 1.4.2."""
    async with connected() as (worker, connections):
        running = await taken(worker, connections)
        sent = asyncio.ensure_future(connections.deliver(worker.address(), b"y"))
        await worker.has(b"x", b"y")
        worker.say(refusal("Unknown endpoint: a/generate"))
        with pytest.raises(WorkerUnreachable):
            await sent
        assert not running.done()


async def test_a_refused_connection_is_told_with_the_workers_id() -> None:
    """The caller avoids that worker for a while."""
    with socket.socket() as taken_port:
        taken_port.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = Address("127.0.0.1", taken_port.getsockname()[1], f"{W:x}/generate")
        async with WorkerConnections(SystemClock()) as connections:
            for _ in range(2):
                with pytest.raises(WorkerUnreachable, match="Connect call failed") as caught:
                    await connections.deliver(address, b"frame")
                assert caught.value.worker_id == W


@pytest.mark.parametrize("way", [Worker.reset, Worker.close])
async def test_a_connection_that_ends_before_the_acknowledgement_is_told_and_replaced(way: Any) -> None:
    """Whether the worker has got the frame is not known: it goes elsewhere."""
    async with connected() as (worker, connections):
        sent = asyncio.ensure_future(connections.deliver(worker.address(), b"frame"))
        await worker.has(b"frame")
        way(worker)
        with pytest.raises(WorkerUnreachable, match="connection lost"):
            await sent
        assert connections.open == 0
        await taken(worker, connections)
        assert len(worker.got) == 2


async def test_what_took_a_frame_and_is_lost_afterwards_is_told_to_those_who_wait_for_its_answer() -> None:
    """A killed worker never dials back; who has been dialled back to cancels and hears nothing."""
    async with connected() as (worker, connections):
        waits = await taken(worker, connections)
        answered = await taken(worker, connections)
        answered.cancel()
        worker.reset()
        error = await asyncio.wait_for(waits, 5)
        assert (type(error), error.worker_id) == (WorkerUnreachable, W)
        assert answered.cancelled()


async def test_a_connection_lost_together_with_the_acknowledgement_is_told_as_well() -> None:
    """The worker took the frame and died in the same breath."""
    async with connected() as (worker, connections):
        sent = asyncio.ensure_future(connections.deliver(worker.address(), b"frame"))
        await worker.has(b"frame")
        worker.say(OK)
        worker.close()
        error = await asyncio.wait_for(await sent, 5)
        assert error.detail == "connection lost: closed by the worker"


async def test_a_silent_worker_is_unreachable_and_its_connection_takes_no_further_frame() -> None:
    """Dynamo's own client goes on with the order off by one: later requests get their neighbours' answers."""
    async with connected(ack_timeout_s=0.4) as (worker, connections):
        waits = await taken(worker, connections)
        with pytest.raises(WorkerUnreachable, match=r"no acknowledgement within 0\.4 s"):
            await connections.deliver(worker.address(), b"y")
        sent = asyncio.ensure_future(connections.deliver(worker.address(), b"z"))
        await worker.has(b"z", connection=1)
        worker.say(OK, 0)  # late, and of `y`
        await asyncio.sleep(0.02)
        assert not sent.done()
        worker.say(OK, 1)
        await sent
        assert not waits.done()  # what it took before is still its own
        assert not worker.ended[0]
        waits.cancel()
        await eventually(lambda: worker.ended[0])
        assert connections.open == 1


async def test_a_half_open_connection_that_takes_no_more_bytes_is_unreachable() -> None:
    """The kernel's buffers fill, then frames are held back here, none of them longer than the time-out."""
    async with (
        Worker(reads=False) as worker,
        WorkerConnections(SystemClock(), ack_timeout_s=0.2) as connections,
    ):
        frame = bytes(4 * 2**20)
        results = await asyncio.gather(
            *(connections.deliver(worker.address(), frame) for _ in range(8)), return_exceptions=True
        )
        assert {str(result) for result in results} == {f"worker {W}: no acknowledgement within 0.2 s"}
        assert len(results) == 8
        await eventually(lambda: connections.open == 0)


async def test_a_listener_that_does_not_answer_the_call_is_unreachable() -> None:
    """Its queue is full: the connection is neither refused nor made."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        async with WorkerConnections(SystemClock(), ack_timeout_s=0.2) as connections:
            with pytest.raises(WorkerUnreachable, match=r"no connection within 0\.2 s"):
                await connections.deliver(Address("127.0.0.1", port, "a/generate"), b"frame")
        for filler in fillers:
            filler.close()


async def test_who_gives_up_keeps_its_place_in_the_order() -> None:
    """A client that hangs up must not shift the acknowledgements of its neighbours."""
    async with connected() as (worker, connections):
        first = asyncio.ensure_future(connections.deliver(worker.address(), b"1"))
        await worker.has(b"1")
        second = asyncio.ensure_future(connections.deliver(worker.address(), b"2"))
        await worker.has(b"1", b"2")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        worker.say(refusal("no"))
        await asyncio.sleep(0.02)
        assert not second.done()
        worker.say(OK)
        assert not (await second).done()


async def test_no_more_frames_than_allowed_wait_for_their_acknowledgement() -> None:
    """The rest waits here, in order, and goes out as room comes."""
    async with connected(in_flight=2) as (worker, connections):
        sent = [asyncio.ensure_future(connections.deliver(worker.address(), b"%d" % n)) for n in range(5)]
        await worker.has(b"01")
        await asyncio.sleep(0.02)
        assert bytes(worker.got[0]) == b"01"
        worker.say(OK)
        await worker.has(b"012")
        worker.say(OK + OK)
        await worker.has(b"01234")
        worker.say(OK + OK)
        assert len(await asyncio.gather(*sent)) == 5


async def test_frames_held_back_are_told_when_the_connection_is_lost() -> None:
    """They wait for room on a connection that has none to give any more."""
    async with connected(in_flight=1) as (worker, connections):
        sent = [asyncio.ensure_future(connections.deliver(worker.address(), b"%d" % n)) for n in range(3)]
        await worker.has(b"0")
        worker.reset()
        results = await asyncio.gather(*sent, return_exceptions=True)
        assert [type(result) for result in results] == [WorkerUnreachable] * 3


async def test_a_burst_of_first_requests_opens_one_connection() -> None:
    """Also when it fails: each of them is told."""
    async with connected() as (worker, connections):
        sent = [asyncio.ensure_future(connections.deliver(worker.address(), b"x")) for _ in range(50)]
        await worker.has(b"x" * 50)
        worker.say(OK * 50)
        await asyncio.gather(*sent)
        assert len(worker.got) == 1


async def test_who_gives_up_while_connecting_does_not_take_the_connection_from_others() -> None:
    """The first of two cancels before the connection stands."""
    async with connected() as (worker, connections):
        first = asyncio.ensure_future(connections.deliver(worker.address(), b"1"))
        second = asyncio.ensure_future(connections.deliver(worker.address(), b"2"))
        await asyncio.sleep(0)
        first.cancel()
        await worker.has(b"2")
        worker.say(OK)
        await second
        assert first.cancelled()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((2**20).to_bytes(4, "big"), "ack_size: 1048576 bytes: must be <= 4096"),
        (OK + OK, "an acknowledgement of nothing"),
    ],
)
async def test_what_is_no_acknowledgement_ends_the_connection(said: bytes, why: str) -> None:
    """Whatever else it says there can be no order any more."""
    async with connected() as (worker, connections):
        waits = await taken(worker, connections)
        sent = asyncio.ensure_future(connections.deliver(worker.address(), b"y"))
        await worker.has(b"x", b"y")
        worker.say(said)
        await asyncio.gather(sent, return_exceptions=True)
        error = await asyncio.wait_for(waits, 5)
        assert error.detail.startswith(why)
        assert connections.open == 0


async def test_an_idle_connection_is_closed_but_not_one_that_somebody_watches() -> None:
    """After `idle_s` without a frame; a request that queues in its worker may take longer than that."""
    clock = ManualClock()
    async with connected(clock, idle_s=30) as (worker, connections):
        waits = await taken(worker, connections)
        await clock.advance(300)
        assert connections.open == 1
        waits.cancel()
        await clock.advance(26)
        assert connections.open == 1
        await clock.advance(9)
        await eventually(lambda: worker.ended[0])
        assert connections.open == 0


async def test_a_connection_to_a_worker_that_left_is_closed_when_nobody_waits_on_it() -> None:
    """It drains: what it took is still answered; a new frame would go over a new connection."""
    clock, alive = ManualClock(), []
    async with connected(clock, alive=lambda: alive) as (worker, connections):
        alive.append(worker.address())
        waits = await taken(worker, connections)
        await clock.advance(10)
        alive.clear()
        await clock.advance(10)
        assert (connections.open, worker.ended[0]) == (1, False)
        await taken(worker, connections)
        assert connections.open == 2
        waits.cancel()
        await eventually(lambda: worker.ended[0])


async def test_closing_ends_everything_and_leaves_no_task_behind() -> None:
    """Who waits for an acknowledgement is told; who watches is cancelled, for nothing was lost."""
    before = asyncio.all_tasks()
    async with Worker() as worker:
        async with WorkerConnections(SystemClock()) as connections:
            watches = await taken(worker, connections)
            sent = asyncio.ensure_future(connections.deliver(worker.address(), b"y"))
            await worker.has(b"x", b"y")
        with pytest.raises(WorkerUnreachable, match="the relay is closing"):
            await sent
        assert watches.cancelled()
        with pytest.raises(WorkerUnreachable, match="the relay is closing"):
            await connections.deliver(worker.address(), b"z")
        await eventually(lambda: all(worker.ended))
    assert asyncio.all_tasks() == before


async def test_closing_while_connecting_is_told_too() -> None:
    """The connection is neither made nor left half made."""
    before = asyncio.all_tasks()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        async with WorkerConnections(SystemClock()) as connections:
            sent = asyncio.ensure_future(connections.deliver(Address("127.0.0.1", port, "a/generate"), b"f"))
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerUnreachable, match="the relay is closing"):
            await sent
        for filler in fillers:
            filler.close()
    assert asyncio.all_tasks() == before
