"""A requester, workers and Dynamo's own endpoint that speak the real frames over real sockets, and a relay.

Choosing and booking are a real Leg's, on the fakes of fakes.py.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self

import msgspec
import pytest
from fakes import A, B, EventList, FakeDirectory, FakePool, prefill_card
from waiting import eventually

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.complaints import Complaints
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import FrameError
from dynamo_poa.frames import (
    ACCEPTED,
    FINAL_BODY,
    Request,
    RequestFrame,
    RequestParser,
    control,
    handshake,
    prologue,
    read_request,
    request_frame,
    split_address,
    two_part,
)
from dynamo_poa.handover import Handovers
from dynamo_poa.picker import Picker
from dynamo_poa.relay import Relay, Route
from dynamo_poa.relay_answers import Answers
from dynamo_poa.relay_call import RelayCall
from dynamo_poa.relay_workers import WorkerConnections
from dynamo_poa.router import Leg
from dynamo_poa.trip import RouterStats
from dynamo_poa.values import Address, Outcome, Role, RouterParams
from dynamo_poa.wire import Chosen, Ended, FirstToken

OWN = 0xD00D
FINAL, SENTINEL = two_part(b"", FINAL_BODY), control("sentinel")


def chunk(*token_ids: int, finish_reason: object = None) -> bytes:
    """Return a data frame as an engine makes it."""
    data = {"token_ids": list(token_ids), "finish_reason": finish_reason}
    return two_part(b"", msgspec.msgpack.encode({"data": {"data": data}, "complete_final": False}))


ANSWER = (chunk(1000), chunk(1001), chunk(1002, finish_reason="length") + FINAL + SENTINEL)


class Dial:
    """A worker's connection to the return address it was given."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request, self.reader, self.writer = request, reader, writer
        self.heard = bytearray()
        self.ended = False
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while data := await self.reader.read(65536):
                self.heard += data
        except OSError:
            pass
        finally:
            self.ended = True

    def say(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def begin(self) -> None:
        self.say(handshake(self.request.subject), prologue())

    def reset(self) -> None:
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        await self._listening


Script = Callable[[Dial], Awaitable[None]]


async def answers(dial: Dial) -> None:
    """Answer as a worker does that has nothing to complain of."""
    dial.begin()
    for frame in ANSWER:
        dial.say(frame)
        await asyncio.sleep(0)


class FrameListener:
    """Takes request frames, acknowledges them in order, and dials back to play a script.

    frames:  as they came
    ack:     what is answered to the next frames; None for nothing at all
    script:  None never dials back
    """

    def __init__(self) -> None:
        self.frames: list[RequestFrame] = []
        self.dials: list[Dial] = []
        self.ack: bytes | None = ACCEPTED
        self.script: Script | None = answers
        self.before_ack: Callable[[], Awaitable[Any]] | None = None
        self.writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
        for dial in self.dials:
            await dial.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def requests(self) -> list[Request]:
        return [read_request(frame) for frame in self.frames]

    def address(self, worker_id: int) -> Address:
        return Address("127.0.0.1", self._port, f"{worker_id:x}/generate")

    async def close(self) -> None:
        """Listen no more, and close what there is."""
        assert self._server is not None
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        parser = RequestParser()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (frame := parser.next()) is not None:
                    self.frames.append(frame)
                    if self.before_ack is not None:
                        await self.before_ack()
                    if self.ack is None:
                        continue
                    writer.write(self.ack)
                    if self.ack == ACCEPTED and self.script is not None:
                        task = asyncio.create_task(self._dial(frame, self.script))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
        except OSError:
            pass
        finally:
            writer.close()

    async def _dial(self, frame: RequestFrame, script: Script) -> None:
        try:
            request = read_request(frame)
        except FrameError:
            return
        dial = await self.dial(request)
        await script(dial)

    async def dial(self, request: Request) -> Dial:
        """Connect to the address a request names."""
        dial = Dial(request, *await asyncio.open_connection(*split_address(request.address)))
        self.dials.append(dial)
        return dial


class Asked:
    """One request as its requester sees it.

    heard:    the answer's bytes so far
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.heard = bytearray()
        self.ended = False
        self.connected = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.writer: asyncio.StreamWriter | None = None

    @property
    def answer(self) -> bytes:
        """Return what came after handshake and prologue."""
        begin = handshake(self.subject) + prologue()
        assert bytes(self.heard[: len(begin)]) == begin[: len(self.heard)]
        return bytes(self.heard[len(begin) :])

    async def has(self, *frames: bytes) -> None:
        await eventually(lambda: self.answer == b"".join(frames))

    async def whole(self) -> bytes:
        """Wait for the final frame, close as a requester does, and return the answer."""
        await eventually(lambda: self.heard.endswith(FINAL + SENTINEL))
        self.close()
        return self.answer

    def say(self, word: Any) -> None:
        assert self.writer is not None
        self.writer.write(control(word))

    def close(self) -> None:
        assert self.writer is not None
        self.writer.close()

    def half_close(self) -> None:
        assert self.writer is not None
        self.writer.write_eof()

    def reset(self) -> None:
        assert self.writer is not None
        self.writer.transport.abort()


class Requester:
    """Listens for answers, and asks over one kept connection.

    acks:  all that came back on it
    """

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.acks = bytearray()
        self.hung_up = False
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answered, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for asked in self.asked.values():
            asked.reading.set()
            if asked.writer is not None:
                asked.reset()
        self.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def connect(self, port: int) -> None:
        self.hung_up = False
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._tasks.append(asyncio.create_task(self._listen(reader, self._writer)))

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def frame(self, path: str = f"{OWN:x}/generate", **changes: Any) -> tuple[Asked, bytes]:
        """Return a request frame and what its answer will be seen by."""
        number = next(self._numbers)
        subject = f"subject-{number}"
        request_id = changes.pop("id", f"r{number}")
        info = {
            "address": changes.pop("address", self.address),
            "subject": subject,
            "context": request_id,
            "stream_type": "response",
        }
        text = {
            "id": request_id,
            "request_type": "single_in",
            "response_type": "many_out",
            "payload_codec": (codec := changes.pop("codec", "msgpack")),
            "connection_info": {"transport": "tcp_server", "info": json.dumps(info)},
        }
        body = {"model": "m", "token_ids": [1, 2, 3], "temperature": 0.7, **changes}
        encode = msgspec.json.encode if codec == "json" else msgspec.msgpack.encode
        payload = two_part(json.dumps(text).encode(), encode(body))
        headers = json.dumps({"x-endpoint-path": path, "request-id": request_id}).encode()
        asked = self.asked[subject] = Asked(subject)
        return asked, request_frame(path, headers, payload)

    def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def ask(self, **changes: Any) -> Asked:
        """Send one request."""
        asked, frame = self.frame(**changes)
        self.write(frame)
        return asked

    async def acknowledged(self, count: int) -> None:
        await eventually(lambda: bytes(self.acks) == ACCEPTED * count)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.acks += data
        except OSError:
            pass
        finally:
            self.hung_up = True
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: Asked | None = None
        first = b""
        try:
            while data := await reader.read(65536):
                if asked is None:
                    first += data
                    asked = next((a for s, a in self.asked.items() if f'"{s}"'.encode() in first), None)
                    if asked is None:
                        continue
                    asked.writer, data = writer, first
                    asked.connected.set()
                asked.heard += data
                if not asked.reading.is_set():
                    writer.transport.pause_reading()
                    await asked.reading.wait()
                    writer.transport.resume_reading()
        except OSError:
            pass
        finally:
            if asked is not None:
                asked.ended = True
            writer.close()


class Holder:
    """Parameters that stay as they are."""

    current = RouterParams(revision=7, router_temperature=0.0, overlap_weight=1.0)


class RelayBench:
    """A relay before two workers, A and B, with a requester connected to it."""

    def __init__(
        self,
        role: Role = Role.AGGREGATED,
        *,
        handovers: Handovers | None = None,
        clock: Clock | None = None,
        ack_timeout_s: float = 5.0,
        relay: dict[str, Any] | None = None,
        params: Any = None,
        picker: Picker | None = None,
        **answers: Any,
    ) -> None:
        self.clock = clock or SystemClock()
        self.pool = FakePool([A, B], role)
        self.events = EventList()
        self.stats = RouterStats()
        self.avoid = AvoidList(15.0, self.clock)
        self.leg = Leg(
            role,
            self.pool,
            override=lambda params, preset: {"router_temperature": params.router_temperature},
            params=params or Holder(),
            events=self.events,
            directory=FakeDirectory(prefill_card(A, 7001), prefill_card(B, 7002)),
            handovers=handovers,
            avoid=self.avoid,
            stats=self.stats,
            config=RouterConfig(),
            clock=self.clock,
            picker=picker,
        )
        self.role = role
        self.calls: list[RelayCall] = []
        self.workers = {A: FrameListener(), B: FrameListener()}
        self.own = FrameListener()
        self.requester = Requester()
        self._ack_timeout_s, self._relay, self._answers = ack_timeout_s, relay or {}, answers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        for listener in (*self.workers.values(), self.own, self.requester):
            await enter(listener)  # type: ignore[arg-type]
        self.connections = WorkerConnections(SystemClock(), ack_timeout_s=self._ack_timeout_s)
        await enter(self.connections)
        self.answers = await enter(Answers("127.0.0.1", Complaints(self.clock), **self._answers))
        self.relay = await enter(
            Relay("127.0.0.1", self.answers, self.connections.deliver, self.clock, **self._relay)
        )
        self.relay.serve(Route(self._forward, self.own.address(OWN), lambda worker: self.locate(worker)))
        await self.requester.connect(self.relay.port)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    def locate(self, worker_id: int) -> Address | None:
        listener = self.workers.get(worker_id)
        return None if listener is None else listener.address(worker_id)

    async def _forward(self, body: dict[str, Any], call: RelayCall) -> None:
        self.calls.append(call)
        await self.leg.forward(body, call)

    @contextmanager
    def connect_requesters_after(self, gate: asyncio.Event) -> Iterator[None]:
        """Have the way to a requester take until then."""
        loop = asyncio.get_running_loop()
        connect, own_port = loop.create_connection, self.requester.address.rpartition(":")[2]

        async def late(protocol: Any, host: str, port: int) -> Any:
            if port == int(own_port):
                await gate.wait()
            return await connect(protocol, host, port)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loop, "create_connection", late)
            yield

    def script(self, script: Script | None) -> None:
        """Have both workers play it."""
        for worker in self.workers.values():
            worker.script = script

    @property
    def dials(self) -> list[Dial]:
        """Return the workers' dial-backs, A's first."""
        return [dial for worker in self.workers.values() for dial in worker.dials]

    async def dialled(self, count: int = 1) -> Dial:
        """Wait until workers have dialled back, and return the last of A, or else of B."""
        await eventually(lambda: len(self.dials) >= count)
        return self.dials[count - 1]

    async def at_rest(self, within_s: float = 5.0) -> None:
        """Wait until nothing is left of any call."""
        await eventually(
            lambda: (
                (self.relay.running, self.answers.open, self.answers.awaited, self.pool.open_bookings())
                == (0, 0, 0, [])
            ),
            within_s,
        )
        assert self.stats.in_flight[self.role] == 0

    @property
    def said(self) -> list[str]:
        """Return the kinds of events reported, in order."""
        return [type(event).__name__ for event in self.events]

    def outcomes(self) -> list[Outcome]:
        return [event.outcome for event in self.events if isinstance(event, Ended)]

    def chosen(self) -> list[Chosen]:
        return [event for event in self.events if isinstance(event, Chosen)]

    def first_tokens(self) -> list[FirstToken]:
        return [event for event in self.events if isinstance(event, FirstToken)]
