"""How an answer's bytes get from the worker that makes them to the requester that waits, and how they end.

Owns: the listener workers dial back to; the connection to each requester; copying bytes both ways unread, at
      the pace of the slower side; seeing the first data, the end, and who left.
Does not own: which worker is asked (router.py), how a request reaches it (relay_workers.py), what bytes mean
      (frames.py).
Invariant: a requester gets handshake and prologue once and at once, so that it can cancel from then on; after
           that only bytes of one attempt. Every connection belongs to a call, and ends with it.
Source: ai-dynamo 1.4.2 on the wire (frames.py). A worker goes on after a half-close and stops at a reset; a
        requester that has all closes first.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, cast

import structlog

from dynamo_poa.answers import AnswerWatch
from dynamo_poa.errors import FrameError, WorkerUnreachable
from dynamo_poa.frames import (
    Request,
    TwoPartParser,
    control,
    error_answer,
    error_of,
    handshake,
    prologue,
    split_address,
    subject_of,
)
from dynamo_poa.values import Address, Outcome, WorkerKey

log = structlog.get_logger()

DIAL_BACK_S = 10.0  # from a request's acknowledgement to the worker's handshake; Dynamo itself waits for ever
CONNECT_S = 5.0  # to a requester, who listens before it asks
LINGER_S = 10.0  # from an answer's end until its requester closes; Dynamo's own bound
# What is held of an answer while its requester does not read. Tokens are hundreds of bytes.
HIGH_WATER_BYTES = 256 * 1024

CHANGED = ("routing", "bootstrap_info")
READ = ("token_ids", "router_config_override", *CHANGED)

Deliver = Callable[[Address, bytes], Awaitable["asyncio.Future[WorkerUnreachable]"]]
Locate = Callable[[int], Address | None]


class Answers:
    """The listener workers dial back to. Enter it, then `call` for each request.

    address:  what to name as the return address
    """

    def __init__(self, host: str) -> None:
        self.address = ""
        self._host = host
        self._server: asyncio.Server | None = None
        self._awaited: dict[str, _Attempt] = {}  # by subject
        self._sides: set[_Side] = set()

    async def __aenter__(self) -> Self:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _WorkerSide(self), self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for side in list(self._sides):
            side.abort()
        await self._server.wait_closed()

    @property
    def open(self) -> int:
        """Return how many connections there are, of both sides."""
        return len(self._sides)

    def expect(self, attempt: "_Attempt") -> None:
        """Take a worker's connection that names this subject for this attempt's."""
        self._awaited[attempt.subject] = attempt

    def forget(self, attempt: "_Attempt") -> None:
        """Turn away whoever names this subject from now on."""
        self._awaited.pop(attempt.subject, None)

    def take(self, subject: str) -> "_Attempt | None":
        """Return whose answer a worker has dialled back with, once."""
        return self._awaited.pop(subject, None)

    def opened(self, side: "_Side") -> None:
        """Keep a connection."""
        self._sides.add(side)

    def closed(self, side: "_Side") -> None:
        """Let go of a connection."""
        self._sides.discard(side)


class RelayCall:
    """One request that came over the relay: router.Call."""

    def __init__(self, request: Request, answers: Answers, deliver: Deliver, locate: Locate) -> None:
        self._request, self._answers, self._deliver, self._locate = request, answers, deliver, locate
        self._stopped = False
        self._attempt: _Attempt | None = None
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._requester = _RequesterSide(self, answers, handshake(request.subject) + prologue())

    def id(self) -> str:
        """Return the request's id, the same on both legs."""
        return self._request.id

    def body(self) -> dict[str, Any]:
        """Return the fields of the request that routing reads or changes.

        Raises:   FrameError.
        """
        fields = {name: self._request.get(name) for name in READ}
        return {name: value for name, value in fields.items() if value is not None}

    async def open(self) -> None:
        """Reach the requester; one that cannot be reached has gone, and the call is stopped."""
        host, port = split_address(self._request.address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self._requester, host, port)
        except OSError:  # TimeoutError is one
            self.requester_left()

    @property
    def requester_waits(self) -> bool:
        """Tell whether the requester cannot take more bytes now."""
        return self._requester.waits

    def is_stopped(self) -> bool:
        """Tell whether the requester has gone or wants no more."""
        return self._stopped

    def stop_generating(self) -> None:
        """Ask the worker to end; its answer then stays incomplete."""
        self._stopped = True
        if self._attempt is not None:
            self._attempt.stop()
        self._finish(Outcome.CANCELLED)

    async def send(self, request: dict[str, Any], worker: WorkerKey) -> bool:
        """Send and wait for the first bytes of the answer.

        Returns:  whether they are a first token, not an error.
        Raises:   WorkerUnreachable, also when the requester has gone meanwhile: then `is_stopped`.
        """
        address = self._locate(worker.worker_id)
        if address is None:
            raise WorkerUnreachable(worker.worker_id, "it has left discovery")
        attempt = self._attempt = _Attempt(self, worker)
        routing = request.get("routing") or {}
        changes = {name: request[name] for name in CHANGED if name in request}
        changes["routing"] = {**routing, "dp_rank": worker.dp_rank}
        frame = self._request.sent_to(address.path, self._answers.address, changes, subject=attempt.subject)
        self._answers.expect(attempt)
        try:
            if self._stopped:
                raise WorkerUnreachable(worker.worker_id, "the requester has gone")
            return await attempt.begun(await self._deliver(address, frame))
        except (WorkerUnreachable, asyncio.CancelledError):
            attempt.leave()
            raise

    async def ended(self) -> Outcome:
        """Wait for the end of the answer and tell how it went."""
        return await self._ended

    def fail(self, message: str) -> None:
        """Tell the requester that there will be no answer, as Dynamo tells of a handler that failed."""
        if not self._ended.done():
            self._requester.write(error_answer(message))
            self._requester.linger()
        self._finish(Outcome.FAILED)

    # What the two sides report.

    def pass_on(self, data: bytes) -> None:
        """Hand the worker's bytes to the requester."""
        self._requester.write(data)

    def answer_ended(self, outcome: Outcome) -> None:
        """Take note that the worker has said all it will."""
        self._finish(outcome)
        if outcome is Outcome.OK or self._attempt is None or self._attempt.watch.final:
            self._requester.linger()
        else:
            self._requester.abort()  # cut off, as a worker that dies would

    def asked(self, data: bytes) -> None:
        """Hand the requester's bytes, `stop` or `kill`, to the worker."""
        self._stopped = True
        if self._attempt is not None:
            self._attempt.pass_back(data)

    def requester_left(self) -> None:
        """End what the worker does for a requester that has gone."""
        if not self._ended.done():
            self._stopped = True
        self._finish(Outcome.CANCELLED)
        if self._attempt is not None:
            self._attempt.leave()

    def hold(self, paused: bool) -> None:
        """Let the worker's side wait while the requester does not read."""
        if self._attempt is not None:
            self._attempt.hold(paused)

    def _finish(self, outcome: Outcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)


class _Attempt:
    """One worker's try at a call."""

    def __init__(self, call: RelayCall, worker: WorkerKey) -> None:
        self.subject = str(uuid.uuid4())  # of its own: a worker given up may still dial back
        self.watch = AnswerWatch()
        self._call, self._worker = call, worker
        loop = asyncio.get_running_loop()
        self._dialled: asyncio.Future[None] = loop.create_future()
        self._first: asyncio.Future[bool] = loop.create_future()
        self._side: _WorkerSide | None = None
        self._given_up = False
        self._head = b""

    async def begun(self, lost: "asyncio.Future[WorkerUnreachable]") -> bool:
        """Wait for the first data; `lost` ends when the worker's process has gone."""
        try:
            started: set[asyncio.Future[Any]] = {lost, self._dialled, self._first}
            await asyncio.wait(started, timeout=DIAL_BACK_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._dialled.done() and not self._first.done():
                detail = f"no answer begun within {DIAL_BACK_S:g} s of its acknowledgement"
                raise lost.result() if lost.done() else WorkerUnreachable(self._worker.worker_id, detail)
        finally:
            lost.cancel()
        return await self._first

    def leave(self) -> None:
        """Have nothing more to do with the worker: its connection is reset, which stops it."""
        self._given_up = True
        self._call._answers.forget(self)
        if self._side is not None:
            self._side.abort()
        if not self._first.done():
            self._first.set_exception(WorkerUnreachable(self._worker.worker_id, "the requester has gone"))
            self._first.exception()  # whoever waits sees it; nobody need

    def stop(self) -> None:
        self.pass_back(control("stop"))
        self.leave()

    def pass_back(self, data: bytes) -> None:
        if self._side is not None:
            self._side.write(data)

    def hold(self, paused: bool) -> None:
        if self._side is not None:
            self._side.hold(paused)

    def dialled(self, side: "_WorkerSide") -> bool:
        """Take the worker's connection; tell whether it is wanted."""
        if self._given_up:
            return False
        self._side = side
        side.hold(self._call.requester_waits)
        self._dialled.set_result(None)
        return True

    def refused(self, error: str) -> None:
        """Take note of an error instead of an answer: the worker could not begin."""
        if not self._first.done():
            self._first.set_exception(WorkerUnreachable(self._worker.worker_id, error))

    def data(self, data: bytes) -> None:
        """Take bytes of the answer."""
        watch = self.watch
        watch.feed(data)
        if not self._first.done():
            if not watch.data_frames and not watch.final:
                self._head += data  # of a frame's head: another attempt may still follow this one
                return
            data = self._head + data
            self._first.set_result(watch.failure is None)
        self._call.pass_on(data)
        if watch.final:
            self._call.answer_ended(Outcome.OK if watch.complete else Outcome.FAILED)

    def lost(self) -> None:
        """Take note that the worker's connection has ended."""
        if self._given_up:
            return
        if not self._first.done():
            detail = "the connection ended before the first token"
            self._first.set_exception(WorkerUnreachable(self._worker.worker_id, detail))
        elif not self.watch.final:
            self._call.answer_ended(Outcome.FAILED)


class _Side(asyncio.Protocol):
    """One connection of a call."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._answers.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the transport."""
        self._transport = None
        self._answers.closed(self)

    def write(self, data: bytes) -> None:
        """Send what can still be sent."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Reset the connection."""
        if self._transport is not None:
            self._transport.abort()


class _WorkerSide(_Side):
    """A worker's dial-back: handshake and prologue are for us, all that follows is for the requester."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._parser: TwoPartParser | None = TwoPartParser()
        self._attempt: _Attempt | None = None
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give it some time to say who it is."""
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(DIAL_BACK_S, self.abort)

    def data_received(self, data: bytes) -> None:
        """Take the worker's bytes."""
        if self._parser is None:
            assert self._attempt is not None
            self._attempt.data(data)
            return
        try:
            self._parser.feed(data)
            self._begin()
        except FrameError as error:
            log.warning("poa.relay.answer_refused", reason=error.reason, detail=error.detail)
            self.abort()

    def eof_received(self) -> bool:
        """Close: a worker that has no more to say says nothing."""
        return False

    def pause_writing(self) -> None:
        """Leave it: a requester sends 30 bytes at most."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the attempt."""
        super().connection_lost(exc)
        self._deadline.cancel()
        if self._attempt is not None:
            self._attempt.lost()

    def hold(self, paused: bool) -> None:
        """Read no more, or go on reading."""
        if self._transport is None or paused == self._held:
            return
        self._held = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _begin(self) -> None:
        """Read handshake and prologue; hand on what came behind them.

        Raises:   FrameError.
        """
        assert self._parser is not None
        while (part := self._parser.next()) is not None:
            if self._attempt is None:
                attempt = self._answers.take(subject_of(part))
                if attempt is None or not attempt.dialled(self):
                    self.abort()  # of a call that is over
                    return
                self._attempt = attempt
                self._deadline.cancel()
                continue
            error = error_of(part)
            if error is not None:
                self._attempt.refused(error)
                self.abort()
                return
            rest, self._parser = self._parser.pending, None
            if rest:
                self._attempt.data(rest)
            return


class _RequesterSide(_Side):
    """The connection a requester awaits its answer on."""

    def __init__(self, call: RelayCall, answers: Answers, greeting: bytes) -> None:
        super().__init__(answers)
        self.waits = True  # until it is connected
        self._pending: bytes | None = greeting  # and what of an answer came before that
        self._call = call
        self._lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the answer come."""
        super().connection_made(transport)
        pending, self._pending = self._pending, None
        self.write(pending or b"")
        self.resume_writing()

    def write(self, data: bytes) -> None:
        """Send what can still be sent; before the connection is there it is kept."""
        if self._pending is not None:
            self._pending += data
        else:
            super().write(data)

    def data_received(self, data: bytes) -> None:
        """Hand `stop` and `kill` on; a requester says nothing else."""
        self._call.asked(data)

    def eof_received(self) -> bool:
        """Go on: a requester that has closed its half may still read."""
        return self._lingering is None

    def pause_writing(self) -> None:
        """Let this answer's worker wait, and no other."""
        self.waits = True
        self._call.hold(True)

    def resume_writing(self) -> None:
        """Go on."""
        self.waits = False
        self._call.hold(False)

    def linger(self) -> None:
        """Wait for the requester to close, as it does once it has all."""
        if self._lingering is None and self._transport is not None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call."""
        super().connection_lost(exc)
        if self._lingering is not None:
            self._lingering.cancel()
        self._call.requester_left()
